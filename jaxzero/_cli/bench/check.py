"""Is what a reduction returns the mean of the gradients? NumPy in float64 says so."""

import math

import jax
import numpy as np
import numpy.typing as npt

from jaxzero._cli.bench.workload import PERIOD, Step, Workload, whole_numbers

CALLS = 2
"""So that accumulators that are overwritten, not added to, are noticed."""


def difference(workload: Workload, step: Step) -> str | None:
    """Runs a step on fresh accumulators; returns what is wrong with them, or None.

    Each process looks at what its own devices hold.
    """
    sums = workload.sums()
    for _ in range(CALLS):
        sums = jax.block_until_ready(step(workload.grads, sums))
    for leaf, name in enumerate(workload.tree):
        expected = CALLS * _mean(workload, leaf, sums[name].size)
        tolerance = CALLS * _rounding(workload.ranks)
        for shard in sums[name].addressable_shards:
            found = np.asarray(shard.data, np.float64)
            is_close = np.abs(found - expected[shard.index]) <= tolerance
            if not is_close.all():
                wrong = np.count_nonzero(~is_close)
                return (
                    f"{wrong} of {found.size} elements of leaf {name!r} on"
                    f" {shard.device} are not the mean of the gradients"
                )
    return None


def _mean(workload: Workload, leaf: int, numel: int) -> npt.NDArray[np.float64]:
    """Returns the mean of a leaf's gradients over ranks, flat, zero-padded."""
    one_period = np.mean(
        [whole_numbers(leaf, rank, PERIOD) for rank in range(workload.ranks)], axis=0
    )
    name = list(workload.tree)[leaf]
    used = math.prod(workload.tree[name])
    mean = np.tile(one_period, -(-numel // PERIOD))[:numel]
    mean[used:] = 0
    return mean


def _rounding(ranks: int) -> float:
    """Returns how far a mean may be off: by the division, and beyond exact sums."""
    return 2.0**-23 if ranks <= 256 else ranks * 2.0**-9
