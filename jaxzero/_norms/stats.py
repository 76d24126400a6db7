"""Norm and finiteness of a whole tree from what each bucket measured."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, varying
from jaxzero._plan import Bucket


class Stats(NamedTuple):
    """What `shard_grads(..., with_stats=True)` measures of the tree it returns.

    Constants to differentiation: a loss that holds them has no gradient from them.

    Attributes:
      norm: global L2 norm of the returned tree, `into` included and as stored, float32
        scalar.
      all_finite: whether every element of it is finite, bool scalar.
    """

    norm: jax.Array
    all_finite: jax.Array


def of_rank(
    buckets: Sequence[Bucket], axis: Axis, measured: Sequence[jax.Array]
) -> jax.Array:
    """Combines the measurements of all buckets on one rank.

    Args:
      buckets: the buckets that were carried out.
      axis: its axis.
      measured: per bucket float32[2], norm and 1 if finite.

    Returns:
      float32[3]: norm of the leaves that are cut, norm of those that are whole, and 1
      if all are finite.
    """
    whole = [bucket.whole for bucket in buckets]
    cut = [m[0] for m, is_whole in zip(measured, whole, strict=True) if not is_whole]
    kept = [m[0] for m, is_whole in zip(measured, whole, strict=True) if is_whole]
    finite = [m[1] for m in measured]
    return _stack(axis, [_norm(axis, cut), _norm(axis, kept), _least(axis, finite)])


def of_all_ranks(axis: Axis, mine: jax.Array) -> Stats:
    """Combines the results of `of_rank` of all ranks.

    Returns:
      The same values, typed as equal, on every rank of the axis.
    """
    # One small sum carries every rank's numbers to all ranks, so that the norm can
    # be formed without squaring numbers near the float32 limits.
    row = jnp.arange(axis.group_size, dtype=jnp.int32)[:, None] == axis.rank()
    everyone = lax.psum(jnp.where(row, mine[None, :], 0.0), axis.names)
    norms = jnp.concatenate([everyone[:, 0], everyone[:1, 1]])
    return Stats(norm=_stable_norm(norms), all_finite=jnp.all(everyone[:, 2] == 1.0))


def _stack(axis: Axis, values: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([axis.lift(value, axis.names) for value in _aligned(axis, values)])


def _aligned(axis: Axis, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Types all values as varying over the union of their axes."""
    if not axis.typed:
        return list(values)
    names = frozenset[str]().union(*(varying(value) for value in values))
    return [axis.lift(value, names) for value in values]


def _norm(axis: Axis, norms: Sequence[jax.Array]) -> jax.Array:
    if not norms:
        return jnp.zeros((), jnp.float32)
    return _stable_norm(jnp.stack(_aligned(axis, norms)))


def _least(axis: Axis, flags: Sequence[jax.Array]) -> jax.Array:
    if not flags:
        return jnp.ones((), jnp.float32)
    return jnp.min(jnp.stack(_aligned(axis, flags)))


def _stable_norm(values: jax.Array) -> jax.Array:
    """Returns the L2 norm without overflow or underflow of the squares."""
    largest = jnp.max(jnp.abs(values))
    # XLA may divide through the reciprocal, which must be finite and not subnormal.
    scale = jnp.clip(largest, 2.0**-126, 2.0**126)
    scale = jnp.where(jnp.isfinite(largest), scale, 1.0)
    return scale * jnp.sqrt(jnp.sum(jnp.square(values / scale)))
