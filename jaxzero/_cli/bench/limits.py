"""What no way to reduce can be much faster than."""

import concurrent.futures
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxzero._cli.bench.per_rank import AXIS, Arrays
from jaxzero._cli.bench.trees import Tree
from jaxzero._cli.bench.workload import Workload


def flat_call(
    bytes_of: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Callable[[], Arrays]:
    """Returns the reduction of as many bytes as one flat leaf per dtype, no copy.

    Args:
      bytes_of: bytes of one rank's gradients on the wire, by dtype.
      devices: the ranks; None for all devices.
    """
    ranks = len(jax.devices() if devices is None else devices)
    tree: Tree = {
        dtype: (ranks, -(-count // jnp.dtype(dtype).itemsize // ranks // 64) * 64)
        for dtype, count in bytes_of.items()
    }
    flat = Workload(tree, list(tree), devices)
    return flat.call(flat.step(_flat))


def _flat(grads: Arrays, into: Arrays | None) -> Arrays:
    return {
        name: lax.psum_scatter(leaf, AXIS).astype(jnp.float32)
        for name, leaf in grads.items()
    }


def memory_call(moved_bytes: int, device: jax.Device) -> Callable[[], Any]:
    """Returns a pass over memory that reads half of the bytes and writes half.

    Into memory that is there already, as a reduction into donated accumulators is.
    """
    if device.platform == "cpu":
        return memcpy(moved_bytes // 2, fresh=False)
    negate = jax.jit(lambda x: -x, donate_argnums=0)
    array = jnp.ones(max(1, moved_bytes // 8), jnp.float32, device=device)

    def call() -> Any:
        nonlocal array
        array = negate(array)
        return array

    return call


def memcpy(count: int, *, fresh: bool = True) -> Callable[[], None]:
    """Returns a copy of `count` bytes by as many threads as cores.

    Args:
      count: bytes.
      fresh: copy into fresh memory; XLA gives a custom call fresh result buffers too,
        unless it updates them in place.
    """
    threads = os.cpu_count() or 1
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    source = np.ones(count, np.uint8)
    kept = None if fresh else np.zeros(count, np.uint8)
    parts = np.linspace(0, count, threads + 1).astype(int)

    def copy() -> None:
        target = np.empty(count, np.uint8) if kept is None else kept
        jobs = [
            pool.submit(np.copyto, target[a:b], source[a:b])
            for a, b in itertools.pairwise(parts)
        ]
        for job in jobs:
            job.result()

    return copy
