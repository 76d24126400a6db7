"""Plan: which leaf travels in which bucket, at which offset, and why.

Every decision about a reduction is made here, from shapes, dtypes and options
alone, so that all ranks decide alike and nothing is decided at run time. No JAX.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Literal

from jaxzero._cut import Cut, Shape
from jaxzero._dtypes import component_bytes, component_dtype, components
from jaxzero._policy import Policy

ALIGN_BYTES = 16
"""Slots start at multiples of this, so that kernels read and write 16 bytes at once."""

Collective = Literal["reduce_scatter", "all_reduce", "none"]
Kind = Literal["packed", "direct", "local"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in force: of the policy, else as measured for the transport.

    Attributes:
      bucket_bytes: limit of one bucket.
      direct_bytes: size from which leaves go direct.
      widens_bfloat16: sums bfloat16 through a float32 copy of the operand, as XLA:CPU
        does; a leaf of its own then costs more memory than a bucket.
    """

    bucket_bytes: int
    direct_bytes: int
    widens_bfloat16: bool


LIMITS = {
    "nccl": Limits(bucket_bytes=256 << 20, direct_bytes=1 << 40, widens_bfloat16=False),
    "xla": Limits(bucket_bytes=64 << 20, direct_bytes=256 << 10, widens_bfloat16=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """What the planner knows of one leaf.

    Attributes:
      path: key path in the tree.
      shape: true shape.
      dtype: dtype in which it enters the reduction.
      shard_dtype: dtype of the returned shard.
      cut: its layout.
      reduced: it is the same on all ranks because it is already their sum.
      varying: mesh axes besides the shard axes that its shard varies over. Leaves
        that differ in this never share a bucket, because one call gives all its
        results one type.
    """

    path: str
    shape: Shape
    dtype: str
    shard_dtype: str
    cut: Cut
    reduced: bool = False
    varying: tuple[str, ...] = ()

    @property
    def shard_components(self) -> int:
        """Reals in one shard, padding included."""
        return self.cut.shard_numel * components(self.dtype)

    @property
    def whole(self) -> bool:
        """Whether every rank keeps all of it."""
        return self.cut.layout == "whole"

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return 0 in self.shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """A leaf's place in a bucket: shard components [begin, begin + count).

    Attributes:
      leaf: index of the leaf in `Plan.leaves`.
      begin: first component of the shard that travels here; above 0 for a leaf that
        is split over buckets.
      count: components that do, padding of the shard included.
      row_offset: component of each row of the bucket at which they start.
    """

    leaf: int
    begin: int
    count: int
    row_offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Leaves moved by one collective.

    Attributes:
      kind: "packed" (through a send buffer), "direct" (one leaf, read in place) or
        "local" (no collective: one rank, or already summed).
      collective: what moves it.
      comm_dtype: real dtype on the wire; for "local", that of the leaf.
      send_rows: rows of the send side, one per rank; 1 for an all-reduce.
      recv_rows: rows that come back; more than 1 are summed on arrival.
      row_numel: reals in a row, padding included.
      in_place: what is received is the shard itself, scaled where it lies.
      pre_scale: power of two multiplied before the sum (float16 wires only).
      slots: the leaves, in row order.
      whole: its leaves stay whole, so all ranks hold the same results.
      varying: mesh axes besides the shard axes that its shards vary over.
    """

    kind: Kind
    collective: Collective
    comm_dtype: str
    send_rows: int
    recv_rows: int
    row_numel: int
    in_place: bool
    pre_scale: float
    slots: tuple[Slot, ...]
    whole: bool
    varying: tuple[str, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_numel * component_bytes(self.comm_dtype)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank gives to the collective."""
        return 0 if self.collective == "none" else self.send_rows * self.row_bytes

    @property
    def send_bytes(self) -> int:
        """Bytes of the packed send buffer."""
        return self.send_rows * self.row_bytes if self.kind == "packed" else 0

    @property
    def recv_bytes(self) -> int:
        """Bytes of the received rows, unless they are results themselves."""
        if self.collective == "none" or self.in_place:
            return 0
        return self.recv_rows * self.row_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static list of buckets of one call; equal on every rank.

    Made by `make_plan`. `print(plan)` shows a table of its buckets and leaves.

    Attributes:
      group_size: ranks along the shard axis.
      replicas: ranks along the replicate axis; 1 without one.
      divisor: what the sum is divided by.
      limits: bucket and direct sizes in force.
      leaves: the leaves, in tree order, empty ones included.
      reasons: per leaf, how it travels and why.
      buckets: the buckets, in the order in which they are sent.
    """

    group_size: int
    replicas: int
    divisor: float
    limits: Limits
    leaves: tuple[LeafSpec, ...]
    reasons: tuple[str, ...]
    buckets: tuple[Bucket, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank gives to all collectives, padding included."""
        return sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def padding_bytes(self) -> int:
        """Bytes of `wire_bytes` that are zeros."""
        return self.wire_bytes - sum(
            _true_numel(self.leaves[slot.leaf], bucket, slot)
            * component_bytes(bucket.comm_dtype)
            for bucket in self.buckets
            if bucket.collective != "none"
            for slot in bucket.slots
        )

    @property
    def peak_temp_bytes(self) -> int:
        """Most temporary bytes, one packed bucket at a time beside all direct rows."""
        packed = [b for b in self.buckets if b.kind == "packed"]
        return sum(b.recv_bytes for b in self.buckets if b.kind == "direct") + max(
            (b.send_bytes + b.recv_bytes for b in packed), default=0
        )

    @property
    def num_collectives(self) -> int:
        """Collectives that one call issues."""
        return sum(bucket.collective != "none" for bucket in self.buckets)

    @property
    def fingerprint(self) -> str:
        """A short hash of everything in the plan; equal on ranks that agree."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from jaxzero._plan_table import plan_table

        return plan_table(self)


def _true_numel(leaf: LeafSpec, bucket: Bucket, slot: Slot) -> int:
    """Reals of the leaf itself, over all rows, inside a slot."""
    cut = leaf.cut
    inner = cut.inner * components(leaf.dtype)
    if not cut.chunk * inner:
        return 0
    # Rows are full until the leaf ends inside one, and those after it are padding: no
    # loop over rows, of which a large cluster has many.
    full_rows, rest = divmod(cut.length, cut.chunk)
    if full_rows >= bucket.send_rows:
        return bucket.send_rows * slot.count
    # Column ranges cut through blocks: count whole blocks, then both ends.
    block, valid = cut.chunk * inner, rest * inner
    last_row = _valid_before(slot.begin + slot.count, block, valid)
    last_row -= _valid_before(slot.begin, block, valid)
    return full_rows * slot.count + last_row


def _valid_before(end: int, block: int, valid: int) -> int:
    return end // block * valid + min(end % block, valid)


def build_plan(
    leaves: Sequence[LeafSpec],
    group_size: int,
    policy: Policy,
    *,
    limits: Limits,
    replicas: int = 1,
    accumulates: bool = False,
    sums: bool = True,
) -> Plan:
    """Builds the plan for a list of leaves.

    Args:
      leaves: the leaves, in tree order.
      group_size: ranks along the shard axis.
      policy: op, dtypes, reduction and sizes.
      limits: sizes for what the policy leaves open.
      replicas: ranks along the replicate axis.
      accumulates: whether the shards are added to accumulators.
      sums: False plans an all-gather, which neither scales nor has rows to sum.
    """
    if policy.bucket_bytes is not None:
        limits = dataclasses.replace(limits, bucket_bytes=policy.bucket_bytes)
    if policy.direct_bytes is not None:
        limits = dataclasses.replace(limits, direct_bytes=policy.direct_bytes)
    planner = _Planner(policy, limits, group_size, replicas, accumulates, sums)
    for index, leaf in enumerate(leaves):
        planner.add(index, leaf)
    return Plan(
        group_size=group_size,
        replicas=replicas,
        divisor=policy.divisor(group_size * replicas),
        limits=limits,
        leaves=tuple(leaves),
        reasons=tuple(planner.reasons),
        buckets=planner.finish(),
    )


def float16_pre_scale(count: int) -> float:
    """Returns the power of two that a float16 wire multiplies before the sum.

    Dividing by the whole count first loses small values, dividing last overflows
    (public reports of both: PyTorch DDP/FSDP predivide factors). Up to 16 ranks the
    sum cannot overflow unless the mean does; beyond, the exponent is split in two.
    """
    exponent = math.ceil(math.log2(count)) if count > 1 else 0
    return 2.0 ** -max(min(exponent, 4), -(-exponent // 2))


_Key = tuple[Collective, str, bool, tuple[str, ...]]
"""Leaves share a bucket if they agree in these: collective, comm dtype, whole, axes."""


class _Open:
    """A bucket that is being filled."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.used_bytes = 0


class _Planner:
    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        group_size: int,
        replicas: int,
        accumulates: bool,
        sums: bool,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.group_size = group_size
        self.replicas = replicas
        self.accumulates = accumulates
        self.sums = sums
        self._direct_recv_bytes = 0
        self.reasons: list[str] = []
        self._closed: list[Bucket] = []
        self._open: dict[_Key, _Open] = {}

    def finish(self) -> tuple[Bucket, ...]:
        for key in list(self._open):
            self._close(key)
        return tuple(self._closed)

    def add(self, index: int, leaf: LeafSpec) -> None:
        if leaf.empty:
            self.reasons.append("empty: nothing to send")
            return
        if leaf.reduced or self.group_size * self.replicas == 1:
            self._add_single(index, leaf, "local", "none", component_dtype(leaf.dtype))
            self.reasons.append(
                "local: already summed" if leaf.reduced else "local: one rank"
            )
            return
        collective: Collective = (
            "all_reduce" if leaf.whole or self.group_size == 1 else "reduce_scatter"
        )
        comm_dtype = self._comm_dtype(leaf, collective)
        obstacle = self._obstacle_to_direct(leaf, collective, comm_dtype)
        if obstacle is None:
            self._add_single(index, leaf, "direct", collective, comm_dtype)
            self.reasons.append("direct: large, read in place")
        else:
            key = (collective, comm_dtype, leaf.whole, leaf.varying)
            self._add_packed(index, leaf, key)
            self.reasons.append(f"packed: {obstacle}")

    def _comm_dtype(self, leaf: LeafSpec, collective: Collective) -> str:
        wire = component_dtype(self.policy.comm_dtype or leaf.dtype)
        if self.policy.reduction == "float32" and collective == "all_reduce":
            # An all-reduce sums on the wire, so exactness needs a wide wire; leaves
            # kept whole are small.
            return "float64" if wire == "float64" else "float32"
        return wire

    def _pre_scale(self, comm_dtype: str, recv_rows: int) -> float:
        if comm_dtype != "float16" or recv_rows > 1 or not self.sums:
            return 1.0
        return float16_pre_scale(self.group_size * self.replicas)

    def _recv_rows(self, collective: Collective) -> int:
        summed_on_arrival = (
            self.policy.reduction == "float32" and collective == "reduce_scatter"
        )
        return self.group_size if summed_on_arrival else 1

    def _send_rows(self, collective: Collective) -> int:
        return self.group_size if collective == "reduce_scatter" else 1

    def _obstacle_to_direct(
        self, leaf: LeafSpec, collective: Collective, comm_dtype: str
    ) -> str | None:
        cut = leaf.cut
        recv_rows = self._recv_rows(collective)
        shard_bytes = leaf.shard_components * component_bytes(comm_dtype)
        if shard_bytes * self._send_rows(collective) < self.limits.direct_bytes:
            return "below direct_bytes"
        if component_dtype(leaf.dtype) != comm_dtype:
            return f"comm dtype {comm_dtype} differs"
        if self._pre_scale(comm_dtype, recv_rows) != 1.0:
            return "scaled before a float16 sum"
        if cut.outer > 1 and cut.ranks > 1:
            return f"cut on dimension {cut.dim}"
        if not cut.even:
            return f"{cut.length} not divisible by {cut.ranks}"
        if not self.sums:
            return None
        if self.limits.widens_bfloat16 and comm_dtype == "bfloat16":
            return "bfloat16 sums are widened"
        if not self._in_place(leaf, comm_dtype, recv_rows):
            # Rows of direct leaves may all be alive at once.
            total = self._direct_recv_bytes + shard_bytes * recv_rows
            if total > self.limits.bucket_bytes:
                return "rows received by direct leaves fill bucket_bytes"
        return None

    def _in_place(self, leaf: LeafSpec, comm_dtype: str, recv_rows: int) -> bool:
        same = component_dtype(leaf.shard_dtype) == comm_dtype
        return same and recv_rows == 1 and not self.accumulates

    def _add_single(
        self,
        index: int,
        leaf: LeafSpec,
        kind: Kind,
        collective: Collective,
        comm_dtype: str,
    ) -> None:
        count = leaf.shard_components
        recv_rows = self._recv_rows(collective)
        in_place = kind == "direct" and self._in_place(leaf, comm_dtype, recv_rows)
        bucket = Bucket(
            kind=kind,
            collective=collective,
            comm_dtype=comm_dtype,
            send_rows=self._send_rows(collective),
            recv_rows=recv_rows,
            row_numel=count,
            in_place=in_place,
            pre_scale=1.0,
            slots=(Slot(leaf=index, begin=0, count=count, row_offset=0),),
            whole=leaf.whole,
            varying=leaf.varying,
        )
        self._closed.append(bucket)
        self._direct_recv_bytes += bucket.recv_bytes

    def _add_packed(self, index: int, leaf: LeafSpec, key: _Key) -> None:
        collective, comm_dtype, *_ = key
        itemsize = component_bytes(comm_dtype)
        capacity = self._row_capacity_bytes(collective)
        total = leaf.shard_components
        begin = 0
        while begin < total:
            bucket = self._open.setdefault(key, _Open())
            free = capacity - bucket.used_bytes
            count = total - begin
            if count * itemsize > free:
                if total * itemsize <= capacity or free == 0:
                    self._close(key)
                    continue
                # Larger than a whole bucket: its columns share buckets.
                count = free // itemsize
            bucket.slots.append(
                Slot(
                    leaf=index,
                    begin=begin,
                    count=count,
                    row_offset=bucket.used_bytes // itemsize,
                )
            )
            bucket.used_bytes = _align(bucket.used_bytes + count * itemsize)
            begin += count

    def _row_capacity_bytes(self, collective: Collective) -> int:
        # A row holds at least one aligned unit, however small bucket_bytes is.
        rows = self._send_rows(collective)
        share = self.limits.bucket_bytes // rows
        return max(ALIGN_BYTES, share // ALIGN_BYTES * ALIGN_BYTES)

    def _close(self, key: _Key) -> None:
        collective, comm_dtype, whole, varying = key
        bucket = self._open.pop(key)
        recv_rows = self._recv_rows(collective)
        self._closed.append(
            Bucket(
                kind="packed",
                collective=collective,
                comm_dtype=comm_dtype,
                send_rows=self._send_rows(collective),
                recv_rows=recv_rows,
                row_numel=bucket.used_bytes // component_bytes(comm_dtype),
                in_place=False,
                pre_scale=self._pre_scale(comm_dtype, recv_rows),
                slots=tuple(bucket.slots),
                whole=whole,
                varying=varying,
            )
        )


def _align(count_bytes: int) -> int:
    return -(-count_bytes // ALIGN_BYTES) * ALIGN_BYTES
