"""One reduction, from prepared leaves to shards, with its derivative."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, mask_to_first
from jaxzero._collectives.debug import log_nonfinite
from jaxzero._cut import Cut, Shape
from jaxzero._dtypes import component_bytes
from jaxzero._norms.stats import of_rank
from jaxzero._plan import LIMITS, Bucket, LeafSpec, Plan, build_plan
from jaxzero._policy import Policy
from jaxzero._transports import TRANSPORTS, Choice, choose

Arrays = Sequence[jax.Array]
Reduced = tuple[list[jax.Array], jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flush:
    """Leaves that are reduced by one call of a transport.

    Attributes:
      leaves: their numbers.
      plan: the plan for them alone.
    """

    leaves: tuple[int, ...]
    plan: Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """What is planned for one call.

    Attributes:
      axis: its axis.
      choice: the transports that may carry it out.
      plan: a plan for all leaves, for what all transports and flushes agree in.
      flushes: what each transport carries out, in order.
    """

    axis: Axis
    choice: Choice
    plan: Plan
    flushes: Mapping[str, tuple[Flush, ...]]


def plan_reduction(
    specs: Sequence[LeafSpec], axis: Axis, policy: Policy, *, accumulates: bool
) -> Reduction:
    """Plans a reduction for every transport that may carry it out."""
    choice = choose(policy, axis.platform)

    def plan(name: str, numbers: Sequence[int]) -> Plan:
        return build_plan(
            [specs[i] for i in numbers],
            axis.group_size,
            policy,
            limits=LIMITS[name],
            replicas=axis.replicas,
            accumulates=accumulates,
        )

    return Reduction(
        axis=axis,
        choice=choice,
        plan=plan(choice.names[0], range(len(specs))),
        flushes={
            name: tuple(
                Flush(leaves=numbers, plan=plan(name, numbers))
                for numbers in _split(specs, policy, name)
            )
            for name in choice.names
        },
    )


def _split(
    specs: Sequence[LeafSpec], policy: Policy, transport: str
) -> list[tuple[int, ...]]:
    """Returns the leaves of each flush: all, or from the last one on some at a time.

    Backward passes give the gradients of the last layers first.
    """
    everything = tuple(range(len(specs)))
    # Only the calls of this transport run beside anything.
    if policy.flush_bytes is None or transport != "nccl":
        return [everything]
    parts: list[tuple[int, ...]] = []
    part: list[int] = []
    size = 0
    for number in reversed(everything):
        spec = specs[number]
        part.append(number)
        size += spec.shard_components * spec.cut.ranks * component_bytes(spec.dtype)
        if size >= policy.flush_bytes:
            parts.append(tuple(sorted(part)))
            part, size = [], 0
    if part:
        parts.append(tuple(sorted(part)))
    return parts or [everything]


def reduce_leaves(
    reduction: Reduction, leaves: Arrays, into: Arrays | None, with_stats: bool
) -> Reduced:
    """Reduces leaves to shards.

    Args:
      reduction: what is planned.
      leaves: the leaves in plan order, as the user gave them.
      into: accumulators in plan order, or None.
      with_stats: whether to measure norm and finiteness.

    Returns:
      Shards in plan order, and what `of_rank` measures of them, if asked for.
    """
    plan, axis = reduction.plan, reduction.axis
    log_nonfinite(axis, [spec.path for spec in plan.leaves], leaves)
    prepared = [
        _prepare(plan, axis, spec, leaf)
        for spec, leaf in zip(plan.leaves, leaves, strict=True)
    ]
    if into is not None:
        sums = [
            own_or_empty(axis, spec, shard, spec.cut.shard_shape)
            for spec, shard in zip(plan.leaves, into, strict=True)
        ]
        into = _lift_shards(plan, axis, sums)
    types = [jax.typeof(leaf) for leaf in prepared]
    return _differentiable(reduction, types, with_stats)(prepared, into)


def own_or_empty(axis: Axis, spec: LeafSpec, value: Any, shape: Shape) -> jax.Array:
    """Returns the value, or an empty constant in its place if the leaf is empty.

    Every operation on an empty argument is folded away in the end, and XLA's Shardy
    passes read out of bounds when an argument of a shard_map turns out to be unused
    (a crash, sometimes, with JAX 0.11.2). One that is never used JAX itself removes.
    """
    array = jnp.asarray(value)
    if not spec.empty:
        return array
    names = axis.shard_axes(spec.whole, spec.varying)
    return axis.lift(jnp.zeros(shape, array.dtype), names)


def _lift_shards(plan: Plan, axis: Axis, shards: Arrays) -> list[jax.Array]:
    return [
        axis.lift(shard, axis.shard_axes(spec.whole, spec.varying))
        for shard, spec in zip(shards, plan.leaves, strict=True)
    ]


def _prepare(plan: Plan, axis: Axis, spec: LeafSpec, leaf: jax.Array) -> jax.Array:
    """Returns the leaf as the transport takes it: converted, and to be summed once."""
    leaf = own_or_empty(axis, spec, leaf, spec.shape).astype(spec.dtype)
    if spec.empty:
        return leaf
    if spec.reduced:
        return own_slice(axis, spec.cut, leaf)
    if plan.group_size * plan.replicas == 1:
        # The sum over axes of size 1 is free and types the result.
        names = axis.all_names if spec.whole else axis.replicate
        lifted = axis.lift(leaf, axis.all_names)
        summed: jax.Array = lax.psum(lifted, names) if names else lifted
        return summed
    known_equal = axis.unvarying_axes(leaf)
    if known_equal:
        leaf = mask_to_first(axis, leaf, known_equal)
    return axis.lift(leaf, spec.varying)


def own_slice(axis: Axis, cut: Cut, leaf: jax.Array) -> jax.Array:
    """Returns this rank's shard of a leaf that every rank holds."""
    if cut.layout == "whole":
        return leaf
    padded = padded_leaf(cut, leaf)
    dim = cut.dim or 0
    shape = padded.shape[:dim] + (cut.ranks, cut.chunk) + padded.shape[dim + 1 :]
    by_rank = axis.lift(padded.reshape(shape), axis.names)
    # Indexed by rank, because a position may exceed the int32 that ranks have.
    own: jax.Array = lax.dynamic_index_in_dim(by_rank, axis.rank(), dim, keepdims=False)
    return own


