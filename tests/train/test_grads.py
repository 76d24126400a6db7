"""Losses that meet other devices themselves: their gradients against NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh
from jax import lax

import jaxzero
from jaxzero import LossScale, Policy, zero3

WEIGHTS = np.float32([1, -2, 0.5])
MESHES: dict[str, Any] = {
    "8": (8, "data", {}),
    "2x4": ((2, 4), ("replica", "data"), {"replicate_axis": "replica"}),
    "tuple": ((2, 4), ("a", "b"), {"axis_name": ("a", "b")}),
}
EVERYWHERE: dict[str, Any] = {
    "8": "data",
    "2x4": ("data", "replica"),
    "tuple": ("b", "a"),
}


def errors(params: Any, batch: Any) -> jax.Array:
    w = jaxzero.gathered(lambda p: p["w"])(params)
    return batch["x"] @ w - batch["y"]


def averaged(params: Any, batch: Any, *, axes: Any) -> jax.Array:
    return lax.pmean(jnp.mean(errors(params, batch) ** 2), axes)


def divided(params: Any, batch: Any, *, axes: Any) -> jax.Array:
    squares = errors(params, batch) ** 2 * batch["mask"]
    return lax.psum(jnp.sum(squares), axes) / lax.psum(jnp.sum(batch["mask"]), axes)


def penalized(params: Any, batch: Any, *, axes: Any) -> jax.Array:
    """Differs by device only in a part that weighs nothing in the mean."""
    own = jnp.mean(batch["y"]) - lax.pmean(jnp.mean(batch["y"]), axes)
    return averaged(params, batch, axes=axes) + own


def data() -> Any:
    """Returns examples with as many that count in each microbatch."""
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(32, 3)).astype(np.float32),
        "y": random.normal(size=32).astype(np.float32),
        # Of the 4 (or twice 2) examples of a device, half count.
        "mask": np.tile(np.float32([1, 0]), 16),
    }


def expected(batch: Any, masked: bool) -> tuple[float, np.ndarray]:
    """Returns the loss of all examples and its gradient, in float64."""
    x, y, mask = (np.float64(batch[name]) for name in ("x", "y", "mask"))
    count = mask if masked else np.ones_like(mask)
    left = x @ np.float64(WEIGHTS) - y
    loss = np.sum(left**2 * count) / count.sum()
    return loss, 2 * (left * count) @ x / count.sum()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("loss", [averaged, divided, penalized])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuts": "whole"},
        {"layers": "layer"},
        {"accumulate": 2},
        {"accumulate": 2, "sync": "last"},
        {"accumulate": 2, "sync": "replicas_last"},
        {"accumulate": 2, "layers": "layer"},
        {"loss_scale": LossScale(initial=8.0)},
    ],
    ids=str,
)
def test_a_loss_that_is_equal_on_all_devices_counts_once(
    make_mesh: MakeMesh, loss: Any, mesh: str, options: Any
) -> None:
    shape, names, axes = MESHES[mesh]
    if options.get("sync") == "replicas_last" and "replicate_axis" not in axes:
        mesh, (shape, names, axes) = "2x4", MESHES["2x4"]
    meet = functools.partial(loss, axes=EVERYWHERE[mesh])
    zero = zero3(
        lambda params, batch: meet(params["layer"], batch),
        optax.sgd(1.0),
        make_mesh(shape, names),
        **{"axis_name": "data"} | axes | options,
    )
    batch = data()
    state = zero.init({"layer": {"w": WEIGHTS}})
    want, gradient = expected(batch, loss is divided)
    np.testing.assert_allclose(zero.evaluate(state, batch), want, rtol=1e-5)
    state, metrics = zero.step(state, batch)
    np.testing.assert_allclose(metrics.loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, np.linalg.norm(gradient), rtol=1e-5)
    moved = WEIGHTS - zero.export_state(state)["params"]["layer"]["w"]
    np.testing.assert_allclose(moved, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", ["data", "replica"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_equal_along_one_axis_of_two(
    make_mesh: MakeMesh, axes: str, accumulate: int
) -> None:
    zero = zero3(
        functools.partial(averaged, axes=axes),
        optax.sgd(1.0),
        make_mesh((2, 4), ("replica", "data")),
        replicate_axis="replica",
        accumulate=accumulate,
    )
    batch = data()
    want, gradient = expected(batch, False)
    _, metrics = zero.step(zero.init({"w": WEIGHTS}), batch)
    np.testing.assert_allclose(metrics.loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, np.linalg.norm(gradient), rtol=1e-5)


def test_a_divisor_of_all_devices_goes_with_a_sum(make_mesh: MakeMesh) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        squares = errors(params, batch) ** 2 * batch["mask"]
        return jnp.sum(squares) / lax.psum(jnp.sum(batch["mask"]), "data")

    zero = zero3(loss, optax.sgd(1.0), make_mesh(8), policy=Policy(op="sum"))
    batch = data()
    want, gradient = expected(batch, True)
    _, metrics = zero.step(zero.init({"w": WEIGHTS}), batch)
    np.testing.assert_allclose(metrics.loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, np.linalg.norm(gradient), rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_auxiliary_results_that_are_equal_count_once(
    make_mesh: MakeMesh, accumulate: int
) -> None:
    def loss(params: Any, batch: Any) -> Any:
        counted = jnp.sum(batch["mask"])
        aux = {"all": lax.psum(counted, "data"), "own": counted, "constant": 3}
        return averaged(params, batch, axes="data"), aux

    zero = zero3(
        loss, optax.sgd(1.0), make_mesh(8), accumulate=accumulate, has_aux=True
    )
    state = zero.init({"w": WEIGHTS})
    _, found = zero.evaluate(state, data())
    _, metrics = zero.step(state, data())
    want = {"all": 16 / accumulate, "own": 2 / accumulate, "constant": 3}
    assert jax.tree.map(float, found) == want
    assert jax.tree.map(float, metrics.aux) == want


@pytest.mark.parametrize(
    ("policy", "asked"),
    [(Policy(op="sum"), r"op='sum'"), (Policy(divide_by=4), r"divide_by=4\.0")],
)
@pytest.mark.parametrize("axes", ["data", "replica", ("data", "replica")])
def test_what_is_equal_is_not_added_up(
    make_mesh: MakeMesh, policy: Policy, asked: str, axes: Any
) -> None:
    """Nothing tells a mean over devices from a sum over them."""

    def in_aux(params: Any, batch: Any) -> Any:
        own = jnp.mean(batch["x"]) * params["w"][0]
        return own, {"met": lax.pmean(own, axes), "constant": 3}

    make = functools.partial(
        zero3,
        optimizer=optax.sgd(1.0),
        mesh=make_mesh((2, 4), ("replica", "data")),
        replicate_axis="replica",
        policy=policy,
    )
    meets = make(functools.partial(averaged, axes=axes))
    state = meets.init({"w": WEIGHTS})
    for call in (meets.step, meets.evaluate):
        with pytest.raises(ValueError, match=rf"the loss is equal.*{asked}.*part of"):
            call(state, data())
    meets = make(in_aux, has_aux=True)
    with pytest.raises(ValueError, match=rf"aux leaf \['met'\] is equal.*{asked}"):
        meets.evaluate(state, data())


def test_an_axis_of_one_device_adds_up_nothing(make_mesh: MakeMesh) -> None:
    zero = zero3(
        functools.partial(averaged, axes="data"),
        optax.sgd(1.0),
        make_mesh(1),
        policy=Policy(op="sum"),
    )
    found = zero.evaluate(zero.init({"w": WEIGHTS}), data())
    np.testing.assert_allclose(found, expected(data(), False)[0], rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("policy", "times"), [(Policy(), 1), (Policy(op="sum"), 8)])
def test_a_plain_number_is_each_devices_own(
    make_mesh: MakeMesh, accumulate: int, policy: Policy, times: int
) -> None:
    zero = zero3(
        lambda params, batch: (2.0, {"examples": batch["x"].shape[0]}),
        optax.sgd(1.0),
        make_mesh(8),
        accumulate=accumulate,
        policy=policy,
        has_aux=True,
    )
    if times > 1:
        times *= accumulate
    state = zero.init({"w": WEIGHTS})
    _, metrics = zero.step(state, data())
    assert float(metrics.loss) == 2.0 * times
    assert float(metrics.aux["examples"]) == 4 / accumulate * times
    assert float(metrics.grad_norm) == 0
