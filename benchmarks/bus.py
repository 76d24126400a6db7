"""Bus bandwidth, and rows that say it. No JAX: `fsdp2.py` has rows of this form too."""

from typing import Any

Row = dict[str, Any]


def bus_bandwidth(nbytes: int, ranks: int, seconds: float) -> float:
    """Returns GB/s that each rank's link carries during a reduce-scatter.

    Args:
      nbytes: one rank's gradients on the wire, before the reduction.
      ranks: how many; each sends all but its own share.
      seconds: time of the reduction.
    """
    return nbytes * (ranks - 1) / ranks / seconds / 1e9


def row(
    *,
    tree: str,
    leaves: int,
    nbytes: int,
    ranks: int,
    wire: str,
    into: str,
    how: str,
    seconds: float,
) -> Row:
    """Returns one measurement.

    Args:
      tree: name of the tree.
      leaves: how many it has.
      nbytes: see `bus_bandwidth`.
      ranks: see `bus_bandwidth`.
      wire: dtype in which gradients are and travel.
      into: "fresh" for shards in that dtype, "float32" for accumulators.
      how: what reduces.
      seconds: time of one reduction.
    """
    return {
        "tree": tree,
        "leaves": leaves,
        "MB": round(nbytes / 1e6, 3),
        "ranks": ranks,
        "wire": wire,
        "into": into,
        "how": how,
        "ms": seconds * 1e3,
        "GB/s": bus_bandwidth(nbytes, ranks, seconds),
    }
