"""The loss of a batch without a step, against NumPy and one device."""

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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", ["plain", "layers", "stacked"])
@pytest.mark.parametrize(("shape", "replicate"), [((3,), None), ((2, 2), "replica")])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_loss_is_that_of_one_device(
    make_mesh: MakeMesh,
    layout: str,
    shape: tuple[int, ...],
    replicate: str | None,
    accumulate: int,
    kind: str,
) -> None:
    names = ("replica", "data")[-len(shape) :]
    init = training.init_stacked if layout == "stacked" else training.init
    loss = training.loss_stacked if layout == "stacked" else training.loss
    options: Any = {"plain": {}, "layers": {"layers": "blocks/*"}}.get(
        layout, {"stacked": "blocks"}
    )
    zero = zero3(
        loss,
        optax.sgd(1e-2),
        make_mesh(shape, names, kind=kind),
        replicate_axis=replicate,
        accumulate=accumulate,
        **options,
    )
    params = init(jax.random.key(0))
    batch = training.batches(1)[0]
    state = zero.init(params)
    found = zero.evaluate(state, batch)
    np.testing.assert_allclose(found, loss(params, batch), rtol=1e-5)
    # The state is not used up, and a step reports the same loss.
    _, metrics = zero.step(state, batch)
    np.testing.assert_allclose(metrics.loss, found, rtol=1e-6)


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_losses_and_what_goes_with_them_are_reduced_alike(
    make_mesh: MakeMesh, op: Any, accumulate: int
) -> None:
    """A mean over words that count, given how many do in all the batch."""

    def loss(params: Any, batch: Any) -> Any:
        losses = (batch["x"] * params["w"][0] - 1) ** 2 * batch["counts"]
        total = batch["total"] if op == "sum" else batch["counts"].size
        return jnp.sum(losses) / total, {"counted": jnp.sum(batch["counts"])}

    zero = zero3(
        loss,
        optax.sgd(0.1),
        make_mesh(4),
        policy=Policy(op=op),
        accumulate=accumulate,
        has_aux=True,
    )
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    counts = np.float32(x % 3 > 0)
    batch = {"x": x, "counts": counts, "total": counts.sum()}
    state = zero.init({"w": np.full(3, 2, np.float32)})
    parts = 1 if op == "sum" else 4 * accumulate
    wanted = ((2.0 * x - 1) ** 2 * counts).sum() / (counts.sum() if op == "sum" else 32)
    value, aux = zero.evaluate(state, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(aux["counted"], counts.sum() / parts, rtol=1e-6)
    _, metrics = zero.step(state, batch)
    np.testing.assert_allclose(metrics.loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(metrics.aux["counted"], aux["counted"], rtol=1e-6)


def test_another_loss_function_compiles_once(make_mesh: MakeMesh) -> None:
    traced = []

    def without_dropout(params: Any, batch: Any) -> Any:
        traced.append(1)
        return jnp.mean(batch["x"]) * params["w"][0]

    zero = zero3(lambda params, batch: jnp.sum(params["w"]), optax.sgd(1), make_mesh(2))
    state = zero.init({"w": np.full(3, 2, np.float32), "none": np.zeros((0, 4))})
    for i in range(3):
        found = zero.evaluate(state, {"x": np.full(4, i, np.float32)}, without_dropout)
        assert float(found) == 2 * i
    assert len(traced) == 1
    assert float(zero.evaluate(state, {"x": np.ones(4)})) == 6


def test_each_example_has_its_own_random_key(make_mesh: MakeMesh) -> None:
    """Keys are examples too: split over devices and microbatches."""

    def loss(params: Any, batch: Any) -> Any:
        noise = jax.vmap(jax.random.uniform)(batch["key"])
        return jnp.mean(noise) + 0 * params["w"][0]

    keys = jax.random.split(jax.random.key(5), 24)
    wanted = np.mean([jax.random.uniform(key) for key in keys])
    for accumulate in (1, 3):
        zero = zero3(loss, optax.sgd(1.0), make_mesh(4), accumulate=accumulate)
        state = zero.init({"w": np.ones(4, np.float32)})
        found = zero.evaluate(state, {"key": keys})
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        _, metrics = zero.step(state, {"key": keys})
        np.testing.assert_allclose(metrics.loss, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("result", "has_aux", "message"),
    [
        (lambda loss: (loss, loss), False, "returned a tuple.*set has_aux=True"),
        (lambda loss: {"loss": loss}, False, "returned a dict.*set has_aux=True"),
        (lambda loss: loss, True, "has_aux=True, but .*expected a pair"),
        (lambda loss: (loss,) * 3, True, "has_aux=True, but .*expected a pair"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_refused(
    make_mesh: MakeMesh, result: Any, has_aux: bool, message: str
) -> None:
    zero = zero3(
        lambda params, batch: result(jnp.mean(batch) * params["w"][0]),
        optax.sgd(0.1),
        make_mesh(2),
        has_aux=has_aux,
    )
    state = zero.init({"w": np.ones(4, np.float32)})
    with pytest.raises(TypeError, match=message):
        zero.step(state, np.ones(4, np.float32))
    with pytest.raises(TypeError, match=message):
        zero.evaluate(state, np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(2j, "complex"), (jax.random.key, "key<fry>"), ("mean", "str")],
    ids=["complex", "key", "text"],
)
def test_an_auxiliary_result_that_is_not_real_is_refused(
    make_mesh: MakeMesh, value: Any, dtype: str
) -> None:
    """The imaginary part would be dropped."""

    def loss(params: Any, batch: Any) -> Any:
        found = value(0) if callable(value) else value
        return jnp.mean(batch) * params["w"][0], {"found": found}

    zero = zero3(loss, optax.sgd(0.1), make_mesh(2), has_aux=True)
    state = zero.init({"w": np.ones(4, np.float32)})
    for call in (zero.step, zero.evaluate):
        with pytest.raises(TypeError, match=rf"aux leaf \['found'\] .*{dtype}"):
            call(state, np.ones(4, np.float32))


def test_a_raw_random_key_is_explained(make_mesh: MakeMesh) -> None:
    zero = zero3(lambda p, b: jnp.sum(p["w"]), optax.sgd(0.1), make_mesh(4))
    state = zero.init({"w": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match=r"must come from jax\.random\.key"):
        zero.step(state, {"rng": np.zeros(2, np.uint32)})


def test_a_list_that_was_named_as_one_layer_is_explained(make_mesh: MakeMesh) -> None:
    def layer(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["w"]

    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum(jaxzero.apply_layers(layer, params["layers"], batch))

    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), layers="layers")
    state = zero.init({"layers": [{"w": np.eye(8, dtype=np.float32)}] * 3})
    with pytest.raises(ValueError, match="entries of a list, layers='blocks/\\*'"):
        zero.step(state, np.ones((4, 8), np.float32))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("layers", [(), "blocks/*"])
def test_a_batch_of_any_number_of_examples(
    make_mesh: MakeMesh, accumulate: int, layers: Any
) -> None:
    def loss(params: Any, batch: Any) -> Any:
        value = training.loss(params, batch)
        noise = jax.vmap(jax.random.uniform)(batch["key"])
        # Turned, so that examples lie along dimension 1, and in full.
        turned = jnp.mean(batch["turned"][1] * batch["weights"].sum())
        return value, {"turned": turned, "noise": jnp.mean(noise)}

    zero = zero3(
        loss,
        optax.sgd(0.1),
        make_mesh((2, 2), ("replica", "data")),
        replicate_axis="replica",
        accumulate=accumulate,
        layers=layers,
        has_aux=True,
        batch_dims=lambda path, _: {"['turned']": 1, "['weights']": None}.get(path, 0),
    )
    params = training.init(jax.random.key(0))
    state = zero.init(params)
    whole = training.batches(1)[0]
    for count in (1, 3, 4, 7, 11, 12, 24):
        batch = {name: leaf[:count] for name, leaf in whole.items()}
        batch |= {
            "turned": batch["x"].T,
            "weights": np.float32([1, 2, 3, 4, 5]),
            "key": jax.random.split(jax.random.key(1), count),
        }
        found = zero.evaluate(state, batch, uneven=True)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
            found,
            loss(params, batch),
        )
        np.testing.assert_allclose(
            found[1]["turned"], np.float64(batch["x"])[:, 1].mean() * 15, rtol=1e-5
        )


def test_examples_left_over_go_through_a_loop(make_mesh: MakeMesh) -> None:
    """All devices have them, but the loop's carry is each device's own."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def turn(hidden: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(hidden @ w), None

        return jnp.mean(jax.lax.scan(turn, x, params["w"])[0])

    zero = zero3(loss, optax.sgd(0.1), make_mesh(4))
    random = np.random.default_rng(0)
    w = random.normal(size=(3, 4, 4)).astype(np.float32)
    state = zero.init({"w": w})
    for count in (1, 3, 6):
        hidden = x = random.normal(size=(count, 4)).astype(np.float32)
        for layer in np.float64(w):
            hidden = np.tanh(hidden @ layer)
        found = zero.evaluate(state, x, uneven=True)
        np.testing.assert_allclose(found, hidden.mean(), rtol=1e-5)


def test_an_uneven_batch_that_has_no_mean_is_refused(make_mesh: MakeMesh) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch) * params["w"][0]

    for policy in (Policy(op="sum"), Policy(divide_by=4)):
        zero = zero3(loss, optax.sgd(0.1), make_mesh(4), policy=policy)
        state = zero.init({"w": np.ones(4, np.float32)})
        with pytest.raises(ValueError, match=r"op='mean' alone.*weigh 0"):
            zero.evaluate(state, np.ones(5, np.float32), uneven=True)
    zero = zero3(loss, optax.sgd(0.1), make_mesh(4))
    with pytest.raises(ValueError, match="0 examples"):
        zero.evaluate(state, np.ones(0, np.float32), uneven=True)
    with pytest.raises(ValueError, match=r"\(5,\).*divides by 4.*uneven=True"):
        zero.evaluate(state, np.ones(5, np.float32))
