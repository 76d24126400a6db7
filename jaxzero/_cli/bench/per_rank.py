"""Reductions of per-rank trees, as programs over a mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

AXIS = "data"
Arrays = dict[str, jax.Array]
Way = Callable[[Arrays, Arrays | None], Arrays]
"""A way to reduce: what one rank does with its gradients and flat accumulators."""


def jitted(mesh: Mesh, way: Way, *, accumulates: bool) -> Any:
    """Returns a reduction over the leading axis of stacked gradients.

    It takes gradients [ranks, *shape] and, if it accumulates, flat accumulators, which
    it donates; it returns flat shards.
    """

    def local(grads: Arrays, into: Arrays | None = None) -> Arrays:
        own = {name: g.reshape(g.shape[1:]) for name, g in grads.items()}
        return way(own, into)

    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, spec) if accumulates else (spec,),
        out_specs=spec,
    )
    return jax.jit(mapped, donate_argnums=1 if accumulates else ())
