"""One reduction, from prepared leaves to shards, with its derivative."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis
from jaxzero._collectives.debug import log_nonfinite
from jaxzero._collectives.linear import differentiable
from jaxzero._collectives.plain import plain_sum
from jaxzero._collectives.prepare import lift_shards, prepare, prepare_shards
from jaxzero._dtypes import component_bytes
from jaxzero._norms.stats import of_rank
from jaxzero._plan import Bucket, LeafSpec, ReducePlan, plan_reduce
from jaxzero._policy import Policy
from jaxzero._transports import Choice, choose
from jaxzero._transports.transport import Transport

Arrays = Sequence[jax.Array]


class ReducedLeaves(NamedTuple):
    """What a reduction returns.

    Attributes:
      shards: the shards in plan order.
      measured: what `of_rank` measures of them; None unless asked for.
    """

    shards: list[jax.Array]
    measured: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Leaves that are reduced by one call of a transport.

    Attributes:
      leaves: their positions in the whole tree.
      plan: the plan for them alone.
    """

    leaves: tuple[int, ...]
    plan: ReducePlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """What is planned for one call.

    Attributes:
      axis: its axis.
      choice: the transports that may carry it out.
      plan: plan of the whole tree; its buckets are those of the first transport, its
        routes are the same for all.
      parts: the calls of each transport, in order.
    """

    axis: Axis
    choice: Choice
    plan: ReducePlan
    parts: Mapping[str, tuple[Part, ...]]


def plan_reduction(
    specs: Sequence[LeafSpec], axis: Axis, policy: Policy, *, accumulates: bool
) -> Reduction:
    """Plans a reduction for every transport that may carry it out."""
    choice = choose(policy, axis.platform)

    def plan(transport: Transport, positions: Sequence[int]) -> ReducePlan:
        return plan_reduce(
            [specs[i] for i in positions],
            axis.group_size,
            policy,
            limits=transport.limits,
            replicas=axis.replicas,
            accumulates=accumulates,
        )

    return Reduction(
        axis=axis,
        choice=choice,
        plan=plan(choice.transports[0], range(len(specs))),
        parts={
            transport.name: tuple(
                Part(leaves=positions, plan=plan(transport, positions))
                for positions in _split(specs, policy, transport)
            )
            for transport in choice.transports
        },
    )


def _split(
    specs: Sequence[LeafSpec], policy: Policy, transport: Transport
) -> list[tuple[int, ...]]:
    """Returns the leaves of each call: all, or from the last one on some at a time.

    Backward passes give the gradients of the last layers first.
    """
    everything = tuple(range(len(specs)))
    if policy.flush_bytes is None or not transport.splits_calls:
        return [everything]
    parts: list[tuple[int, ...]] = []
    part: list[int] = []
    size = 0
    for position in reversed(everything):
        spec = specs[position]
        part.append(position)
        size += spec.shard_components * spec.cut.ranks * component_bytes(spec.dtype)
        if size >= policy.flush_bytes:
            parts.append(tuple(sorted(part)))
            part, size = [], 0
    if part:
        parts.append(tuple(sorted(part)))
    return parts or [everything]


def reduce_leaves(
    reduction: Reduction, leaves: Arrays, into: Arrays | None, with_stats: bool
) -> ReducedLeaves:
    """Reduces leaves to shards.

    Args:
      reduction: what is planned.
      leaves: the leaves in plan order, as the user gave them.
      into: accumulators in plan order, or None.
      with_stats: whether to measure norm and finiteness.
    """
    plan, axis = reduction.plan, reduction.axis
    log_nonfinite(axis, [spec.path for spec in plan.leaves], leaves)
    prepared = prepare(plan, axis, leaves)
    if into is not None:
        into = prepare_shards(plan, axis, into)
    linear = _Reduce(
        reduction=reduction,
        types=tuple(jax.typeof(leaf) for leaf in prepared),
        accumulates=into is not None,
        with_stats=with_stats,
    )
    reduced: ReducedLeaves = differentiable(linear)(prepared, into)
    return reduced


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reduce:
    """A reduction of prepared leaves, which is linear in them and in accumulators.

    Attributes:
      reduction: what is planned.
      types: types of the prepared leaves.
      accumulates: whether there are accumulators.
      with_stats: whether to measure the shards.
    """

    reduction: Reduction
    types: tuple[Any, ...]
    accumulates: bool
    with_stats: bool

    def run(self, leaves: Arrays, into: Arrays | None) -> ReducedLeaves:
        """Returns the shards."""
        choice = self.reduction.choice
        reduced: ReducedLeaves = choice.dispatch(self._carry_out, leaves, into)
        return reduced

    def _carry_out(
        self, transport: Transport, leaves: Arrays, into: Arrays | None
    ) -> ReducedLeaves:
        axis = self.reduction.axis
        shards: dict[int, jax.Array] = {}
        measured: list[jax.Array] = []
        buckets: list[Bucket] = []
        for part in self.reduction.parts[transport.name]:
            own = [leaves[i] for i in part.leaves]
            if shards and own:
                # One at a time, so that temporary memory does not add up.
                own, _ = lax.optimization_barrier((own, list(shards.values())[-1]))
            reduced = transport.reduce_scatter(
                part.plan,
                axis,
                own,
                None if into is None else [into[i] for i in part.leaves],
                self.with_stats,
            )
            shards |= zip(part.leaves, reduced.shards, strict=True)
            measured += reduced.measured
            buckets += part.plan.buckets
        ordered = [shards[i] for i in range(len(leaves))]
        return ReducedLeaves(
            shards=lift_shards(self.reduction.plan, axis, ordered),
            measured=of_rank(buckets, axis, measured) if self.with_stats else None,
        )

    def transpose(self, cotangents: ReducedLeaves) -> tuple[Any, Any]:
        """Returns the cotangents of leaves and accumulators.

        Taken from the same sum written with `lax` leaf by leaf, so that it follows
        JAX's own conventions for replicated values, with and without varying types.
        Statistics have no derivative.
        """
        plan, axis = self.reduction.plan, self.reduction.axis
        shards = cotangents.shards
        # Zeros stand for the leaves, so that no gradient outlives its reduction.
        zeros = [axis.lift_to(jnp.zeros(t.shape, t.dtype), t) for t in self.types]
        _, transpose = jax.vjp(lambda leaves: plain_sum(plan, axis, leaves), zeros)
        return transpose(shards)[0], (shards if self.accumulates else None)
