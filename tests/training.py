"""Small models with a ZeRO-3 and an unsharded run of the same steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxzero import gathered

WIDTH = 6
LAYERS = 3
BATCH = 48

Tree = Any
Curve = list[tuple[float, float]]


def init(key: jax.Array) -> Tree:
    """Returns leaves that divide by few numbers of ranks, and a scalar."""
    first, last, *keys = jax.random.split(key, 2 + LAYERS)
    return {
        "in": jax.random.normal(first, (5, WIDTH)) / 2,
        "blocks": [
            {"w": jax.random.normal(k, (WIDTH, WIDTH)) / 3, "b": jnp.zeros(WIDTH)}
            for k in keys
        ],
        "out": jax.random.normal(last, (WIDTH,)) / 2,
        "bias": jnp.zeros(()),
    }


def init_stacked(key: jax.Array) -> Tree:
    """Returns the same model with its layers stacked."""
    params = init(key)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])
    return params | {"blocks": stacked}


def block(params: Tree, hidden: jax.Array) -> jax.Array:
    """One layer."""
    return hidden + jnp.tanh(hidden @ params["w"] + params["b"])


def loss(params: Tree, batch: Tree) -> jax.Array:
    """Mean squared error; layers in a Python loop."""
    hidden = _first(params, batch)
    for layer in params["blocks"]:
        hidden = gathered(block)(layer, hidden)
    return _last(params, hidden, batch)


def loss_stacked(params: Tree, batch: Tree) -> jax.Array:
    """The same with `lax.scan` over layers."""

    def body(hidden: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return gathered(block)(layer, hidden), None

    hidden, _ = jax.lax.scan(body, _first(params, batch), params["blocks"])
    return _last(params, hidden, batch)


def _first(params: Tree, batch: Tree) -> jax.Array:
    return batch["x"].astype(params["in"].dtype) @ params["in"]


def _last(params: Tree, hidden: jax.Array, batch: Tree) -> jax.Array:
    found = hidden @ params["out"] + params["bias"]
    return jnp.mean(jnp.square(found.astype(jnp.float32) - batch["y"]))


def batches(count: int, seed: int = 0) -> list[Tree]:
    """Returns batches of a noisy function of the input."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        x = random.normal(size=(BATCH, 5)).astype(np.float32)
        noise = 0.1 * random.normal(size=BATCH)
        made.append({"x": x, "y": (np.sin(x.sum(1)) + noise).astype(np.float32)})
    return made


def unsharded(
    loss_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    params: Tree,
    data: list[Tree],
    clip_norm: float | None = None,
) -> tuple[Curve, Tree]:
    """Returns losses and gradient norms of plain steps, and the last parameters."""

    @jax.jit
    def step(params: Tree, state: Any, batch: Tree) -> Any:
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            factor = clip_norm / jnp.maximum(norm, clip_norm)
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, norm

    state = optimizer.init(params)
    curve: Curve = []
    for batch in data:
        params, state, value, norm = step(params, state, batch)
        curve.append((float(value), float(norm)))
    return curve, params


def sharded(zero: Any, state: Any, data: list[Tree]) -> tuple[Curve, Any]:
    """Returns losses and gradient norms of ZeRO-3 steps, and the last state."""
    curve: Curve = []
    for batch in data:
        state, metrics = zero.step(state, batch)
        # Read each, so that few programs are in flight on CPU devices.
        curve.append((float(metrics.loss), float(metrics.grad_norm)))
    return curve, state


def assert_as_unsharded(
    zero: Any,
    loss_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    params: Tree,
    steps: int = 3,
) -> Any:
    """Checks losses, gradient norms and parameters; returns the last state."""
    data = batches(steps)
    want, want_params = unsharded(loss_fn, optimizer, params, data)
    found, state = sharded(zero, zero.init(params), data)
    np.testing.assert_allclose(found, want, rtol=2e-4)
    exported = zero.export_state(state)["params"]
    assert jax.tree.structure(exported) == jax.tree.structure(params)
    for one, other in zip(
        jax.tree.leaves(exported), jax.tree.leaves(want_params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    return state
