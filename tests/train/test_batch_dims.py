"""Leaves of a batch without examples, or with them along another dimension."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh

from jaxzero import zero3

CLASSES = 8
DIMS: dict[str, Any] = {"x": 0, "y": 0, "time": 1, "weights": None, "key": None}


def by_name(path: str, shape: tuple[int, ...]) -> int | None:
    assert len(shape) == {"x": 2, "time": 2}.get(path[2:-2], 1)
    return DIMS[path[2:-2]]


def data() -> Any:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(32, CLASSES)).astype(np.float32),
        "y": random.integers(0, CLASSES, 32),
        # Positions first, as in recurrent models.
        "time": random.normal(size=(3, 32)).astype(np.float32),
        "weights": np.arange(1, CLASSES + 1, dtype=np.float32),
        "key": np.asarray(jax.random.PRNGKey(1)),
    }


def loss(params: Any, batch: Any) -> jax.Array:
    """Mean over examples of a loss that needs the leaves in their true shapes."""
    assert batch["weights"].shape == (CLASSES,)
    assert batch["time"].shape == (3, batch["y"].shape[0])
    noise = jax.random.normal(batch["key"], (CLASSES,))
    found = (batch["x"] + noise) @ params["w"] + batch["time"].sum(0)
    return jnp.mean(found**2 * batch["weights"][batch["y"]])


def expected(batch: Any, w: np.ndarray) -> tuple[float, np.ndarray]:
    noise = np.asarray(jax.random.normal(batch["key"], (CLASSES,)))
    x = np.float64(batch["x"] + noise)
    found = x @ w + batch["time"].sum(0)
    weights = batch["weights"][batch["y"]]
    return np.mean(found**2 * weights), 2 * (found * weights) @ x / len(x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dims", [DIMS, by_name], ids=["tree", "function"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("shape", [(1, 2), (1, 8), (2, 4)], ids=str)
def test_each_leaf_is_where_the_loss_needs_it(
    make_mesh: MakeMesh, dims: Any, accumulate: int, sync: Any, shape: Any
) -> None:
    zero = zero3(
        loss,
        optax.sgd(1.0),
        make_mesh(shape, ("replica", "data")),
        replicate_axis="replica",
        accumulate=accumulate,
        sync=sync,
        batch_dims=dims,
    )
    w, batch = np.linspace(-1, 1, CLASSES, dtype=np.float32), data()
    state = zero.init({"w": w})
    want, gradient = expected(batch, w)
    np.testing.assert_allclose(zero.evaluate(state, batch), want, rtol=1e-5)
    state, metrics = zero.step(state, batch)
    np.testing.assert_allclose(metrics.loss, want, rtol=1e-5)
    moved = w - zero.export_state(state)["params"]["w"]
    np.testing.assert_allclose(moved, gradient, rtol=1e-4, atol=1e-4)


def test_shardings_follow_the_dimensions(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(8)
    zero = zero3(loss, optax.sgd(1.0), mesh, batch_dims=by_name)
    found = jax.tree.map(lambda s: s.spec, zero.batch_shardings(data()))
    assert found == {
        "x": jax.P(("data",)),
        "y": jax.P(("data",)),
        "time": jax.P(None, ("data",)),
        "weights": jax.P(),
        "key": jax.P(),
    }


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_batch_in_place_stays_there(make_mesh: MakeMesh, kind: str) -> None:
    zero = zero3(loss, optax.sgd(1.0), make_mesh(8, "data", kind), batch_dims=by_name)
    w, batch = np.ones(CLASSES, np.float32), data()
    placed = jax.tree.map(
        jax.make_array_from_process_local_data, zero.batch_shardings(batch), batch
    )
    found = zero.evaluate(zero.init({"w": w}), placed)
    np.testing.assert_allclose(found, expected(batch, w)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ({"weights": data()["weights"]}, ("['weights']", "(8,)", "8 examples", "32")),
        ({"key": data()["key"]}, ("['key']", "2 examples", "jax.random.key")),
        ({"time": data()["time"]}, ("['time']", "(3, 32)", "3 examples")),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_leaves_with_other_numbers_of_examples_are_refused(
    make_mesh: MakeMesh, leaves: Any, words: Any, ranks: int
) -> None:
    zero = zero3(loss, optax.sgd(1.0), make_mesh(ranks))
    state = zero.init({"w": np.ones(CLASSES, np.float32)})
    batch = {"x": data()["x"], "y": data()["y"]} | leaves
    for call in (zero.step, zero.evaluate, zero.lower):
        with pytest.raises(ValueError) as error:
            call(state, batch)
        assert all(word in str(error.value) for word in words), str(error.value)
        assert "batch_dims=" in str(error.value)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        (2, ("['x']", "is 2", "(32, 8)", "from -2 to 1")),
        (True, ("['x']", "True", "None for a leaf")),
        ("whole", ("['x']", "'whole'", "number of a dimension")),
        (lambda path, shape: 0.5, ("['x']", "0.5")),
        ({"x": 0, "z": 0}, ("batch_dims", "['z']", "callable")),
        ({"x": 0}, ("batch_dims", "['y']")),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(
    make_mesh: MakeMesh, dims: Any, words: Any
) -> None:
    zero = zero3(loss, optax.sgd(1.0), make_mesh(2), batch_dims=dims)
    state = zero.init({"w": np.ones(CLASSES, np.float32)})
    batch = {"x": data()["x"], "y": data()["y"]}
    for call in (zero.batch_shardings, lambda b: zero.step(state, b)):
        with pytest.raises((ValueError, TypeError)) as error:
            call(batch)
        assert all(word in str(error.value) for word in words), str(error.value)


def test_negative_dimensions_and_a_batch_without_examples(make_mesh: MakeMesh) -> None:
    def last(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"].sum(0)) * params["w"][0] * batch["scale"]

    zero = zero3(last, optax.sgd(1.0), make_mesh(4), accumulate=2, batch_dims=-1)
    state = zero.init({"w": np.ones(3, np.float32)})
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    assert float(zero.evaluate(state, {"x": x, "scale": 2.0})) == 2 * x.sum() / 8
    whole = zero3(last, optax.sgd(1.0), make_mesh(4), batch_dims=None)
    assert float(whole.evaluate(state, {"x": x, "scale": 2.0})) == 2 * x.sum() / 8


@pytest.mark.parametrize("scale", [2.0, 2, True, np.float32(2)])
def test_a_plain_number_in_a_batch_is_lowered(make_mesh: MakeMesh, scale: Any) -> None:
    def scaled(params: Any, batch: Any) -> jax.Array:
        scale = jnp.asarray(batch["scale"], jnp.float32)
        return jnp.mean(batch["x"] * params["w"][0]) * scale

    zero = zero3(scaled, optax.sgd(1.0), make_mesh(2))
    state = zero.init({"w": np.ones(3, np.float32)})
    batch = {"x": np.arange(4, dtype=np.float32), "scale": scale}
    compiled = zero.lower(state, batch).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert float(zero.step(state, batch)[1].loss) == 1.5 * scale
