"""The planner: every decision about a reduction or a gather, with its reason.

It decides from shapes, dtypes and options alone, so that all ranks decide alike and
nothing is decided at run time. No JAX.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxzero._dtypes import component_bytes, component_dtype
from jaxzero._plan.plan import GatherPlan, ReducePlan
from jaxzero._plan.types import (
    Bucket,
    Collective,
    Kind,
    LeafSpec,
    Limits,
    Move,
    Route,
    Slot,
)
from jaxzero._policy import Policy

ALIGN_BYTES = 16
"""Slots start at multiples of this, so that kernels read and write 16 bytes at once."""


def plan_reduce(
    leaves: Sequence[LeafSpec],
    group_size: int,
    policy: Policy,
    *,
    limits: Limits,
    replicas: int = 1,
    accumulates: bool = False,
) -> ReducePlan:
    """Plans a reduction.

    Args:
      leaves: the leaves, in tree order.
      group_size: ranks along the shard axis.
      policy: op, dtypes, reduction and sizes.
      limits: the transport's sizes for what the policy leaves open.
      replicas: ranks along the replicate axis.
      accumulates: whether the shards are added to accumulators.
    """
    limits = limits.under(policy)
    planner = _ReducePlanner(policy, limits, group_size, replicas, accumulates)
    routes = [planner.add(index, leaf) for index, leaf in enumerate(leaves)]
    return ReducePlan(
        group_size=group_size,
        limits=limits,
        leaves=tuple(leaves),
        routes=tuple(routes),
        buckets=planner.buckets.finish(),
        replicas=replicas,
        divisor=policy.divisor(group_size * replicas),
    )


def plan_gather(
    leaves: Sequence[LeafSpec], group_size: int, policy: Policy, *, limits: Limits
) -> GatherPlan:
    """Plans a gather, in the dtypes of the leaves.

    Args:
      leaves: the leaves, in tree order.
      group_size: ranks along the shard axis.
      policy: sizes.
      limits: the transport's sizes for what the policy leaves open.
    """
    limits = limits.under(policy)
    buckets = _Buckets(limits.bucket_bytes)
    routes = [
        _add_gathered(buckets, index, leaf, group_size, limits.direct_bytes)
        for index, leaf in enumerate(leaves)
    ]
    return GatherPlan(
        group_size=group_size,
        limits=limits,
        leaves=tuple(leaves),
        routes=tuple(routes),
        buckets=buckets.finish(),
    )


def float16_pre_scale(count: int) -> float:
    """Returns the power of two that a float16 wire multiplies before the sum.

    Dividing by the whole count first loses small values, dividing last overflows
    (public reports of both: PyTorch DDP/FSDP predivide factors). Up to 16 ranks the
    sum cannot overflow unless the mean does; beyond, the exponent is split in two.
    """
    exponent = math.ceil(math.log2(count)) if count > 1 else 0
    return 2.0 ** -max(min(exponent, 4), -(-exponent // 2))


def _add_gathered(
    buckets: "_Buckets", index: int, leaf: LeafSpec, group_size: int, direct_bytes: int
) -> Route:
    if 0 in leaf.shape:
        return _EMPTY
    alone = group_size == 1

    def bucket(kind: Kind, collective: Collective) -> Bucket:
        return Bucket(
            kind=kind,
            collective=collective,
            comm_dtype=component_dtype(leaf.dtype),
            send_rows=group_size if collective == "all_gather" else 1,
            recv_rows=1,
            in_place=False,
            pre_scale=1.0,
            whole=leaf.whole,
            varying=leaf.varying,
        )

    if leaf.whole or alone:
        buckets.add_alone(bucket("local", "none"), index, leaf)
        reason = "one rank" if alone else "whole on every rank"
        return Route(move=Move.OWN, kind="local", reason=reason)
    obstacle = _too_small(leaf, bucket("direct", "all_gather"), direct_bytes)
    obstacle = obstacle or _uneven(leaf)
    if obstacle is None:
        buckets.add_alone(bucket("direct", "all_gather"), index, leaf)
        return Route(move=Move.GATHER, kind="direct", reason=_READ_IN_PLACE)
    buckets.add_packed(bucket("packed", "all_gather"), index, leaf)
    return Route(move=Move.GATHER, kind="packed", reason=obstacle)


class _ReducePlanner:
    """Decides the route of each leaf of a reduction, and fills its buckets."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        group_size: int,
        replicas: int,
        accumulates: bool,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._group_size = group_size
        self._replicas = replicas
        self._accumulates = accumulates
        self._direct_recv_bytes = 0
        self.buckets = _Buckets(limits.bucket_bytes)

    def add(self, index: int, leaf: LeafSpec) -> Route:
        """Puts a leaf into a bucket; returns its route."""
        if 0 in leaf.shape:
            return _EMPTY
        if leaf.summed or self._group_size * self._replicas == 1:
            self.buckets.add_alone(self._bucket(leaf, "local", "none"), index, leaf)
            if leaf.summed:
                return Route(move=Move.OWN, kind="local", reason="already summed")
            return Route(move=Move.ALONE, kind="local", reason="one rank")
        whole = leaf.whole or self._group_size == 1
        move = Move.WHOLE if whole else Move.SCATTER
        collective: Collective = "all_reduce" if whole else "reduce_scatter"
        direct = self._bucket(leaf, "direct", collective)
        obstacle = self._obstacle_to_direct(leaf, direct)
        if obstacle is not None:
            packed = self._bucket(leaf, "packed", collective)
            self.buckets.add_packed(packed, index, leaf)
            return Route(move=move, kind="packed", reason=obstacle)
        self._direct_recv_bytes += self.buckets.add_alone(direct, index, leaf)
        return Route(move=move, kind="direct", reason=_READ_IN_PLACE)

    def _bucket(self, leaf: LeafSpec, kind: Kind, collective: Collective) -> Bucket:
        """Returns an empty bucket for a leaf; leaves with equal ones may share it."""
        comm_dtype = self._comm_dtype(leaf, collective)
        scatters = collective == "reduce_scatter"
        summed_on_arrival = self._policy.reduction == "float32" and scatters
        recv_rows = self._group_size if summed_on_arrival else 1
        same = component_dtype(leaf.shard_dtype) == comm_dtype
        scaled = comm_dtype == "float16" and recv_rows == 1 and collective != "none"
        count = self._group_size * self._replicas
        return Bucket(
            kind=kind,
            collective=collective,
            comm_dtype=comm_dtype,
            send_rows=self._group_size if scatters else 1,
            recv_rows=recv_rows,
            in_place=kind == "direct"
            and same
            and recv_rows == 1
            and not self._accumulates,
            pre_scale=float16_pre_scale(count) if scaled else 1.0,
            whole=leaf.whole,
            varying=leaf.varying,
        )

    def _comm_dtype(self, leaf: LeafSpec, collective: Collective) -> str:
        if collective == "none":
            return component_dtype(leaf.dtype)
        wire = component_dtype(self._policy.comm_dtype or leaf.dtype)
        if self._policy.reduction == "float32" and collective == "all_reduce":
            # An all-reduce sums on the wire, so exactness needs a wide wire; leaves
            # kept whole are small.
            return "float64" if wire == "float64" else "float32"
        return wire

    def _obstacle_to_direct(self, leaf: LeafSpec, bucket: Bucket) -> str | None:
        """Returns why a leaf cannot be read in place, or None if it can."""
        too_small = _too_small(leaf, bucket, self._limits.direct_bytes)
        if too_small:
            return too_small
        if component_dtype(leaf.dtype) != bucket.comm_dtype:
            return f"comm dtype {bucket.comm_dtype} differs"
        if bucket.pre_scale != 1.0:
            return "scaled before a float16 sum"
        uneven = _uneven(leaf)
        if uneven:
            return uneven
        if self._limits.widens_bfloat16 and bucket.comm_dtype == "bfloat16":
            return "bfloat16 sums are widened"
        if not bucket.in_place:
            # Rows of direct leaves may all be alive at once.
            rows = _shard_bytes(leaf, bucket) * bucket.recv_rows
            if self._direct_recv_bytes + rows > self._limits.bucket_bytes:
                return "rows received by direct leaves fill bucket_bytes"
        return None


