"""Modules of equinox as parameters: partitioned and combined, or as they are."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training
from conftest import MakeMesh

from jaxzero import gathered, zero3

WIDTH = 6
ADAMW = optax.adamw(1e-2)

Tree = Any


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Modules and optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return hidden + jnp.tanh(self.linear(self.norm(hidden)))


class Network(eqx.Module):
    """Arrays, an absent bias, a part that is named as a moment, and a static field."""

    mu: eqx.nn.Linear
    blocks: list[Block]
    last: eqx.nn.Linear
    scale: float = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, 4)
        self.mu = eqx.nn.Linear(5, WIDTH, key=first)
        self.blocks = [Block(k) for k in keys]
        self.last = eqx.nn.Linear(WIDTH, "scalar", use_bias=False, key=last)
        self.scale = 0.5

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.mu(x)
        for block in self.blocks:
            hidden = gathered(lambda block, hidden: block(hidden))(block, hidden)
        return self.scale * self.last(hidden)


class Stacked(eqx.Module):
    """The same with stacked layers."""

    mu: eqx.nn.Linear
    blocks: Block
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, last, keys = jax.random.split(key, 3)
        self.mu = eqx.nn.Linear(5, WIDTH, key=first)
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys, 2))
        self.last = eqx.nn.Linear(WIDTH, "scalar", use_bias=False, key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(hidden: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return gathered(lambda block, hidden: block(hidden))(block, hidden), None

        hidden, _ = jax.lax.scan(body, self.mu(x), self.blocks)
        return self.last(hidden)


class Activated(eqx.Module):
    """A layer with leaves that are no arrays."""

    linear: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return hidden + self.activation(self.linear(hidden))


def loss(model: Any, batch: Tree) -> jax.Array:
    return jnp.mean(jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]))


@pytest.mark.parametrize(
    ("make", "layering"),
    [
        pytest.param(Network, {}, marks=pytest.mark.slow),
        (Network, {"layers": "blocks/*"}),
        pytest.param(Stacked, {"stacked": "blocks"}, marks=pytest.mark.slow),
    ],
    ids=["resident", "layers", "stacked"],
)
def test_modules_are_pytrees(make_mesh: MakeMesh, make: Any, layering: Any) -> None:
    zero = zero3(loss, ADAMW, make_mesh(3, kind="explicit"), **layering)
    state = training.assert_as_unsharded(zero, loss, ADAMW, make(jax.random.key(1)))
    assert isinstance(state.params, make)
    assert isinstance(state.opt_state[0].mu, make)


def test_partition_and_combine(make_mesh: MakeMesh) -> None:
    keys = jax.random.split(jax.random.key(2))
    layers = [
        Activated(eqx.nn.Linear(5, 5, key=keys[0]), jnp.tanh),
        Activated(eqx.nn.Linear(5, 5, key=keys[1]), jax.nn.relu),
    ]
    params, static = eqx.partition(layers, eqx.is_inexact_array)

    def combined(params: Tree, batch: Tree) -> jax.Array:
        first, second = eqx.combine(params, static)
        return loss(lambda x: second(first(x)).sum(), batch)

    zero = zero3(combined, ADAMW, make_mesh(4))
    training.assert_as_unsharded(zero, combined, ADAMW, params)
    with pytest.raises(TypeError, match=r"activation.*equinox.partition"):
        zero.init(layers)


def test_layers_are_combined_as_they_are_gathered(make_mesh: MakeMesh) -> None:
    """A whole model cannot be combined while its layers are shards; a layer can."""
    keys = jax.random.split(jax.random.key(2))
    layers = [Activated(eqx.nn.Linear(5, 5, key=k), jnp.tanh) for k in keys]
    params, static = eqx.partition(layers, eqx.is_inexact_array)

    def layer(params: Tree, static: Tree, hidden: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(params, static))(hidden)

    def layered(params: Tree, batch: Tree) -> jax.Array:
        hidden = batch["x"]
        for arrays, rest in zip(params, static, strict=True):
            hidden = gathered(layer)(arrays, rest, hidden)
        return jnp.mean(jnp.square(hidden.sum(1) - batch["y"]))

    zero = zero3(layered, ADAMW, make_mesh(4), layers="*")
    training.assert_as_unsharded(zero, layered, ADAMW, params)


def test_a_module_is_made_by_a_function(make_mesh: MakeMesh) -> None:
    """Under `jit`, so that full parameters never exist together."""
    zero = zero3(loss, ADAMW, make_mesh(4), layers="blocks/*")
    state = zero.init(Network, jax.random.key(1))
    other = zero.init(Network(jax.random.key(1)))
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)


def test_a_state_moves_to_another_mesh(make_mesh: MakeMesh) -> None:
    """Moments are found by key paths that end as those of other parameters, too."""
    four, three = (zero3(loss, ADAMW, make_mesh(ranks)) for ranks in (4, 3))
    state = four.init(Network, jax.random.key(1))
    state, _ = four.step(state, training.batches(1)[0])
    exported = four.export_state(state)
    again = three.export_state(three.import_state(exported))
    assert jax.tree.structure(again) == jax.tree.structure(exported)
    for one, two in zip(jax.tree.leaves(exported), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
