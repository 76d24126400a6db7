"""apply_layers against the plain loop, on one device and sharded."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training
from conftest import MakeMesh

import jaxzero
from jaxzero import Policy, zero3

LAYOUTS: dict[str, Any] = {
    "list": (training.init, {"layers": "blocks/*"}),
    "stacked": (training.init_stacked, {"stacked": "blocks"}),
}


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(params: Any, batch: Any) -> jax.Array:
    """The model of `training`, whose layers also use a parameter of no layer."""
    gain = 1 + params["bias"]

    def layer(own: Any, state: Any) -> Any:
        hidden, count = state
        hidden = hidden + jnp.tanh(gain * (hidden @ own["w"] + own["b"]))
        return hidden, count + 1

    start = (batch["x"] @ params["in"], jnp.int32(0))
    hidden, count = jaxzero.apply_layers(layer, params["blocks"], start)
    error = hidden @ params["out"] * count / training.LAYERS - batch["y"]
    return jnp.mean(jnp.square(error))


@pytest.fixture(scope="module")
def expected() -> Any:
    init = training.init(jax.random.key(0))
    return training.unsharded(loss, optax.adam(1e-2), init, training.batches(10))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "names", "options"),
    [
        ((4,), "data", {}),
        ((3,), "data", {"accumulate": 2}),
        ((2, 2), ("replica", "data"), {"replicate_axis": "replica"}),
        (
            (2, 2),
            ("replica", "data"),
            {"replicate_axis": "replica", "accumulate": 2, "sync": "replicas_last"},
        ),
    ],
    ids=["4", "3", "2x2", "replicas_last"],
)
def test_sharded_layers_train_as_plain_ones(
    make_mesh: MakeMesh,
    expected: Any,
    shape: Any,
    names: Any,
    options: Any,
    layout: str,
    overlap: bool,
) -> None:
    init, layering = LAYOUTS[layout]
    zero = zero3(
        loss,
        optax.adam(1e-2),
        make_mesh(shape, names),
        policy=Policy(overlap=overlap),
        **layering,
        **options,
    )
    state = zero.init(init, jax.random.key(0))
    curve, _ = training.sharded(zero, state, training.batches(10))
    np.testing.assert_allclose(curve, expected[0], rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_changes_no_bit(make_mesh: MakeMesh, layout: str, count: int) -> None:
    """Whole numbers, so that no sum depends on its order."""
    random = np.random.default_rng(0)
    blocks = [
        {"w": random.integers(-1, 2, (4, 4)).astype(np.float32)} for _ in range(count)
    ]
    params = {
        "blocks": blocks
        if layout == "list"
        else jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    }

    def total(params: Any, batch: Any) -> jax.Array:
        out = jaxzero.apply_layers(
            lambda p, x: jnp.maximum(x @ p["w"], 0) % 8, params["blocks"], batch["x"]
        )
        return jnp.sum(out)

    batch = {"x": random.integers(0, 3, (8, 4)).astype(np.float32)}
    found = []
    for overlap in (True, False):
        zero = zero3(
            total,
            optax.sgd(1.0),
            make_mesh(4),
            policy=Policy(overlap=overlap, op="sum"),
            **LAYOUTS[layout][1],
        )
        state, _ = zero.step(zero.init(params), batch)
        found.append(jax.device_get(zero.export_state(state)["params"]))
    plain = jax.grad(total)(params, batch)
    want = jax.tree.map(lambda p, g: p - np.asarray(g), params, plain)
    for one, other, right in zip(
        *map(jax.tree.leaves, (found[0], found[1], want)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, right)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["native", "float32"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_overlap_goes_with_every_option(
    make_mesh: MakeMesh,
    layout: str,
    reduction: Any,
    accumulate: int,
    replicas: int,
) -> None:
    random = np.random.default_rng(0)
    weights = random.integers(-1, 2, (3, 6, 6)).astype(np.float32)
    params = {"blocks": list(weights) if layout == "list" else weights}

    def total(params: Any, batch: Any) -> jax.Array:
        out = jaxzero.apply_layers(
            lambda w, x: jnp.maximum(x @ w, 0) % 8, params["blocks"], batch["x"]
        )
        return jnp.sum(out)

    batch = {"x": random.integers(0, 3, (16, 6)).astype(np.float32)}
    found = []
    for overlap in (True, False):
        policy = Policy(op="sum", overlap=overlap, reduction=reduction)
        zero = zero3(
            total,
            optax.sgd(1.0),
            make_mesh((replicas, 4), ("replica", "data")),
            replicate_axis="replica",
            policy=policy,
            accumulate=accumulate,
            **LAYOUTS[layout][1],
        )
        state, _ = zero.step(zero.init(params), batch)
        found.append(jax.device_get(zero.export_state(state)["params"]))
    grads = jax.grad(total)(params, batch)
    want = jax.tree.map(lambda p, g: p - np.asarray(g), params, grads)
    for one, other, right in zip(
        *map(jax.tree.leaves, (found[0], found[1], want)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, right)


@pytest.mark.parametrize("stacked", [False, True])
def test_full_parameters_are_the_plain_loop(stacked: bool) -> None:
    init = training.init_stacked if stacked else training.init
    params = init(jax.random.key(1))
    batch = training.batches(1)[0]
    hidden = batch["x"] @ params["in"]
    out = jaxzero.apply_layers(training.block, params["blocks"], hidden)
    for layer in training.init(jax.random.key(1))["blocks"]:
        hidden = training.block(layer, hidden)
    # The two are compiled apart: small numbers keep the rounding of larger terms.
    np.testing.assert_allclose(out, hidden, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_layers_at_a_time_exist_in_full(
    make_mesh: MakeMesh, layout: str, overlap: bool
) -> None:
    width, count, ranks = 256, 32, 8
    one = 4 * width * width

    def init(key: jax.Array) -> Any:
        weights = jax.random.normal(key, (count, width, width))
        return {"blocks": list(weights) if layout == "list" else weights}

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(
            jaxzero.apply_layers(
                lambda w, x: jnp.tanh(x @ w), params["blocks"], batch["x"]
            )
        )

    zero = zero3(
        loss,
        optax.sgd(0.1),
        make_mesh(ranks),
        policy=Policy(overlap=overlap),
        **LAYOUTS[layout][1],
    )
    state = zero.abstract_state(init, jax.random.key(0))
    batch = {"x": jax.ShapeDtypeStruct((ranks, width), jnp.float32)}
    compiled = zero.lower(state, batch).compile()
    # Parameters and gradients of two layers, what is sent and received of one, and
    # where a loop collects them, the shards of all gradients and their quotients.
    limit = 6 * one + (layout == "stacked") * 3 * count * one // ranks
    assert compiled.memory_analysis().temp_size_in_bytes < limit < count * one


def test_each_layer_is_gathered_once_forward_and_once_backward(
    make_mesh: MakeMesh,
) -> None:
    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), layers="blocks/*")
    state = zero.abstract_state(training.init, jax.random.key(0))
    text = zero.lower(state, training.batches(1)[0]).compile().as_text()
    gathers = len(re.findall(r" all-gather\(", text))
    leaves = 2 * training.LAYERS
    outside = 3
    # Small leaves of a layer share a bucket.
    assert gathers <= 2 * leaves + outside
    assert gathers >= 2 * training.LAYERS + 1


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no layers"):
        jaxzero.apply_layers(lambda p, x: x, [], jnp.ones(3))


def test_layers_that_differ_are_refused(make_mesh: MakeMesh) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        out = jaxzero.apply_layers(
            lambda p, x: x * jnp.sum(p["w"]), params["blocks"], batch["x"]
        )
        return jnp.mean(out)

    zero = zero3(loss, optax.sgd(0.1), make_mesh(2), layers="blocks/*")
    params = {"blocks": [{"w": np.ones(4, np.float32)}, {"w": np.ones(6, np.float32)}]}
    state = zero.init(params)
    with pytest.raises(ValueError, match=r"layer 1 differs from layer 0.*gathered"):
        zero.step(state, {"x": np.ones((4, 2), np.float32)})


def _under_vmap(one: Any, values: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(one)(values))


def _under_scan(one: Any, values: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.map(one, values))


def _under_checkpoint(one: Any, values: jax.Array) -> jax.Array:
    return sum(map(jax.checkpoint(one), values), jnp.float32(0)) / len(values)


@pytest.mark.parametrize("transform", [_under_vmap, _under_scan, _under_checkpoint])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_close_over_what_has_no_gradient(
    make_mesh: MakeMesh, layout: str, transform: Any
) -> None:
    """A number, a mask, a key, and a float between them, under a transformation."""
    weights = np.stack([np.eye(4, dtype=np.float32) * k for k in (1, 2, 3)])
    params = {"blocks": list(weights) if layout == "list" else weights, "g": weights[0]}

    def loss(params: Any, batch: Any) -> jax.Array:
        def one(number: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(0), number)
            gain = jnp.sum(params["g"]) * number
            mask = number > jnp.arange(4)

            def layer(w: jax.Array, h: jax.Array) -> jax.Array:
                h = jnp.where(mask, h @ w, h) * gain + number
                return h * jax.random.uniform(key)

            return jnp.mean(jaxzero.apply_layers(layer, params["blocks"], batch["x"]))

        return transform(one, jnp.arange(1, 4))

    batch = {"x": np.ones((8, 4), np.float32)}
    zero = zero3(loss, optax.sgd(1.0), make_mesh(2), **LAYOUTS[layout][1])
    state, metrics = zero.step(zero.init(params), batch)
    value, grads = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(metrics.loss, value, rtol=1e-5)
    found = zero.export_state(state)["params"]
    want = jax.tree.map(lambda p, g: p - g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, want)
