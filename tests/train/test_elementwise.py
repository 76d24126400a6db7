"""Optimizers that would compute something else on shards are refused."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from conftest import MakeMesh

import jaxzero
from jaxzero import Policy, zero3

LIKE = {
    "rows": jax.ShapeDtypeStruct((8, 6), jnp.float32),
    "flat": jax.ShapeDtypeStruct((5, 3), jnp.float32),
    "bias": jax.ShapeDtypeStruct((), jnp.float32),
}
LAYOUTS: dict[str, Any] = {
    "default": {},
    "flat": {"cuts": "flat"},
    "small-whole": {"policy": Policy(min_shard_numel=10)},
    "stacked": {"stacked": "rows"},
}


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def look(make_mesh: MakeMesh, optimizer: Any, **options: Any) -> Any:
    """Returns the shapes of a state, or raises as `init` does."""
    mesh = make_mesh(4, kind="explicit")
    zero = zero3(lambda params, batch: jnp.mean(batch), optimizer, mesh, **options)
    return zero.abstract_state(LIKE)


DECAY_MATRICES = optax.adamw(
    1e-3, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
)
BY_FAN_IN = optax.stateless(
    lambda updates, _: jax.tree.map(
        lambda leaf: leaf / max(leaf.shape, default=1), updates
    )
)
MIXING: dict[str, tuple[Any, str]] = {
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        "reduce_sum",
    ),
    "clip_by_block_rms": (
        optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(1.0)),
        "reduce_sum",
    ),
    "adafactor": (optax.adafactor(1e-3), "reduce_sum"),
    "lamb": (optax.lamb(1e-3), "reduce_sum"),
    "lars": (optax.lars(1e-3), "reduce_sum"),
    "fromage": (optax.fromage(1e-3), "reduce_sum"),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(1e-3), 3), "reduce_and"),
    "add_noise": (
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1.0)),
        "random_bits",
    ),
    "in-masked": (
        optax.masked(optax.clip_by_global_norm(1.0), lambda params: True),
        "reduce_sum",
    ),
}
SHAPED: dict[str, Any] = {
    "muon": optax.contrib.muon(1e-3),
    "decay-matrices": DECAY_MATRICES,
    "centralize": optax.chain(optax.centralize(), optax.sgd(1.0)),
    "by-fan-in": BY_FAN_IN,
}


@pytest.mark.parametrize("layout", ["default", "flat"])
@pytest.mark.parametrize("name", MIXING)
def test_elements_that_are_mixed(make_mesh: MakeMesh, name: str, layout: str) -> None:
    optimizer, primitive = MIXING[name]
    with pytest.raises(ValueError) as error:
        look(make_mesh, optimizer, **LAYOUTS[layout])
    message = str(error.value)
    assert primitive in message
    assert "clip_norm=" in message and "skip_nonfinite=True" in message


@pytest.mark.parametrize("name", SHAPED)
def test_leaves_that_are_treated_by_shape(make_mesh: MakeMesh, name: str) -> None:
    with pytest.raises(ValueError, match=r"optimizer computes") as error:
        look(make_mesh, SHAPED[name], cuts="flat")
    assert "ndim" in str(error.value)


def test_the_message_names_update_or_state(make_mesh: MakeMesh) -> None:
    with pytest.raises(ValueError, match=r"update of leaf \['bias'\] with reduce_sum"):
        look(make_mesh, MIXING["clip_by_block_rms"][0])
    zero_nans = optax.chain(optax.zero_nans(), optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"\[0\]\.found_nan\['bias'\] of its state"):
        look(make_mesh, zero_nans)


def test_a_state_that_differs_by_rank(make_mesh: MakeMesh) -> None:
    careful = optax.MultiSteps(
        optax.adam(1e-3), 2, should_skip_update_fn=optax.skip_not_finite
    )
    with pytest.raises(ValueError, match=r"num_not_finite.*differs by rank"):
        look(make_mesh, careful)


def test_shapes_may_count_where_the_cut_keeps_them(make_mesh: MakeMesh) -> None:
    look(make_mesh, DECAY_MATRICES, cuts=dict.fromkeys(LIKE) | {"flat": 0})
    look(make_mesh, optax.contrib.muon(1e-3), cuts="whole")


ALIKE: dict[str, Any] = {
    "adabelief": optax.adabelief(1e-3),
    "adadelta": optax.adadelta(1e-3),
    "adagrad": optax.adagrad(1e-3),
    "adamax": optax.adamax(1e-3),
    "adan": optax.adan(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "lion": optax.lion(1e-3),
    "nadamw": optax.nadamw(1e-3),
    "optimistic": optax.optimistic_gradient_descent(1e-3),
    "radam": optax.radam(1e-3),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "rprop": optax.rprop(1e-3),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-3),
    "sign_sgd": optax.sign_sgd(1e-3),
    "yogi": optax.yogi(1e-3),
    "clip-by-value": optax.chain(optax.clip(0.1), optax.adam(1e-3), optax.ema(0.9)),
    "multi-steps": optax.MultiSteps(optax.adamw(1e-3), 2),
    "scheduled": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8)
    ),
    "clip-on-shards": optax.chain(
        jaxzero.clip_by_global_norm(1.0, "data"), optax.adam(1e-3)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALIKE)
def test_elements_that_are_treated_alike(
    make_mesh: MakeMesh, name: str, layout: str
) -> None:
    look(make_mesh, ALIKE[name], **LAYOUTS[layout])


def test_clipping_that_knows_the_true_shapes(make_mesh: MakeMesh) -> None:
    """It takes shards only, so it cannot be compared with leaves in true shape."""
    clip = jaxzero.clip_by_global_norm(1.0, "data", like=LIKE)
    look(make_mesh, optax.chain(clip, optax.adam(1e-3)))


def rotate(updates: Any, _: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.roll(leaf, 1), updates)


def norm_in_a_loop(updates: Any, _: Any) -> Any:
    def body(_: Any, values: Any) -> Any:
        return [value / (1 + jnp.sum(value)) for value in values]

    leaves, structure = jax.tree.flatten(updates)
    return structure.unflatten(jax.lax.fori_loop(0, 2, body, leaves))


def norm_under_cond(updates: Any, _: Any) -> Any:
    def half(leaf: jax.Array) -> jax.Array:
        return jax.lax.cond(True, lambda x: x / jnp.max(x), lambda x: x, leaf)

    return jax.tree.map(half, updates)


def every_other(updates: Any, _: Any) -> Any:
    def of_leaf(leaf: jax.Array) -> jax.Array:
        even = jnp.arange(leaf.size).reshape(leaf.shape) % 2 == 0
        return jnp.where(even, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(of_leaf, updates)


def times_a_scalar(updates: Any, _: Any) -> Any:
    return updates | {"rows": updates["rows"] * updates["bias"]}


@pytest.mark.parametrize(
    "mix", [rotate, norm_in_a_loop, norm_under_cond, every_other, times_a_scalar]
)
def test_own_functions_are_looked_through(make_mesh: MakeMesh, mix: Any) -> None:
    with pytest.raises(ValueError, match="on shards; each rank sees 1/N"):
        look(make_mesh, optax.chain(optax.stateless(mix), optax.sgd(1.0)))


def test_sums_over_ranks_are_no_offence(make_mesh: MakeMesh) -> None:
    def shrink(updates: Any, _: Any) -> Any:
        total = sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(updates))
        total = jax.lax.psum(total, "data")
        return jax.tree.map(lambda leaf: leaf / (1 + total), updates)

    look(make_mesh, optax.chain(optax.stateless(shrink), optax.sgd(1.0)))


def test_positions_are_those_of_one_device(make_mesh: MakeMesh) -> None:
    """In leaves that are whole, and in tables that all ranks look up alike."""

    def scheduled(count: Any) -> jax.Array:
        return jnp.sum(jnp.where(jnp.arange(3) == count, jnp.ones(3), jnp.zeros(3)))

    look(make_mesh, optax.sgd(scheduled))
    look(make_mesh, optax.stateless(every_other), cuts="whole")
    look(make_mesh, optax.stateless(times_a_scalar), cuts="whole")