_EMPTY = Route(move=Move.EMPTY, kind=None, reason="nothing to send")
_READ_IN_PLACE = "large, read in place"


def _too_small(leaf: LeafSpec, bucket: Bucket, direct_bytes: int) -> str | None:
    sent = _shard_bytes(leaf, bucket) * bucket.send_rows
    return "below direct_bytes" if sent < direct_bytes else None


def _uneven(leaf: LeafSpec) -> str | None:
    """Returns why the shards of a leaf do not lie in it one after the other."""
    cut = leaf.cut
    if cut.outer > 1 and cut.ranks > 1:
        return f"cut on dimension {cut.dim}"
    if not cut.even:
        return f"{cut.length} not divisible by {cut.ranks}"
    return None


def _shard_bytes(leaf: LeafSpec, bucket: Bucket) -> int:
    return leaf.shard_components * component_bytes(bucket.comm_dtype)


class _Open:
    """A bucket that is being filled."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.used_bytes = 0


class _Buckets:
    """Buckets in the order in which they are sent, and those that are being filled.

    Leaves share a packed bucket if everything but its slots is equal for them, so an
    empty bucket is the key of the one that is being filled.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._closed: list[Bucket] = []
        self._open: dict[Bucket, _Open] = {}

    def finish(self) -> tuple[Bucket, ...]:
        """Returns all buckets."""
        for bucket in list(self._open):
            self._close(bucket)
        return tuple(self._closed)

    def add_alone(self, bucket: Bucket, index: int, leaf: LeafSpec) -> int:
        """Gives a leaf a bucket of its own; returns the bytes of its received rows."""
        count = leaf.shard_components
        slot = Slot(leaf=index, begin=0, count=count, row_offset=0)
        filled = dataclasses.replace(bucket, row_numel=count, slots=(slot,))
        self._closed.append(filled)
        return filled.recv_bytes

    def add_packed(self, bucket: Bucket, index: int, leaf: LeafSpec) -> None:
        """Puts a leaf into the open bucket, or into several if it is larger."""
        itemsize = component_bytes(bucket.comm_dtype)
        capacity = self._row_capacity_bytes(bucket)
        total = leaf.shard_components
        begin = 0
        while begin < total:
            filling = self._open.setdefault(bucket, _Open())
            free = capacity - filling.used_bytes
            count = total - begin
            if count * itemsize > free:
                if total * itemsize <= capacity or free == 0:
                    self._close(bucket)
                    continue
                # Larger than a whole bucket: its columns share buckets.
                count = free // itemsize
            filling.slots.append(
                Slot(
                    leaf=index,
                    begin=begin,
                    count=count,
                    row_offset=filling.used_bytes // itemsize,
                )
            )
            filling.used_bytes = _align(filling.used_bytes + count * itemsize)
            begin += count

    def _row_capacity_bytes(self, bucket: Bucket) -> int:
        # A row holds at least one aligned unit, however small bucket_bytes is.
        share = self._limit_bytes // bucket.send_rows
        return max(ALIGN_BYTES, share // ALIGN_BYTES * ALIGN_BYTES)

    def _close(self, bucket: Bucket) -> None:
        filled = self._open.pop(bucket)
        row_numel = filled.used_bytes // component_bytes(bucket.comm_dtype)
        self._closed.append(
            dataclasses.replace(bucket, row_numel=row_numel, slots=tuple(filled.slots))
        )


def _align(count_bytes: int) -> int:
    return -(-count_bytes // ALIGN_BYTES) * ALIGN_BYTES
