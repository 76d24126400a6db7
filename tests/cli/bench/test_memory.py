import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxzero import Policy
from jaxzero._cli.bench import rivals
from jaxzero._cli.bench.memory import free_bytes, needed_bytes
from jaxzero._cli.bench.trees import layer
from jaxzero._cli.bench.workload import Workload


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("grads", "wire"),
    [("float32", None), ("bfloat16", None), ("bfloat16", "float32")],
    ids=str,
)
def test_no_program_needs_more_than_is_said(
    ranks: int, grads: str, wire: str | None
) -> None:
    tree = layer()
    work = Workload(tree, [grads], jax.devices()[:ranks])
    needed = needed_bytes(tree, [grads], wire, ranks)
    largest = 0
    for way in rivals.ways("cpu", Policy(comm_dtype=wire)).values():
        step: Any = work.step(way)
        used = step.lower(work.grads, work.sums()).compile().memory_analysis()
        largest = max(
            largest,
            used.argument_size_in_bytes
            + used.output_size_in_bytes
            + used.temp_size_in_bytes
            - used.alias_size_in_bytes,
        )
    # The flat leaf, or both arrays of a copy, are beside them all the time.
    numel = sum(map(math.prod, tree.values()))
    beside = numel * (
        jnp.dtype(wire or grads).itemsize
        if ranks > 1
        else jnp.dtype(grads).itemsize + 8
    )
    assert largest + beside <= needed < 3 * (largest + beside)


def test_free_memory_of_a_gpu_is_what_its_allocator_has_left() -> None:
    def gpu(stats: dict[str, int] | None) -> Any:
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    assert free_bytes(gpu({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert free_bytes(gpu({"bytes_limit": 100})) == 100
    assert free_bytes(gpu({})) is None
    assert free_bytes(gpu(None)) is None
