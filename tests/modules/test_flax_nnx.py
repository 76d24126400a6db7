"""Modules of flax.nnx as parameters: split and merged, or as the pytrees they are."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training
from conftest import MakeMesh
from flax import nnx

from jaxzero import apply_layers, gathered, zero3

WIDTH = 6
ADAMW = optax.adamw(1e-2)

Tree = Any


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Modules and optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return hidden + jnp.tanh(self.linear(self.norm(hidden)))


class Network(nnx.Module):
    """Layers in a list; each gathers itself where it is named in `layers`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.last = nnx.Linear(WIDTH, 1, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = gathered(lambda block, hidden: block(hidden))(block, hidden)
        return self.last(hidden)[:, 0]


class Scanned(nnx.Module):
    """The same with stacked layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(2))
        self.last = nnx.Linear(WIDTH, 1, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(hidden: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return gathered(lambda block, hidden: block(hidden))(block, hidden), None

        hidden, _ = jax.lax.scan(body, self.first(x), self.blocks)
        return self.last(hidden)[:, 0]


def loss(model: Any, batch: Tree) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def test_split_and_merge(make_mesh: MakeMesh) -> None:
    graph, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)

    def merged(params: Tree, batch: Tree) -> jax.Array:
        return loss(nnx.merge(graph, params), batch)

    zero = zero3(merged, ADAMW, make_mesh(4, kind="explicit"))
    state = training.assert_as_unsharded(zero, merged, ADAMW, params)
    assert isinstance(state.params, nnx.State)


@pytest.mark.parametrize(
    ("make", "layering"),
    [
        pytest.param(Network, {}, marks=pytest.mark.slow),
        (Network, {"layers": "blocks/*"}),
        (Scanned, {"stacked": "blocks"}),
    ],
    ids=["resident", "layers", "stacked"],
)
def test_modules_are_pytrees(make_mesh: MakeMesh, make: Any, layering: Any) -> None:
    zero = zero3(loss, ADAMW, make_mesh(3, kind="explicit"), **layering)
    state = training.assert_as_unsharded(zero, loss, ADAMW, make(nnx.Rngs(1)))
    assert isinstance(state.params, make)


@pytest.mark.parametrize("layers", [(), "blocks/*"], ids=["resident", "layers"])
def test_apply_layers_takes_the_list_of_a_module(
    make_mesh: MakeMesh, layers: Any
) -> None:
    def applied(model: Network, batch: Tree) -> jax.Array:
        hidden = apply_layers(
            lambda block, hidden: block(hidden), model.blocks, model.first(batch["x"])
        )
        return jnp.mean(jnp.square(model.last(hidden)[:, 0] - batch["y"]))

    model, batch = Network(nnx.Rngs(1)), training.batches(1)[0]
    zero = zero3(applied, optax.sgd(1.0), make_mesh(2), layers=layers)
    _, metrics = zero.step(zero.init(model), batch)
    value, grads = jax.value_and_grad(loss)(model, batch)
    np.testing.assert_allclose(metrics.loss, value, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(grads), rtol=1e-5)


def test_a_module_is_made_by_a_function(make_mesh: MakeMesh) -> None:
    """Under `jit`, so that full parameters never exist together."""
    zero = zero3(loss, ADAMW, make_mesh(4), layers="blocks/*")
    state = zero.init(lambda key: Network(nnx.Rngs(key)), jax.random.key(1))
    other = zero.init(Network(nnx.Rngs(jax.random.key(1))))
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)


def test_split_layers_are_merged_as_they_are_gathered(make_mesh: MakeMesh) -> None:
    """A whole graph cannot be merged while its layers are shards; a layer's can."""
    network = Network(nnx.Rngs(2))
    graphs, blocks = zip(*(nnx.split(block) for block in network.blocks), strict=True)
    params = {"first": network.first.kernel[...], "blocks": list(blocks)}

    def block(graph: Any, layer: Tree, hidden: jax.Array) -> jax.Array:
        return nnx.merge(graph, layer)(hidden)

    def split_loss(params: Tree, batch: Tree) -> jax.Array:
        hidden = batch["x"] @ params["first"]
        for graph, layer in zip(graphs, params["blocks"], strict=True):
            hidden = gathered(block)(graph, layer, hidden)
        return jnp.mean(jnp.square(hidden.sum(1) - batch["y"]))

    zero = zero3(split_loss, ADAMW, make_mesh(3), layers="blocks/*")
    training.assert_as_unsharded(zero, split_loss, ADAMW, params)


def test_a_checkpoint_that_became_a_dict(make_mesh: MakeMesh) -> None:
    zero = zero3(loss, ADAMW, make_mesh(3))
    network = Network(nnx.Rngs(3))
    exported = zero.export_state(zero.init(network))

    def plain(module: Tree) -> Tree:
        """Returns nested dicts by the names of leaves."""
        tree: Tree = {}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(module):
            *outer, last = jax.tree_util.keystr(keys, simple=True, separator="/").split(
                "/"
            )
            node = tree
            for name in outer:
                node = node.setdefault(name, {})
            node[last] = np.asarray(leaf)
        return tree

    state = zero.import_state(plain(exported), like=network)
    assert jax.tree.structure(state.params) == jax.tree.structure(network)
    again = zero.export_state(state)
    for one, two in zip(jax.tree.leaves(exported), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
