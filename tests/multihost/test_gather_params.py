"""`gather_params`, `shard_params` and `unshard_params` between processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec
from multihost.spmd import Spmd, assert_alike

import jaxzero
from jaxzero import Policy

SHAPES = {"empty": (0, 4), "even": (24, 3), "odd": (5,), "scalar": (), "table": (6, 7)}
CUTS = {
    "defaults": None,
    "flat": "flat",
    "mixed": {
        "empty": None,
        "even": None,
        "odd": "whole",
        "scalar": None,
        "table": 1,
    },
}


def params() -> Any:
    return oracle.integers(SHAPES, 0)


def like() -> Any:
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params())


def shards(ranks: int, cuts: Any) -> list[Any]:
    return [oracle.shard(params(), ranks, rank, cuts) for rank in range(ranks)]


@pytest.mark.parametrize("name", CUTS)
def test_every_rank_gathers_all_parameters(spmd: Spmd, name: str) -> None:
    cuts = CUTS[name]
    found = spmd.run(
        lambda s: jaxzero.gather_params(s, like(), "data", cuts=cuts),
        shards(spmd.ranks, cuts),
    )
    assert found
    for tree in found.values():
        oracle.assert_same(tree, params())


def test_parameters_travel_in_the_compute_dtype(spmd: Spmd) -> None:
    policy = Policy(compute_dtype="bfloat16")
    found = spmd.run(
        lambda s: jaxzero.gather_params(s, like(), "data", policy=policy),
        shards(spmd.ranks, None),
    )
    for tree in found.values():
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree)} == {"bfloat16"}
        oracle.assert_same(tree, params())


def test_the_gradient_through_a_gather_is_summed_and_sharded(spmd: Spmd) -> None:
    weights = [oracle.integers(SHAPES, rank) for rank in range(spmd.ranks)]

    def gradient(s: Any, w: Any) -> Any:
        def loss(own: Any) -> jax.Array:
            full = jaxzero.gather_params(own, like(), "data")
            products = jax.tree.map(lambda p, weight: jnp.sum(p * weight), full, w)
            return sum(jax.tree.leaves(products), jnp.float32(0))

        return jax.grad(loss)(s)

    found = spmd.run(gradient, shards(spmd.ranks, None), weights)
    full = oracle.reduce(weights, "sum")
    for rank, tree in found.items():
        oracle.assert_same(tree, oracle.shard(full, spmd.ranks, rank))


@pytest.mark.parametrize("name", CUTS)
def test_sharded_parameters_come_back_on_every_process(spmd: Spmd, name: str) -> None:
    cuts = CUTS[name]
    placed = jaxzero.shard_params(params(), spmd.mesh, "data", cuts=cuts)
    for leaf in jax.tree.leaves(placed):
        assert not leaf.is_fully_addressable or jax.process_count() == 1
    back = jaxzero.unshard_params(placed, like(), cuts=cuts)
    oracle.assert_same(back, params())
    assert_alike({name: leaf.tolist() for name, leaf in back.items()})


def test_a_training_step_keeps_parameters_sharded(spmd: Spmd) -> None:
    """Placed, gathered, differentiated, updated, taken back: as if on one device."""
    start = {"w": np.arange(10, dtype=np.float32), "b": np.ones((4,), np.float32)}
    data = [oracle.integers({"w": (10,), "b": (4,)}, r) for r in range(spmd.ranks)]
    true = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), start)
    placed = jaxzero.shard_params(start, spmd.mesh, "data")
    specs = jax.tree.map(lambda p: p.sharding.spec, placed)

    def step(own: Any, batch: Any) -> Any:
        batch = jax.tree.map(lambda leaf: leaf[0], batch)
        full = jaxzero.gather_params(own, true, "data")
        gradient = jax.tree.map(lambda p, x: p * x, full, batch)
        sharded = jaxzero.shard_grads(gradient, "data", policy=Policy(op="sum"))
        return jax.tree.map(lambda p, g: p - 0.5 * g, own, sharded)

    mapped = jax.shard_map(
        step, mesh=spmd.mesh, in_specs=(specs, spmd.spec), out_specs=specs
    )
    jitted = jax.jit(mapped, donate_argnums=0)
    expected = oracle.stored(start, "float64")
    for _ in range(3):
        placed = jitted(placed, spmd.place(data))
        total = oracle.reduce(data, "sum")
        expected = jax.tree.map(lambda p, x: p - 0.5 * p * x, expected, total)
    back = jaxzero.unshard_params(placed, true)
    oracle.assert_close(back, expected, spmd.ranks, "float32", scale=100.0)
    assert_alike({name: leaf.tolist() for name, leaf in back.items()})


def test_padding_and_replicas_are_placed_as_the_specs_say(hybrid: Spmd) -> None:
    placed = jaxzero.shard_params(params(), hybrid.mesh, "data")
    assert placed["odd"].sharding.spec == PartitionSpec("data")
    half = hybrid.ranks // 2
    for shard in placed["odd"].addressable_shards:
        rank = (shard.index[0].start or 0) // shard.data.shape[0]
        oracle.assert_same(
            np.asarray(shard.data), oracle.shard_leaf(params()["odd"], half, rank)
        )
