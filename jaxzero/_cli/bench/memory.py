"""Does a comparison fit? Bytes that it needs, and bytes that are free."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxzero._cli.bench.trees import Tree
from jaxzero._cli.free_memory import free_host_bytes


def needed_bytes(tree: Tree, dtypes: Sequence[Any], wire: Any, ranks: int) -> int:
    """Returns about how much one device needs, an upper limit."""
    grads = sent = numel = 0
    for i, shape in enumerate(tree.values()):
        size = math.prod(shape)
        dtype = jnp.dtype(dtypes[i % len(dtypes)])
        numel += size
        grads += size * dtype.itemsize
        sent += size * jnp.dtype(wire or dtype).itemsize
    # The flat leaf, or on one rank the memory that is passed over.
    limit = sent if ranks > 1 else grads + 8 * numel
    # What `concatenated` makes: padded leaves, the row of all of them, and a float32
    # copy where XLA sums 16 bits.
    temporary = 2 * sent + 4 * numel
    # Accumulators, those of the flat leaf, and a result beside them.
    return grads + limit + temporary + 3 * 4 * numel // ranks


def free_bytes(device: jax.Device) -> int | None:
    """Returns what is free on a GPU or on this machine; None if nobody knows."""
    if device.platform == "cpu":
        return free_host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
