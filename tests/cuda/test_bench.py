"""What `bench` times on GPUs, compiled for H200s that need not be there."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli.bench.tiny import TREE
from cuda import h200
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxzero import Policy
from jaxzero._cli.bench import rivals
from jaxzero._cli.bench.per_rank import AXIS, jitted

h200.skip_unless_compiler()

RANKS = 4


@pytest.mark.parametrize("how", rivals.ways("gpu", Policy()))
def test_ways_compile(how: str) -> None:
    devices = h200.devices(RANKS).reshape(RANKS)
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec(AXIS))

    def array(shape: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=spread)

    grads = {name: array((RANKS, *shape), "bfloat16") for name, shape in TREE.items()}
    sums = {
        name: array((-(-int(np.prod(shape)) // RANKS) * RANKS,), "float32")
        for name, shape in TREE.items()
    }
    step = jitted(mesh, rivals.ways("gpu", Policy())[how], accumulates=True)
    lowered = step.trace(grads, sums).lower(lowering_platforms=("cuda",))
    is_grouped = 'collective_group_key = "grads"' in lowered.as_text()
    assert is_grouped == (how == "one group")
    program = h200.compile_lowered(lowered)
    text = program.as_text()
    fused = text.count('custom_call_target="jaxzero_reduce_scatter"')
    # XLA may combine those of single leaves.
    theirs = len(re.findall(r" reduce-scatter(?:-start)?\(", text))
    if how == "jaxzero":
        assert (fused, theirs) == (1, 0)
    else:
        assert fused == 0
        assert 1 <= theirs <= (1 if how == "concatenated" else len(TREE))
    total = sum(leaf.size * 4 // RANKS for leaf in sums.values())
    assert program.memory_analysis().alias_size_in_bytes == total
