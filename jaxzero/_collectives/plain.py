"""A reduction in plain `lax`, leaf by leaf: what its transpose is taken from."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis
from jaxzero._collectives.prepare import lift_shards
from jaxzero._padding import padded
from jaxzero._plan import LeafSpec, Move, ReducePlan, Route


def plain_sum(
    plan: ReducePlan, axis: Axis, leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the shards that a transport returns for prepared leaves."""
    shards = []
    for spec, route, leaf in zip(plan.leaves, plan.routes, leaves, strict=True):
        total = _total(axis, spec, route, leaf).reshape(spec.cut.shard_shape)
        scaled = total / jnp.asarray(plan.divisor, total.dtype)
        shards.append(scaled.astype(spec.shard_dtype))
    return lift_shards(plan, axis, shards)


def _total(axis: Axis, spec: LeafSpec, route: Route, leaf: jax.Array) -> jax.Array:
    total: jax.Array
    match route.move:
        case Move.EMPTY:
            return jnp.zeros(spec.cut.shard_shape, spec.dtype)
        case Move.OWN | Move.ALONE:
            return leaf
        case Move.WHOLE:
            total = lax.psum(leaf, axis.all_names)
            return total
        case _:
            total = lax.psum_scatter(
                padded(spec.cut, leaf),
                axis.names,
                scatter_dimension=spec.cut.shard_dim,
                tiled=True,
            )
            if axis.replicate:
                total = lax.psum(total, axis.replicate)
            return total
