"""Shards of layers that a loss function takes for its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh

import jaxzero
from jaxzero import zero3

EYE = np.eye(16, dtype=np.float32)
PARAMS = {"blocks": [{"w": EYE}, {"w": EYE}]}
STACKED = {"blocks": {"w": np.stack([EYE, EYE])}}


@jaxzero.gathered
def layer(params: Any, hidden: jax.Array) -> jax.Array:
    return hidden @ params["w"]


def plain(params: Any, batch: Any) -> jax.Array:
    hidden = batch
    for block in params["blocks"]:
        hidden = layer(block, hidden)
    return jnp.mean(hidden)


def scanned(params: Any, batch: Any) -> jax.Array:
    def body(hidden: jax.Array, block: Any) -> Any:
        return layer(block, hidden), None

    return jnp.mean(jax.lax.scan(body, batch, params["blocks"])[0])


def with_norm(params: Any, batch: Any) -> jax.Array:
    return plain(params, batch) + optax.tree.norm(params, squared=True)


def with_map(params: Any, batch: Any) -> jax.Array:
    sums = jax.tree.map(lambda p: jnp.sum(jnp.abs(p)), params)
    return plain(params, batch) + sum(jax.tree.leaves(sums))


def with_constant(params: Any, batch: Any) -> jax.Array:
    return plain(params, batch) + optax.tree.norm(jax.lax.stop_gradient(params))


def in_a_call(params: Any, batch: Any) -> jax.Array:
    return plain(params, batch) + jax.jit(jax.checkpoint(optax.tree.norm))(params)


def in_a_loop(params: Any, batch: Any) -> jax.Array:
    def body(total: jax.Array, block: Any) -> Any:
        return total + optax.tree.norm(block), layer(block, batch)

    start = jax.lax.pcast(jnp.float32(0), "data", to="varying")
    total, hidden = jax.lax.scan(body, start, params["blocks"])
    return total + jnp.mean(hidden)


def as_a_carry(params: Any, batch: Any) -> jax.Array:
    def body(carry: jax.Array, _: Any) -> Any:
        return shard, jnp.sum(carry)

    (shard,) = jax.tree.leaves(params["blocks"])
    return jnp.sum(jax.lax.scan(body, jnp.zeros_like(shard), None, length=2)[1])


def in_a_branch(params: Any, batch: Any) -> jax.Array:
    norm: Any = optax.tree.norm
    same = batch[0, 0] > 0
    return plain(params, batch) + jax.lax.cond(same, norm, norm, params)


def as_the_loss(params: Any, batch: Any) -> jax.Array:
    first: jax.Array = jax.tree.leaves(params)[0].reshape(-1)[0]
    return first


@pytest.mark.parametrize(
    "loss",
    [with_norm, with_map, with_constant, in_a_call, in_a_branch, as_the_loss],
)
def test_a_loss_that_computes_with_shards_is_refused(
    make_mesh: MakeMesh, loss: Any
) -> None:
    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), layers="blocks/*")
    state = zero.init(PARAMS)
    batch = np.ones((8, 16), np.float32)
    with pytest.raises(TypeError, match=r"\['blocks'\]\[0\]\['w'\].*gathered"):
        zero.step(state, batch)
    with pytest.raises(TypeError, match=r"\['blocks'\]\[0\]\['w'\].*gathered"):
        zero.evaluate(state, batch)


@pytest.mark.parametrize("loss", [in_a_loop, as_a_carry])
def test_a_loop_that_computes_with_shards_is_refused(
    make_mesh: MakeMesh, loss: Any
) -> None:
    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), stacked="blocks")
    state = zero.init(STACKED)
    with pytest.raises(TypeError, match=r"\['blocks'\]\['w'\].*gathered"):
        zero.step(state, np.ones((8, 16), np.float32))


def test_shards_as_auxiliary_results_are_refused(make_mesh: MakeMesh) -> None:
    zero = zero3(
        lambda p, x: (plain(p, x), jax.tree.leaves(p)[0][0, 0]),
        optax.sgd(0.1),
        make_mesh(4),
        layers="blocks/*",
        has_aux=True,
    )
    with pytest.raises(TypeError, match=r"\['blocks'\]\[0\]\['w'\].*result"):
        zero.step(zero.init(PARAMS), np.ones((8, 16), np.float32))


def chosen(params: Any, batch: Any) -> jax.Array:
    """Applies the layers one by one, chosen by a traced number."""

    def body(i: Any, hidden: jax.Array) -> jax.Array:
        block = jax.tree.map(lambda leaf: leaf[i], params["blocks"])
        return jax.jit(jax.checkpoint(layer))(block, hidden)

    hidden = jax.lax.fori_loop(0, 2, body, batch)
    block = jax.tree.map(lambda leaf: leaf[1], params["blocks"])
    return jnp.mean(jax.lax.cond(batch[0, 0] > 0, layer, layer, block, hidden))


def mapped(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(jax.vmap(layer, (0, None))(params["blocks"], batch))


@pytest.mark.parametrize("loss", [scanned, chosen, mapped])
def test_transformed_layers_are_no_such_use(make_mesh: MakeMesh, loss: Any) -> None:
    zero = zero3(loss, optax.sgd(0.1), make_mesh(4), stacked="blocks")
    batch = np.ones((8, 16), np.float32)
    state, metrics = zero.step(zero.init(STACKED), batch)
    value, grads = jax.value_and_grad(loss)(STACKED, batch)
    np.testing.assert_allclose(metrics.loss, value, rtol=1e-6)
    found = zero.export_state(state)["params"]["blocks"]["w"]
    want = STACKED["blocks"]["w"] - 0.1 * grads["blocks"]["w"]
    np.testing.assert_allclose(found, want, rtol=1e-5)
