"""Programs without annotations, sharded in units, against `jax.grad`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxzero import zero3

Tree = Any


def normal(*shape: int) -> np.ndarray:
    """Returns numbers that depend on the shape alone."""
    drawn = np.random.default_rng(shape).normal(size=shape)
    return (drawn / 2).astype(np.float32)


W = 6
X = normal(24, W)
PARAMS: Tree = {
    "in": normal(W, 9)[:, :W],
    "blocks": [normal(W, W + i)[:, :W] for i in range(4)],
    "stack": normal(3, W, W),
    "gain": normal(3, W),
    "bias": normal(1)[0],
}


def dense(w: jax.Array, h: jax.Array) -> jax.Array:
    return h + jnp.tanh(h @ w)


def listed(p: Tree, x: jax.Array) -> jax.Array:
    return functools.reduce(lambda h, w: dense(w, h), p["blocks"], x @ p["in"])


def plain(p: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(listed(p, x) + p["bias"]))


def decay(p: Tree, x: jax.Array) -> jax.Array:
    return plain(p, x) + 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def decay_first(p: Tree, x: jax.Array) -> jax.Array:
    penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
    return plain(p, x * (1 + 0.01 * penalty))


def tied(p: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(listed(p, x) @ p["in"].T @ p["blocks"][0]))


def skips(p: Tree, x: jax.Array) -> jax.Array:
    kept, h = [], x @ p["in"]
    for w in p["blocks"]:
        kept.append(h)
        h = dense(w, h)
    return jnp.mean(functools.reduce(jnp.multiply, kept, h))


def scanned(p: Tree, x: jax.Array) -> jax.Array:
    def body(h: Any, own: Any) -> Any:
        w, g = own
        h = dense(w, h * g) + p["bias"]
        return h, jnp.mean(h)

    h, means = lax.scan(body, x @ p["in"], (p["stack"], p["gain"]))
    return jnp.mean(h**2) + jnp.sum(means)


def checkpointed(p: Tree, x: jax.Array) -> jax.Array:
    def named(w: jax.Array, h: jax.Array) -> jax.Array:
        return h + checkpoint_name(jnp.tanh(h @ w), "kept")

    keep = jax.checkpoint_policies.save_only_these_names("kept")
    h = jax.checkpoint(dense)(p["in"], x)
    for w in p["blocks"]:
        h = jax.checkpoint(named, policy=keep)(w, h)
    return jnp.mean(h**2)


def penalty(p: Tree, x: jax.Array) -> jax.Array:
    slope = jax.grad(lambda x: jnp.sum(listed(p, x)))(x)
    return plain(p, x) + jnp.mean(slope**2)


def mapped(p: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(lambda row: listed(p, row[None])[0])(x) ** 2)


@jax.custom_vjp
def doubled(w: jax.Array, h: jax.Array) -> jax.Array:
    return h @ w


doubled.defvjp(
    lambda w, h: (h @ w, (w, h)), lambda kept, ct: (kept[1].T @ ct, 2 * ct @ kept[0].T)
)


def with_custom_vjp(p: Tree, x: jax.Array) -> jax.Array:
    h = functools.reduce(lambda h, w: doubled(w, h), p["blocks"], x @ p["in"])
    return jnp.mean(h**2)


def branches(p: Tree, x: jax.Array) -> jax.Array:
    h = lax.cond(
        jnp.sum(x) > 1e9, lambda h: h, lambda h: h @ p["blocks"][0], x @ p["in"]
    )
    h = lax.fori_loop(0, 2, lambda _, h: dense(p["blocks"][1], h), h)
    return jnp.mean(h**2) + lax.while_loop(
        lambda i: i < 3, lambda i: i + 1, jnp.argmax(p["blocks"][2]) * 0
    ).astype(jnp.float32)


def dropout(p: Tree, x: jax.Array) -> jax.Array:
    h = x @ p["in"]
    for i, w in enumerate(p["blocks"]):
        key = jax.random.fold_in(jax.random.key(3), i)
        h = dense(w, jnp.where(jax.random.bernoulli(key, 0.7, (W,)), h, 0))
    return jnp.mean(h**2)


def integers(p: Tree, x: jax.Array) -> jax.Array:
    ids = jnp.argsort(x[:, 0]) % W
    h = dense(p["blocks"][0], p["in"][ids])
    best = jnp.argmax(h, 1)
    return jnp.mean(h[jnp.arange(len(ids)), best] * p["blocks"][1][best, ids])


def experts(p: Tree, x: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(x @ p["in"])[:, :3]
    out = jnp.einsum("bd,edf,be->bf", x, p["stack"], gates)
    return jnp.mean(dense(p["blocks"][0], out) ** 2)


def reparametrized(p: Tree, x: jax.Array) -> jax.Array:
    """Weights over their norms, in another dtype, transposed and put together."""
    w = p["blocks"][0] / jnp.linalg.norm(p["blocks"][0])
    both = jnp.concatenate([w.T, p["blocks"][1] @ p["blocks"][2]])
    h = (x @ p["in"]).astype(jnp.float16) @ both.T.astype(jnp.float16)
    return jnp.mean(h.astype(jnp.float32)) + jnp.sum(both**2)


def stopped(p: Tree, x: jax.Array) -> jax.Array:
    return plain(p, lax.stop_gradient(x @ p["stack"][0])) * p["bias"]


PROGRAMS: list[Callable[[Tree, jax.Array], jax.Array]] = [
    plain,
    decay,
    decay_first,
    tied,
    skips,
    scanned,
    checkpointed,
    penalty,
    mapped,
    with_custom_vjp,
    branches,
    dropout,
    integers,
    experts,
    reparametrized,
    stopped,
]


def over_devices(loss: Any, count: int) -> Any:
    """The mean of what each device computes on its part of the batch."""

    def mean(p: Tree, x: jax.Array) -> jax.Array:
        parts = x.reshape(count, -1, *x.shape[1:])
        return jnp.mean(jnp.stack([loss(p, part) for part in parts]))

    return mean


@pytest.mark.sampled(20)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda loss: loss.__name__)
def test_gradients_are_those_of_one_device(
    make_mesh: MakeMesh, loss: Any, count: int
) -> None:
    want = jax.jit(jax.grad(over_devices(loss, count)))(PARAMS, X)
    zero = zero3(loss, optax.sgd(1.0), make_mesh(count))
    state, metrics = zero.step(zero.init(PARAMS), X)
    np.testing.assert_allclose(
        metrics.loss, over_devices(loss, count)(PARAMS, X), rtol=1e-5
    )
    found = jax.device_get(zero.export_state(state)["params"])
    tolerance = 2e-2 if loss is reparametrized else 1e-5
    jax.tree.map(
        lambda old, new, grad: np.testing.assert_allclose(
            old - new, grad, rtol=tolerance, atol=tolerance
        ),
        PARAMS,
        found,
        want,
    )


def test_activations_are_not_computed_again(make_mesh: MakeMesh) -> None:
    """Each layer: one product forward, two backward, as in the plain program."""

    def products(fn: Any, *args: Any) -> int:
        return str(jax.make_jaxpr(fn)(*args)).count("dot_general[")

    zero = zero3(plain, optax.sgd(1.0), make_mesh(2))
    state = zero.init(PARAMS)
    found = products(zero._step, state, X)
    assert found == products(jax.grad(plain), PARAMS, X)