def padded_leaf(cut: Cut, leaf: jax.Array) -> jax.Array:
    """Returns the leaf in the shape of its shards laid side by side."""
    if cut.layout == "whole":
        return leaf
    if cut.dim is None:
        leaf = leaf.reshape(-1)
    dim = cut.dim or 0
    surplus = cut.chunk * cut.ranks - cut.length
    if not surplus:
        return leaf
    return jnp.pad(leaf, [(0, surplus if d == dim else 0) for d in range(leaf.ndim)])


def _differentiable(
    reduction: Reduction, types: Sequence[Any], with_stats: bool
) -> Callable[..., Reduced]:
    """Returns the reduction with its transpose.

    The reduction is linear. Its transpose is taken from the same sum written with
    `lax` leaf by leaf, so that it follows JAX's own conventions for replicated
    values, with and without varying types. Statistics have no derivative.
    """
    axis = reduction.axis

    def carry_out(name: str, leaves: Arrays, into: Arrays | None) -> Reduced:
        shards: dict[int, jax.Array] = {}
        measured: list[jax.Array] = []
        buckets: list[Bucket] = []
        for flush in reduction.flushes[name]:
            own = [leaves[i] for i in flush.leaves]
            if shards and own:
                # One at a time, so that temporary memory does not add up.
                own, _ = lax.optimization_barrier((own, list(shards.values())[-1]))
            found, stats = TRANSPORTS[name].reduce_scatter(
                flush.plan,
                axis,
                own,
                None if into is None else [into[i] for i in flush.leaves],
                with_stats,
            )
            shards |= zip(flush.leaves, found, strict=True)
            measured += stats
            buckets += flush.plan.buckets
        ordered = [shards[i] for i in range(len(leaves))]
        total = of_rank(buckets, axis, measured) if with_stats else None
        return _lift_shards(reduction.plan, axis, ordered), total

    @jax.custom_vjp
    def run(leaves: Arrays, into: Arrays | None) -> Reduced:
        reduced: Reduced = reduction.choice.dispatch(carry_out, leaves, into)
        return reduced

    def forward(leaves: Arrays, into: Arrays | None) -> tuple[Any, bool]:
        return run(leaves, into), into is not None

    def backward(had_into: bool, cotangents: Any) -> tuple[Any, Any]:
        shards, _ = cotangents
        # Zeros stand for the leaves, so that no gradient outlives its reduction.
        zeros = [axis.lift_to(jnp.zeros(t.shape, t.dtype), t) for t in types]
        plan = reduction.plan
        _, transpose = jax.vjp(lambda leaves: _plain_sum(plan, axis, leaves), zeros)
        return transpose(shards)[0], (shards if had_into else None)

    run.defvjp(forward, backward)
    return run


def _plain_sum(plan: Plan, axis: Axis, leaves: Arrays) -> list[jax.Array]:
    """Returns the same shards, leaf by leaf, in plain `lax`."""
    shards = []
    for spec, leaf in zip(plan.leaves, leaves, strict=True):
        cut = spec.cut
        if spec.empty:
            total = jnp.zeros(cut.shard_shape, spec.dtype)
        elif spec.reduced or plan.group_size * plan.replicas == 1:
            total = leaf
        elif spec.whole:
            total = lax.psum(leaf, axis.all_names)
        else:
            total = lax.psum_scatter(
                padded_leaf(cut, leaf),
                axis.names,
                scatter_dimension=cut.dim or 0,
                tiled=True,
            )
            if axis.replicate:
                total = lax.psum(total, axis.replicate)
        scaled = total.reshape(cut.shard_shape) / jnp.asarray(plan.divisor, total.dtype)
        shards.append(scaled.astype(spec.shard_dtype))
    return _lift_shards(plan, axis, shards)
