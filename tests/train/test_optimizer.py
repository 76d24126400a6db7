"""Optimizers on shards against the same on one device: updates and their state."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import MakeMesh

import jaxzero
from jaxzero import zero3

STEPS = 5
CUTS = {"rows": None, "flat": None, "dim": 1, "whole": "whole", "scalar": None}
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 3e-2, 2, 8)

Tree = Any


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def init() -> Tree:
    random = np.random.default_rng(3)
    shapes = {
        "rows": (8, 5),
        "flat": (5, 7),
        "dim": (7, 6),
        "whole": (6, 1),
        "scalar": (),
    }
    return {
        name: np.float32(random.normal(size=shape) / 2)
        for name, shape in shapes.items()
    }


def loss(params: Tree, batch: Tree) -> jax.Array:
    hidden = jnp.tanh(batch @ params["rows"]) @ params["flat"]
    hidden = jnp.tanh(hidden) @ params["dim"]
    return jnp.mean(jnp.square(hidden @ params["whole"] + params["scalar"]))


def batches() -> list[np.ndarray]:
    random = np.random.default_rng(4)
    return [np.float32(random.normal(size=(16, 8))) for _ in range(STEPS)]


def named(params: Tree, *names: str) -> Tree:
    return {name: name in names for name in params}


def labels(params: Tree) -> Tree:
    return {name: "frozen" if name == "dim" else name[:1] for name in params}


SEVERAL = optax.multi_transform(
    {
        "r": optax.adamw(1e-2),
        "f": optax.sgd(1e-2, momentum=0.9),
        "w": optax.lion(1e-3),
        "s": optax.rmsprop(1e-2),
        "frozen": optax.set_to_zero(),
    },
    labels,
)
OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),
    "lion": optax.lion(1e-3, weight_decay=0.1),
    "sgd-nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "masked": optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1),
            lambda params: named(params, "rows", "flat"),
        ),
        optax.masked(
            optax.trace(0.9), lambda params: named(params, "dim", "whole", "scalar")
        ),
        optax.scale_by_learning_rate(0.05),
    ),
    "multi_transform": SEVERAL,
    "multi-steps": optax.MultiSteps(optax.adamw(1e-2), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        learning_rate=SCHEDULE, weight_decay=0.1
    ),
}


def unsharded(optimizer: Any) -> tuple[list[float], Tree, Tree]:
    """Returns losses, parameters and optimizer state of plain steps."""

    @jax.jit
    def step(params: Tree, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init()
    state = optimizer.init(params)
    losses = []
    for batch in batches():
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, params, state


def assert_equal_runs(mesh: Any, on_shards: Any, plain: Any) -> None:
    losses, params, opt_state = unsharded(plain)
    zero = zero3(loss, on_shards, mesh, cuts=CUTS)
    state = zero.init(init())
    found = []
    for batch in batches():
        state, metrics = zero.step(state, batch)
        found.append(float(metrics.loss))
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    exported = zero.export_state(state)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(
            (exported["params"], exported["opt_state"])
        ),
        jax.tree.leaves((params, opt_state)),
        strict=True,
    )
    for (keys, leaf), want in pairs:
        path = jax.tree_util.keystr(keys)
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype), path
        np.testing.assert_allclose(leaf, want, rtol=2e-4, atol=1e-5, err_msg=path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_one_device(make_mesh: MakeMesh, name: str) -> None:
    optimizer = OPTIMIZERS[name]
    assert_equal_runs(make_mesh(4, kind="explicit"), optimizer, optimizer)


@pytest.mark.parametrize("like", [None, jax.eval_shape(init)], ids=["types", "like"])
def test_clipping_in_a_chain_equals_that_of_one_device(
    make_mesh: MakeMesh, like: Any
) -> None:
    limit = 0.05
    on_shards = jaxzero.clip_by_global_norm(limit, "data", like=like, cuts=CUTS)
    plain = optax.clip_by_global_norm(limit)
    grads = jax.grad(loss)(init(), batches()[0])
    assert optax.tree.norm(grads) > limit
    assert_equal_runs(
        make_mesh(8),
        optax.chain(on_shards, optax.sgd(0.1, momentum=0.9)),
        optax.chain(plain, optax.sgd(0.1, momentum=0.9)),
    )


def test_what_is_no_moment_is_on_every_device(make_mesh: MakeMesh) -> None:
    zero = zero3(loss, OPTIMIZERS["inject_hyperparams"], make_mesh(4), cuts=CUTS)
    state = zero.init(init())
    for batch in batches()[:2]:
        state, _ = zero.step(state, batch)
        jax.block_until_ready(state)
    held = state.opt_state
    for scalar in (held.count, *held.hyperparams.values(), held.inner_state[0].count):
        assert scalar.sharding.is_fully_replicated
        assert len(scalar.addressable_shards) == 4
    moments = held.inner_state[0].mu
    assert {n: m.sharding for n, m in moments.items()} == {
        n: p.sharding for n, p in state.params.items()
    }
