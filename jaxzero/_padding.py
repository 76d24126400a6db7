"""From leaves to shards laid side by side and back: pad, trim, own slice.

The only place that pads and trims in Python. A stacked leaf is given with the
dimension of its layers in front, which is not cut.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis
from jaxzero._cut import Cut


def padded(cut: Cut, leaf: Any, *, stack: int = 0, xp: Any = jnp) -> Any:
    """Returns a leaf in the shape of its shards laid side by side.

    Args:
      cut: the cut of the leaf, or of each of its layers.
      leaf: the leaf in true shape.
      stack: dimensions in front that are not cut.
      xp: `numpy` or `jax.numpy`, whose arrays `leaf` is one of.
    """
    if cut.whole:
        return leaf
    if cut.dim is None:
        leaf = leaf.reshape(*leaf.shape[:stack], cut.length)
    if not cut.surplus:
        return leaf
    pad = [(0, 0)] * leaf.ndim
    pad[stack + cut.shard_dim] = (0, cut.surplus)
    return xp.pad(leaf, pad)


def trimmed(cut: Cut, array: Any, *, stack: int = 0) -> Any:
    """Returns shards laid side by side without padding; a flat leaf stays flat.

    Args:
      cut: the cut of the leaf, or of each of its layers.
      array: all shards side by side, an array of NumPy or JAX.
      stack: dimensions in front that are not cut.
    """
    if cut.whole or not cut.surplus:
        return array
    dim = stack + cut.shard_dim
    return array[(slice(None),) * dim + (slice(0, cut.length),)]


def own_slice(axis: Axis, cut: Cut, leaf: jax.Array) -> jax.Array:
    """Returns this rank's shard of a leaf that every rank holds."""
    if cut.whole:
        return leaf
    full = padded(cut, leaf)
    dim = cut.shard_dim
    shape = full.shape[:dim] + (cut.ranks, cut.chunk) + full.shape[dim + 1 :]
    by_rank = axis.lift(full.reshape(shape), axis.names)
    # Indexed by rank, because a position may exceed the int32 that ranks have.
    own: jax.Array = lax.dynamic_index_in_dim(by_rank, axis.rank(), dim, keepdims=False)
    return own
