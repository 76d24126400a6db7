"""Scans over stacked parameters, gathered layer by layer, against `jax.grad`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh
from jax import lax

from jaxzero import Policy, zero3

Tree = Any
W = 8


def normal(*shape: int) -> np.ndarray:
    """Returns numbers that depend on the shape alone."""
    drawn = np.random.default_rng(shape).normal(size=shape)
    return (drawn / 3).astype(np.float32)


X = normal(16, W)


def params(layers: int) -> Tree:
    return {
        "in": normal(W, W),
        "w": normal(layers, W, W),
        "v": normal(layers, W, 2, W),
        "g": normal(layers, W),
        "shared": normal(W, W + 1)[:, :W],
        "out": normal(W),
    }


def block(own: Tree, h: jax.Array) -> jax.Array:
    h = h + jnp.tanh(h @ own["w"]) * own["g"]
    return h + 0.1 * jnp.sum(jnp.einsum("bi,iko->bko", h, own["v"]), 1)


def layers(p: Tree) -> Tree:
    return {name: p[name] for name in "wvg"}


def ended(p: Tree, h: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(h @ p["out"]))


def carry_only(p: Tree, x: jax.Array, **options: Any) -> jax.Array:
    h, _ = lax.scan(
        lambda h, own: (block(own, h), None), x @ p["in"], layers(p), **options
    )
    return ended(p, h)


def reverse(p: Tree, x: jax.Array) -> jax.Array:
    return carry_only(p, x, reverse=True)


def unrolled(p: Tree, x: jax.Array) -> jax.Array:
    return carry_only(p, x, unroll=2)


def checkpointed(p: Tree, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda h, own: (block(own, h), None))
    return ended(p, lax.scan(body, x @ p["in"], layers(p))[0])


def everything(p: Tree, x: jax.Array, **options: Any) -> jax.Array:
    """Constants, other xs, results, integers, keys, casts, a carry that starts at 0."""
    count = p["g"].shape[0]
    w = p["w"].astype(jnp.float16).astype(jnp.float32)
    keys = jax.random.split(jax.random.key(0), count)
    scale = jnp.cos(x @ p["in"])[:count, :1]
    table = jnp.sin(x)

    def body(state: Any, given: Any) -> Any:
        h, total, i = state
        own, key, s = given
        h = block(own, h * s) @ p["shared"].T + table * p["out"]
        h = jnp.where(jax.random.bernoulli(key, 0.7, (W,)), h, 0)
        return (h, total + jnp.mean(h), i + 1), (jnp.sum(h**2, 1), jnp.argmax(h, 1))

    start = (x @ p["in"], 0 * jnp.mean(x), 0)
    own = layers(p) | {"w": w}
    (h, total, i), (tops, best) = lax.scan(body, start, (own, keys, scale), **options)
    weights = (jnp.arange(1, count + 1)[:, None] * (best + 1)).astype(jnp.float32)
    return (
        ended(p, h) * i.astype(jnp.float32)
        + total
        + jnp.mean(tops * weights)
        + jnp.sum(p["w"] ** 2)
    )


def everything_reverse(p: Tree, x: jax.Array) -> jax.Array:
    return everything(p, x, reverse=True)


def twice(p: Tree, x: jax.Array) -> jax.Array:
    """The same layers in two scans, and one of them by itself."""
    h, _ = lax.scan(lambda h, own: (block(own, h), None), x, layers(p))
    h, means = lax.scan(lambda h, w: (h, jnp.mean(h @ w)), h, p["w"])
    return ended(p, h @ p["w"][0]) + jnp.sum(means)


PROGRAMS: list[Callable[..., jax.Array]] = [
    carry_only,
    reverse,
    unrolled,
    checkpointed,
    everything,
    everything_reverse,
    twice,
]


@pytest.mark.sampled(18)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda loss: loss.__name__)
def test_gradients_are_those_of_one_device(
    make_mesh: MakeMesh, loss: Any, count: int, devices: int, overlap: bool
) -> None:
    p = params(count)

    def mean(p: Tree, x: jax.Array) -> jax.Array:
        parts = x.reshape(devices, -1, W)
        return jnp.mean(jnp.stack([loss(p, part) for part in parts]))

    value, want = jax.jit(jax.value_and_grad(mean))(p, X)
    zero = zero3(
        loss, optax.sgd(1.0), make_mesh(devices), policy=Policy(overlap=overlap)
    )
    state, metrics = zero.step(zero.init(p), X)
    np.testing.assert_allclose(metrics.loss, value, rtol=1e-5)
    found = jax.device_get(zero.export_state(state)["params"])
    for name, grad in want.items():
        np.testing.assert_allclose(
            p[name] - found[name], grad, rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("loss", [checkpointed, everything], ids=["remat", "plain"])
def test_one_layer_at_a_time_is_gathered(make_mesh: MakeMesh, loss: Any) -> None:
    """No gathered array, and no array that is kept, holds the stacked parameters."""
    zero = zero3(loss, optax.sgd(1.0), make_mesh(4))
    state = zero.init(params(7))
    text = str(jax.make_jaxpr(zero._step)(state, np.concatenate([X, X])))
    assert "f32[8,2,8]" in text
    assert "f32[7,8,2,8]" not in text.split("shard_map")[1]
