"""zero3 with models of every kind, against the same steps on one device."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh

import jaxzero
from jaxzero import LossScale, gathered, zero3

Tree = Any


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape: int) -> np.ndarray:
    """Returns numbers that depend on the shape alone."""
    drawn = np.random.default_rng(shape).normal(size=shape)
    return (drawn / 2).astype(np.float32)


X = normal(8, 5)
BASE: Tree = {"in": normal(5, 3), "a": normal(3, 3), "b": normal(3, 3)}


@gathered
def dense(w: jax.Array, hidden: jax.Array) -> jax.Array:
    return jnp.tanh(hidden @ w)


def plain(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(dense(params["b"], dense(params["a"], x @ params["in"])))


def tied(params: Tree, x: jax.Array) -> jax.Array:
    """One layer three times, once transposed."""
    hidden = dense(params["a"], dense(params["a"], x @ params["in"]))
    transposed = gathered(lambda w, h: h @ w.T)
    return jnp.mean(transposed(params["a"], hidden)) + jnp.mean(params["b"])


def in_loops(params: Tree, x: jax.Array) -> jax.Array:
    hidden, _ = jax.lax.scan(
        lambda h, _: (dense(params["a"], h), None), x @ params["in"], None, length=2
    )
    turn: Callable[..., Any] = lambda _, h: dense(params["b"], h)  # noqa: E731
    return jnp.mean(jax.lax.fori_loop(0, 2, turn, hidden))


def nested(params: Tree, x: jax.Array) -> jax.Array:
    """A layer with another inside, given to it or known from around it."""
    given = gathered(lambda own, other, h: dense(other, jnp.tanh(h @ own)))
    known = gathered(lambda own, h: dense(params["b"], jnp.tanh(h @ own)))
    hidden = given(params["a"], params["b"], x @ params["in"])
    return jnp.mean(known(params["a"], hidden))


def with_options(params: Tree, x: jax.Array) -> jax.Array:
    """Flags, functions, strings, keys, integers and trees go in; a tree comes out."""

    def layer(w: Any, h: Any, *, key: Any, train: bool, order: Any, last: Any) -> Tree:
        if train:
            h = h * jax.random.bernoulli(key, 0.5, (3,))
        out = last(h @ w)[:, order]
        return {"out": out, "top": jnp.argmax(out, 1), "none": None, "rest": (h,)}

    result = gathered(layer)(
        params["a"],
        x @ params["in"],
        key=jax.random.key(2),
        train=True,
        order=np.array([2, 0]),
        last=jnp.tanh,
    )
    assert result["none"] is None
    return jnp.mean(result["out"]) + jnp.mean(result["rest"][0] @ params["in"].T)


def differentiated(params: Tree, x: jax.Array) -> jax.Array:
    """A derivative inside the loss, and a layer under vmap."""
    slope = jax.grad(lambda x: jnp.sum(dense(params["a"], x @ params["in"])))(x)
    each = jax.vmap(lambda row: dense(params["a"], row @ params["in"]))(x)
    return jnp.mean(slope**2) + jnp.mean(each)


def jitted(params: Tree, x: jax.Array) -> jax.Array:
    inner = jax.jit(gathered(jax.jit(lambda w, h: jnp.tanh(h @ w))))
    return jax.jit(lambda p, x: jnp.mean(inner(p["a"], x @ p["in"])))(params, x)


EMPTY = BASE | {"none": None, "e": np.zeros((0, 3), np.float32)}
EMPTY["a"] = {"w": normal(3, 3), "e": np.zeros((2, 0), np.float32), "none": None}


def with_empty(params: Tree, x: jax.Array) -> jax.Array:
    layer = gathered(lambda own, h: jnp.tanh(h @ own["w"]) + jnp.sum(own["e"]))
    return jnp.mean(layer(params["a"], x @ params["in"])) + jnp.sum(params["e"])


COMPLEX = BASE | {name: normal(3, 3) + 1j * normal(3, 3) for name in "ab"}
COMPLEX = jax.tree.map(
    lambda leaf: leaf.astype(np.complex64 if leaf.dtype.kind == "c" else leaf.dtype),
    COMPLEX,
)


def with_complex(params: Tree, x: jax.Array) -> jax.Array:
    layer = gathered(lambda w, h: h @ w)
    hidden = layer(params["a"], (x @ params["in"]).astype(jnp.complex64))
    return jnp.mean(jnp.abs(layer(params["b"], hidden)) ** 2)


def without_effect(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(x) + 0 * jnp.sum(params["in"])


MODELS: dict[str, tuple[Any, Tree]] = {
    "plain": (plain, BASE),
    "tied": (tied, BASE),
    "in loops": (in_loops, BASE),
    "nested": (nested, BASE),
    "with options": (with_options, BASE),
    "differentiated": (differentiated, BASE),
    "jitted": (jitted, BASE),
    "with empty": (with_empty, EMPTY),
    "with complex": (with_complex, COMPLEX),
    "without effect": (without_effect, BASE),
    "without parameters": (lambda params, x: jnp.mean(x), {}),
    "only empty": (lambda p, x: jnp.mean(x) + jnp.sum(p), np.zeros((0, 3), "f")),
}
LAYERS = {"tied": ["a"], "without parameters": (), "only empty": ()}


def check(zero: Any, loss: Any, params: Tree, batches: list[Any], rtol: float) -> Any:
    """Asserts that steps are those of plain gradient descent; returns the state."""
    state = zero.init(params)
    wanted = jax.tree.map(jnp.asarray, params)
    for batch in batches:
        value, grads = jax.value_and_grad(loss)(wanted, batch)
        # JAX's gradient of a complex leaf is the conjugate of the ascent.
        wanted = jax.tree.map(lambda p, g: p - 0.1 * g, wanted, grads)
        norm = optax.tree.norm(grads) if jax.tree.leaves(grads) else 0.0
        state, metrics = jax.block_until_ready(zero.step(state, batch))
        np.testing.assert_allclose(metrics.loss, value, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=rtol, atol=rtol)
    found = jax.device_get(zero.export_state(state)["params"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol),
        found,
        wanted,
    )
    return state


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [{"kind": "explicit"}, {"layers": None}, {"layers": None, "accumulate": 2}],
    ids=["whole", "layers", "microbatches"],
)
def test_models_of_every_kind(
    make_mesh: MakeMesh, name: str, options: dict[str, Any]
) -> None:
    loss, params = MODELS[name]
    options = dict(options)
    if "layers" in options:
        options["layers"] = LAYERS.get(name, ["a", "b"])
    mesh = make_mesh(4, kind=options.pop("kind", "auto"))
    zero = zero3(loss, optax.sgd(0.1), mesh, **options)
    check(zero, loss, params, [X, X[::-1]], 1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": LossScale(initial=4.0)},
        {"clip_norm": 100.0, "skip_nonfinite": True},
        {"accumulate": 2, "sync": "last"},
        {"min_shard_numel": 10},
    ],
    ids=["loss scale", "clipped", "last", "small"],
)
@pytest.mark.parametrize("optimizer", [optax.adamw(0.1), optax.sgd(0.1, momentum=0.5)])
def test_empty_leaves_and_moments_run_and_move(
    make_mesh: MakeMesh, options: dict[str, Any], optimizer: Any
) -> None:
    """As arguments of a compiled step they made XLA crash."""
    first = zero3(with_empty, optimizer, make_mesh(4), **options)
    state, _ = jax.block_until_ready(first.step(first.init(EMPTY), X))
    second = zero3(with_empty, optimizer, make_mesh(2), **options)
    state = second.import_state(first.export_state(state))
    state, metrics = jax.block_until_ready(second.step(state, X))
    assert np.isfinite(metrics.loss)
    assert state.params["e"].size == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_with_an_empty_leaf(make_mesh: MakeMesh, accumulate: int) -> None:
    def loss(params: Tree, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"] @ params["in"]) + jnp.sum(batch["e"])

    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), accumulate=accumulate)
    batch = {"x": X, "e": np.zeros((8, 0), np.float32)}
    check(zero, loss, BASE, [batch], 1e-5)


def test_64_bit_mode(make_mesh: MakeMesh, x64: None) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), BASE)
    zero = zero3(plain, optax.sgd(0.1), make_mesh(3), layers=["a", "b"], accumulate=2)
    batch = np.concatenate([X, X, X]).astype(np.float64)
    # The loss is reported in float32; so is the norm.
    state = check(zero, plain, params, [batch] * 2, 2e-7)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float64"}


def test_the_loss_may_use_the_mesh(make_mesh: MakeMesh) -> None:
    """Such as for the mean of all examples, of which a device sees a part."""

    def loss(mean: Any) -> Any:
        return lambda p, x: jnp.mean((x @ p["in"] - mean(x @ p["in"])) ** 2)

    ours = loss(lambda h: jax.lax.pmean(jnp.mean(h, 0), "data"))
    zero = zero3(ours, optax.sgd(0.1), make_mesh(4))
    check(zero, loss(lambda h: jnp.mean(h, 0)), BASE, [X, X], 1e-5)


def test_steps_inside_a_jitted_loop(make_mesh: MakeMesh) -> None:
    zero = zero3(plain, optax.sgd(0.1), make_mesh(4), layers="a")
    batches = np.stack([X, X[::-1], X * 2])
    state, metrics = jax.jit(lambda s, b: jax.lax.scan(zero.step, s, b))(
        zero.init(BASE), batches
    )
    check_state = zero.init(BASE)
    for batch, value in zip(batches, metrics.loss, strict=True):
        check_state, one = zero.step(check_state, batch)
        np.testing.assert_allclose(value, one.loss, rtol=1e-5)
    assert int(state.step) == 3


def test_a_refused_batch_leaves_the_state_usable(make_mesh: MakeMesh) -> None:
    zero = zero3(plain, optax.sgd(0.1), make_mesh(4))
    state = zero.init(BASE)
    for bad in (X[:7], X[:, :4]):
        with pytest.raises((ValueError, TypeError)):
            zero.step(state, bad)
    state, _ = zero.step(state, X)
    assert int(state.step) == 1


POLICIES: dict[str, tuple[Any, int]] = {
    "nothing": (None, 5),
    "gathered": (jax.checkpoint_policies.save_only_these_names("jaxzero_gathered"), 3),
    "everything": (jax.checkpoint_policies.everything_saveable, 3),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_checkpoint_policy_keeps(make_mesh: MakeMesh, name: str) -> None:
    """Kept parameters are gathered once: two layers, and the rest of the model."""
    policy, gathers = POLICIES[name]
    layer = gathered(lambda w, h: jnp.tanh(h @ w), policy=policy)

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean(layer(params["b"], layer(params["a"], x @ params["in"])))

    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), layers=["a", "b"])
    text = zero.lower(zero.abstract_state(BASE), X).compile().as_text()
    assert text.count(" all-gather(") == gathers
    check(zero, loss, BASE, [X], 1e-5)


@pytest.mark.parametrize(
    "use",
    [jnp.sum, lambda w: jnp.asarray(X) @ w, lambda w: jnp.dot(jnp.ones(5), w)],
    ids=["sum", "product", "dot"],
)
def test_a_lone_layer_that_is_not_gathered_says_so(
    make_mesh: MakeMesh, use: Any
) -> None:
    zero = zero3(lambda p, x: jnp.sum(use(p["in"])), optax.sgd(0.1), make_mesh(2))
    zero.step(zero.init(BASE), X)
    zero = zero3(
        lambda p, x: jnp.sum(use(p["in"])), optax.sgd(0.1), make_mesh(2), layers="in"
    )
    state = zero.init(BASE)
    with pytest.raises(TypeError, match=r"jaxzero\.gathered"):
        zero.step(state, jnp.asarray(X))


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: layer(x),
        lambda layer, x: layer + x,
        lambda layer, x: x if layer else 2 * x,
        lambda layer, x: x * (layer == 1),
        lambda layer, x: x * len(layer),
        lambda layer, x: x @ next(iter(layer)),
    ],
    ids=["call", "add", "bool", "eq", "len", "iter"],
)
def test_python_does_nothing_with_a_layer_that_is_not_gathered(
    make_mesh: MakeMesh, use: Any
) -> None:
    zero = zero3(
        lambda p, x: jnp.mean(use(p["in"], x)),
        optax.sgd(0.1),
        make_mesh(2),
        layers="in",
    )
    with pytest.raises(TypeError, match=r"__\w+__ was asked of .*jaxzero\.gathered"):
        zero.step(zero.init(BASE), jnp.asarray(X))


def test_layers_that_overlap_are_refused(make_mesh: MakeMesh) -> None:
    zero = zero3(plain, optax.sgd(0.1), make_mesh(2), layers=["*", "a/w"])
    with pytest.raises(ValueError, match=r"'a/w'.*inside a layer"):
        zero.init({"a": {"w": normal(3, 3)}})


def test_a_frozen_layer_keeps_its_numbers(make_mesh: MakeMesh) -> None:
    def loss(params: Tree, x: jax.Array) -> jax.Array:
        frozen = jax.lax.stop_gradient(params["a"])
        return jnp.mean(dense(frozen, x @ params["in"]))

    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), layers=["a", "b"])
    state = check(zero, loss, BASE, [X, X], 1e-5)
    found = jax.device_get(zero.export_state(state)["params"]["a"])
    np.testing.assert_array_equal(found, BASE["a"])


def test_apply_layers_takes_empty_leaves(make_mesh: MakeMesh) -> None:
    layer = {"w": normal(3, 3), "e": np.zeros((0,), np.float32)}
    params = {"in": BASE["in"], "blocks": [layer, layer]}

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        def block(own: Tree, hidden: jax.Array) -> jax.Array:
            return jnp.tanh(hidden @ own["w"]) + jnp.sum(own["e"])

        hidden = x @ params["in"]
        return jnp.mean(jaxzero.apply_layers(block, params["blocks"], hidden))

    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), layers="blocks/*")
    check(zero, loss, params, [X, X], 1e-5)
