from typing import Any

import jax
import numpy as np
import pytest
from cli.bench.tiny import TREE

from jaxzero import Policy
from jaxzero._cli.bench import rivals
from jaxzero._cli.bench.per_rank import jitted
from jaxzero._cli.bench.workload import Workload

RANKS = 8
ALL = rivals.ways("gpu", Policy())


@pytest.fixture(scope="module")
def work() -> Workload:
    return Workload(TREE, ["bfloat16", "float32"], jax.devices()[:RANKS])


def padded(array: np.ndarray) -> np.ndarray:
    flat = array.ravel()
    return np.pad(flat, (0, -flat.size % RANKS))


def mean(work: Workload, name: str) -> np.ndarray:
    return padded(np.asarray(work.grads[name]).astype(np.float64).mean(0))


@pytest.mark.parametrize(
    ("wire", "reduction"),
    [(None, "native"), ("bfloat16", "native"), ("float16", "float32")],
    ids=str,
)
@pytest.mark.parametrize("how", ALL)
def test_all_ways_add_the_mean_to_accumulators(
    work: Workload, how: str, wire: str | None, reduction: Any
) -> None:
    way = rivals.ways("gpu", Policy(comm_dtype=wire, reduction=reduction))[how]
    step = work.step(way)
    sums = work.sums()
    for calls in (1, 2):
        sums = jax.block_until_ready(step(work.grads, sums))
        assert set(sums) == set(TREE)
        for name, found in sums.items():
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, calls * mean(work, name))


@pytest.mark.parametrize("how", ALL)
def test_without_accumulators_the_mean_comes_in_the_dtype_of_the_wire(
    work: Workload, how: str
) -> None:
    shards = jitted(work.mesh, ALL[how], accumulates=False)(work.grads)
    for name, found in jax.block_until_ready(shards).items():
        assert found.dtype == work.dtypes[name]
        np.testing.assert_array_equal(
            np.asarray(found).astype(np.float64), mean(work, name)
        )


@pytest.mark.parametrize(
    ("how", "wire", "count"),
    [
        ("per leaf", None, len(TREE)),
        ("concatenated", None, 2),
        ("concatenated", "float32", 1),
    ],
)
def test_collectives_are_those_of_the_name(
    work: Workload, how: str, wire: str | None, count: int
) -> None:
    step: Any = work.step(rivals.ways("cpu", Policy(comm_dtype=wire))[how])
    text = step.lower(work.grads, work.sums()).as_text()
    assert text.count('"stablehlo.reduce_scatter"') == count


def test_a_group_of_collectives_is_for_gpus() -> None:
    assert list(ALL) == ["jaxzero", "per leaf", "concatenated", "one group"]
    assert list(rivals.ways("cpu", Policy())) == list(ALL)[:3]
