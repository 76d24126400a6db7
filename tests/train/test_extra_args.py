"""Optimizers that ask for the loss, against the same steps on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh

from jaxzero import LossScale, zero3


@pytest.fixture(autouse=True)
def promotion() -> Any:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def plateau() -> Any:
    # Too fast to improve in each step, so that it has something to react to.
    return optax.chain(
        optax.sgd(0.9), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    )


def by_value() -> Any:
    def update(updates: Any, state: Any, params: Any, *, value: Any, grad: Any) -> Any:
        del params
        changed = jax.tree.map(lambda u, g: -(u + g) * value / 10, updates, grad)
        return changed, state + value

    return optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(()), update)


@pytest.mark.parametrize("optimizer", [plateau, by_value])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"clip_norm": 0.3},
        {"loss_scale": LossScale(initial=4.0), "clip_norm": 0.3},
    ],
    ids=str,
)
def test_they_get_the_loss_and_gradient_of_all_devices(
    make_mesh: MakeMesh, optimizer: Any, options: Any
) -> None:
    random = np.random.default_rng(0)
    data = random.normal(size=(6, 16, 5)).astype(np.float32)
    params = {"w": np.ones(5, np.float32), "b": np.float32(0.5)}
    chosen = optimizer()
    zero = zero3(loss, chosen, make_mesh(8), **options)
    state = zero.init(params)
    for batch in data:
        state, _ = jax.block_until_ready(zero.step(state, batch))
    own, want = chosen.init(params), params
    for batch in data:
        value, grad = jax.value_and_grad(loss)(want, batch)
        norm = optax.tree.norm(grad)
        share = jnp.minimum(1.0, options.get("clip_norm", np.inf) / norm)
        updates = jax.tree.map(lambda g, share=share: g * share, grad)
        updates, own = chosen.update(updates, own, want, value=value, grad=grad)
        want = optax.apply_updates(want, updates)
    found = zero.export_state(state)
    for one, other in zip(
        jax.tree.leaves((found["params"], found["opt_state"])),
        jax.tree.leaves((want, own)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "error", "words"),
    [
        (optax.lbfgs, TypeError, "asks for .*value_fn.*line search"),
        (optax.polyak_sgd, ValueError, "reduce_sum on shards"),
    ],
)
def test_one_that_asks_for_too_much_is_refused(
    make_mesh: MakeMesh, optimizer: Any, error: Any, words: str
) -> None:
    zero = zero3(loss, optimizer(), make_mesh(2))
    with pytest.raises(error, match=words):
        zero.init({"w": np.ones(5, np.float32), "b": np.float32(0.5)})
