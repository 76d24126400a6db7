"""Leaves as a transport takes them: converted, typed, and to be summed once."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, mask_to_first
from jaxzero._empty import empty_as_constants
from jaxzero._padding import own_slice
from jaxzero._plan import LeafSpec, Move, Plan, ReducePlan, Route

Arrays = Sequence[jax.Array]


def prepare(plan: ReducePlan, axis: Axis, leaves: Arrays) -> list[jax.Array]:
    """Returns the leaves of a reduction as a transport takes them."""
    return [
        _prepared(axis, spec, route, empty_as_constants(axis, jnp.asarray(leaf)))
        for spec, route, leaf in zip(plan.leaves, plan.routes, leaves, strict=True)
    ]


def prepare_shards(plan: Plan, axis: Axis, shards: Arrays) -> list[jax.Array]:
    """Returns accumulators as a transport takes them."""
    constants = empty_as_constants(axis, [jnp.asarray(shard) for shard in shards])
    return lift_shards(plan, axis, constants)


def lift_shards(plan: Plan, axis: Axis, shards: Arrays) -> list[jax.Array]:
    """Returns shards typed as varying over the axes they differ on."""
    return [
        axis.lift(shard, axis.shard_axes(spec.whole, spec.varying))
        for shard, spec in zip(shards, plan.leaves, strict=True)
    ]


def _prepared(axis: Axis, spec: LeafSpec, route: Route, leaf: jax.Array) -> jax.Array:
    leaf = leaf.astype(spec.dtype)
    match route.move:
        case Move.EMPTY:
            return leaf
        case Move.OWN:
            return own_slice(axis, spec.cut, leaf)
        case Move.ALONE:
            # The sum over axes of size 1 is free and types the result.
            names = axis.all_names if spec.whole else axis.replicate
            lifted = axis.lift(leaf, axis.all_names)
            summed: jax.Array = lax.psum(lifted, names) if names else lifted
            return summed
        case _:
            known_equal = axis.unvarying_axes(leaf)
            if known_equal:
                leaf = mask_to_first(axis, leaf, known_equal)
            return axis.lift(leaf, spec.varying)
