"""What is alive while a plan is carried out, moment by moment, in bytes.

Follows the transports: "nccl" is one call, so all its operands, results and its
temporary memory are alive together; "xla" goes bucket by bucket, and a direct leaf
goes as soon as it exists.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxzero._dtypes import component_bytes, components
from jaxzero._plan import Bucket, LeafSpec, Plan


class Alive(NamedTuple):
    """Bytes at one moment.

    Attributes:
      full: parameters or gradients in full size.
      shards: gradient shards that the plan has made.
      temp: packed rows, sent and received.
    """

    full: int = 0
    shards: int = 0
    temp: int = 0


def array_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Returns the bytes of an array."""
    return math.prod(shape) * components(dtype) * component_bytes(dtype)


def gathering(plan: Plan, *, fused: bool) -> Iterator[Alive]:
    """Yields what is alive while shards become parameters; the last is what stays.

    Args:
      plan: plan of an all-gather.
      fused: whether transport "nccl" carries it out.
    """
    made = {
        bucket.slots[0].leaf: _gathered_bytes(plan, bucket)
        for bucket in plan.buckets
        if bucket.kind != "packed"
    }
    packed = [bucket for bucket in plan.buckets if bucket.kind == "packed"]
    if fused:
        for slot in (slot for bucket in packed for slot in bucket.slots):
            made[slot.leaf] = _full_bytes(plan.leaves[slot.leaf])
        temp = max((bucket.send_bytes for bucket in packed), default=0)
        yield Alive(full=sum(made.values()), temp=temp)
        packed = []
    for bucket in packed:
        yield Alive(full=sum(made.values()), temp=bucket.row_bytes + bucket.send_bytes)
        for slot in bucket.slots:
            made[slot.leaf] = _full_bytes(plan.leaves[slot.leaf])
        yield Alive(full=sum(made.values()), temp=bucket.send_bytes)
    yield Alive(full=sum(made.values()))


def reducing(
    plan: Plan, *, fused: bool, accumulates: bool, kept: bool = False
) -> Iterator[Alive]:
    """Yields what is alive while gradients become shards; the last is what stays.

    Args:
      plan: plan of a reduction.
      fused: whether transport "nccl" carries it out.
      accumulates: whether shards are added in place to accumulators, which are not
        counted.
      kept: whether all gradients exist before the first is reduced, whatever the
        transport.
    """
    shards = 0 if accumulates else sum(map(_shard_bytes, plan.leaves))
    if fused:
        yield Alive(
            full=sum(map(_full_bytes, plan.leaves)),
            shards=shards,
            temp=max(map(_fused_temp_bytes, plan.buckets), default=0),
        )
    else:
        yield from _reducing_in_turns(plan, accumulates, kept)
    yield Alive(shards=shards)


def _reducing_in_turns(plan: Plan, accumulates: bool, kept: bool) -> Iterator[Alive]:
    left = {
        slot.leaf: _full_bytes(plan.leaves[slot.leaf])
        for bucket in plan.buckets
        if bucket.kind != "direct" or kept
        for slot in bucket.slots
    }
    made: dict[int, int] = {}
    rows = 0
    for bucket in (b for b in plan.buckets if b.kind == "direct"):
        index = bucket.slots[0].leaf
        leaf = plan.leaves[index]
        # Rows that are no results may all be alive at once.
        rows += bucket.recv_bytes
        made[index] = 0 if accumulates else _shard_bytes(leaf)
        left[index] = _full_bytes(leaf)
        yield Alive(full=sum(left.values()), shards=sum(made.values()), temp=rows)
        del left[index]
    last = {slot.leaf: bucket for bucket in plan.buckets for slot in bucket.slots}
    for bucket in (b for b in plan.buckets if b.kind != "direct"):
        full, shards = sum(left.values()), sum(made.values())
        yield Alive(full=full, shards=shards, temp=rows + bucket.send_bytes)
        if bucket.kind == "packed":
            for slot in bucket.slots:
                if last[slot.leaf] is bucket:
                    del left[slot.leaf]
            full = sum(left.values())
        both = bucket.send_bytes + bucket.recv_bytes
        yield Alive(full=full, shards=shards, temp=rows + both)
        for slot in bucket.slots:
            leaf = plan.leaves[slot.leaf]
            made[slot.leaf] = 0 if accumulates else _shard_bytes(leaf)
        shards = sum(made.values())
        yield Alive(full=full, shards=shards, temp=rows + bucket.recv_bytes)
        if bucket.kind == "local":
            del left[bucket.slots[0].leaf]


def _fused_temp_bytes(bucket: Bucket) -> int:
    if bucket.kind == "packed" and bucket.recv_rows == 1:
        # It receives over what it sent.
        return bucket.send_bytes
    return bucket.send_bytes + bucket.recv_bytes


def _gathered_bytes(plan: Plan, bucket: Bucket) -> int:
    leaf = plan.leaves[bucket.slots[0].leaf]
    # Where a rank holds all of a leaf, its shard is the parameter.
    if bucket.kind == "local" and leaf.dtype == leaf.shard_dtype:
        return 0
    return _full_bytes(leaf)


def _full_bytes(leaf: LeafSpec) -> int:
    return array_bytes(leaf.shape, leaf.dtype)


def _shard_bytes(leaf: LeafSpec) -> int:
    return array_bytes(leaf.cut.shard_shape, leaf.shard_dtype)
