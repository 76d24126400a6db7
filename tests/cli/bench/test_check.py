"""Every way of being wrong that a reduction may have is seen."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from cli.bench.tiny import TREE
from jax import lax

from jaxzero import Policy
from jaxzero._cli.bench import rivals
from jaxzero._cli.bench.check import difference
from jaxzero._cli.bench.per_rank import AXIS, Arrays
from jaxzero._cli.bench.workload import Workload

Wrong = Callable[[Arrays, Arrays], Arrays]
ours = functools.partial(rivals.ours, Policy())


def without_rank_5(grads: Arrays, into: Arrays) -> Arrays:
    is_there = lax.axis_index(AXIS) != 5
    return ours({k: jnp.where(is_there, g, 0) for k, g in grads.items()}, into)


def one_rank_further(grads: Arrays, into: Arrays) -> Arrays:
    to_next = [(rank, (rank + 1) % 8) for rank in range(8)]
    shards = ours(grads, into)
    return {k: lax.ppermute(shard, AXIS, to_next) for k, shard in shards.items()}


def overwriting(grads: Arrays, into: Arrays) -> Arrays:
    return ours(grads, {k: 0 * old for k, old in into.items()})


def summing(grads: Arrays, into: Arrays) -> Arrays:
    return rivals.ours(Policy(op="sum"), grads, into)


def off_by_little(grads: Arrays, into: Arrays) -> Arrays:
    shards = ours(grads, into)
    return shards | {"table": shards["table"].at[3].add(1e-4)}


def not_a_number(grads: Arrays, into: Arrays) -> Arrays:
    shards = ours(grads, into)
    return shards | {"table": shards["table"].at[3].set(jnp.nan)}


def in_the_padding(grads: Arrays, into: Arrays) -> Arrays:
    is_last = (lax.axis_index(AXIS) == 7).astype(jnp.float32)
    shards = ours(grads, into)
    return shards | {"bias": shards["bias"].at[-1].add(is_last)}


@pytest.fixture(scope="module")
def work() -> Workload:
    return Workload(TREE, ["bfloat16", "float32"], jax.devices()[:8])


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_right_sums_are_right(devices: int) -> None:
    work = Workload(TREE, ["bfloat16", "float32"], jax.devices()[:devices])
    assert difference(work, work.step(ours)) is None


@pytest.mark.parametrize(
    ("wrong", "leaf"),
    [
        (without_rank_5, "kernel"),
        (one_rank_further, "kernel"),
        (overwriting, "kernel"),
        (summing, "kernel"),
        (off_by_little, "table"),
        (not_a_number, "table"),
        (in_the_padding, "bias"),
    ],
)
def test_wrong_sums_are_named(work: Workload, wrong: Wrong, leaf: str) -> None:
    found = difference(work, work.step(wrong))
    assert found is not None
    assert f"leaf '{leaf}'" in found and "not the mean" in found
