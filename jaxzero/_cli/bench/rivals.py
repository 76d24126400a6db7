"""Ways to reduce a tree: jaxzero, and what a JAX user would write instead.

All do the same work: sum in the wire dtype, divide by the number of ranks, and add to
flat accumulators in their dtype. Without accumulators they return flat shards in the
wire dtype.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import jaxzero
from jaxzero._cli.bench.per_rank import AXIS, Arrays, Way

JAXZERO = "jaxzero"


def ways(platform: str, policy: jaxzero.Policy) -> dict[str, Way]:
    """Returns the ways that a platform has, by name, jaxzero first.

    Args:
      platform: that of the devices, such as "cpu".
      policy: its `comm_dtype` is the wire dtype of all ways; the rest of it is
        jaxzero's.
    """
    wire = policy.comm_dtype
    found: dict[str, Way] = {
        JAXZERO: functools.partial(ours, policy),
        "per leaf": functools.partial(per_leaf, wire),
        "concatenated": functools.partial(concatenated, wire),
    }
    if platform == "gpu":
        found["one group"] = functools.partial(grouped, wire)
    return found


def ours(policy: jaxzero.Policy, grads: Arrays, into: Arrays | None) -> Arrays:
    """One call."""
    shards: Arrays = jaxzero.shard_grads(
        grads, AXIS, into=into, policy=policy, cuts="flat"
    )
    return shards


def per_leaf(wire: Any, grads: Arrays, into: Arrays | None) -> Arrays:
    """One psum_scatter per leaf; XLA combines them as it likes."""
    return {
        name: stored(lax.psum_scatter(rows_of(leaf, wire), AXIS), name, into)
        for name, leaf in grads.items()
    }


def grouped(wire: Any, grads: Arrays, into: Arrays | None) -> Arrays:
    """One psum_scatter per leaf, all in one NCCL group."""
    rows = {name: rows_of(leaf, wire) for name, leaf in grads.items()}
    with set_xla_metadata(collective_group_key="grads"):
        shards = {name: lax.psum_scatter(leaf, AXIS) for name, leaf in rows.items()}
    return {name: stored(shard, name, into) for name, shard in shards.items()}


def concatenated(wire: Any, grads: Arrays, into: Arrays | None) -> Arrays:
    """One psum_scatter per dtype on the wire, of all leaves side by side."""
    rows = {name: rows_of(leaf, wire) for name, leaf in grads.items()}
    results: Arrays = {}
    for dtype in sorted({str(leaf.dtype) for leaf in rows.values()}):
        alike = {name: leaf for name, leaf in rows.items() if leaf.dtype == dtype}
        row = lax.psum_scatter(jnp.concatenate(list(alike.values()), axis=1), AXIS)
        start = 0
        for name, leaf in alike.items():
            end = start + leaf.shape[1]
            results[name] = stored(lax.slice_in_dim(row, start, end), name, into)
            start = end
    return results


def rows_of(leaf: jax.Array, wire: Any) -> jax.Array:
    """Returns the leaf in the wire dtype, flat and padded, as one row per rank."""
    ranks = lax.axis_size(AXIS)
    flat = leaf.reshape(-1).astype(wire or leaf.dtype)
    return jnp.pad(flat, (0, -flat.size % ranks)).reshape(ranks, -1)


def stored(shard: jax.Array, name: str, into: Arrays | None) -> jax.Array:
    """Returns what every rival does with what it receives."""
    ranks = lax.axis_size(AXIS)
    if into is None:
        return shard / ranks
    old = into[name]
    return old + shard.astype(old.dtype).reshape(old.shape) / ranks
