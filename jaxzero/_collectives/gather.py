"""One gather, from shards to full leaves, with the reduction as its transpose."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis
from jaxzero._collectives.linear import differentiable
from jaxzero._collectives.reduce import plan_reduction, reduce_leaves
from jaxzero._collectives.shards import PlainShard
from jaxzero._empty import empty_as_constants
from jaxzero._padding import trimmed
from jaxzero._plan import GatherPlan, LeafSpec, plan_gather
from jaxzero._policy import Policy
from jaxzero._transports import Choice, choose
from jaxzero._transports.transport import Transport

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathering:
    """What is planned for one call.

    Attributes:
      axis: its axis.
      choice: the transports that may carry it out.
      plans: the plan of each of them.
      policy: as given; the backward pass follows it too.
    """

    axis: Axis
    choice: Choice
    plans: Mapping[str, GatherPlan]
    policy: Policy

    @property
    def plan(self) -> GatherPlan:
        """The first plan; leaves and moves are those of every plan."""
        return self.plans[self.choice.names[0]]


def plan_gathering(specs: Sequence[LeafSpec], axis: Axis, policy: Policy) -> Gathering:
    """Plans a gather for every transport that may carry it out."""
    choice = choose(policy, axis.platform)
    return Gathering(
        axis=axis,
        choice=choice,
        plans={
            transport.name: plan_gather(
                specs, axis.group_size, policy, limits=transport.limits
            )
            for transport in choice.transports
        },
        policy=policy,
    )


def gather_leaves(gathering: Gathering, shards: Arrays) -> list[jax.Array]:
    """Returns the full leaves of shards in plan order."""
    constants = empty_as_constants(gathering.axis, list(map(jnp.asarray, shards)))
    prepared = [
        shard.astype(spec.shard_dtype)
        for shard, spec in zip(constants, gathering.plan.leaves, strict=True)
    ]
    types = tuple(jax.typeof(shard) for shard in prepared)
    linear = _Gather(gathering=gathering, types=types)
    leaves: list[jax.Array] = differentiable(linear)(prepared)
    return leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gather:
    """A gather, which is linear in the shards.

    Attributes:
      gathering: what is planned.
      types: types of the shards.
    """

    gathering: Gathering
    types: tuple[Any, ...]

    def run(self, shards: Arrays) -> list[jax.Array]:
        """Returns the full leaves."""
        choice = self.gathering.choice
        leaves: list[jax.Array] = choice.dispatch(self._carry_out, shards)
        return leaves

    def _carry_out(self, transport: Transport, shards: Arrays) -> list[jax.Array]:
        axis = self.gathering.axis
        plan = self.gathering.plans[transport.name]
        leaves = transport.all_gather(plan, axis, shards)
        # Every rank computes with the parameters on its own data, so they are typed
        # as varying even where they are whole; the transpose sums.
        return [
            axis.lift(leaf, axis.all_names + spec.varying)
            for leaf, spec in zip(leaves, plan.leaves, strict=True)
        ]

    def transpose(self, cotangents: Arrays) -> tuple[list[jax.Array]]:
        """Returns the cotangents of the shards: the sum, as of `shard_grads`."""
        axis = self.gathering.axis
        reduction = plan_reduction(
            self.gathering.plan.leaves,
            axis,
            dataclasses.replace(self.gathering.policy, op="sum", divide_by=None),
            accumulates=False,
        )
        sums, _stats = reduce_leaves(reduction, cotangents, None, False)
        return (
            [
                axis.lift_to(total, like)
                for total, like in zip(sums, self.types, strict=True)
            ],
        )


def gather_plain(axis: Axis, shard: PlainShard) -> jax.Array:
    """Returns the full leaf of a shard that no bucket can hold."""
    like, cut = shard.like, shard.cut
    value: jax.Array = empty_as_constants(axis, jnp.asarray(shard.value))
    value = value.astype(like.dtype)
    if value.size and not cut.whole:
        value = lax.all_gather(
            axis.lift(value, axis.names), axis.names, axis=cut.shard_dim, tiled=True
        )
        value = trimmed(cut, value)
    return value.reshape(like.shape)
