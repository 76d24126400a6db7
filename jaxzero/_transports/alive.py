"""What is alive while a plan is carried out, moment by moment, in bytes.

In one call, all its operands, results and its temporary memory are alive together.
Bucket by bucket, a direct leaf goes as soon as it exists.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxzero._dtypes import component_bytes, components
from jaxzero._plan import Bucket, GatherPlan, LeafSpec, Move, ReducePlan


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


def gathering_at_once(plan: GatherPlan) -> Iterator[Alive]:
    """Yields what is alive while one call gathers all; the last is what stays."""
    full = sum(_gathered_bytes(plan, i) for i in range(len(plan.leaves)))
    yield Alive(full=full, temp=max((b.send_bytes for b in plan.buckets), default=0))
    yield Alive(full=full)


def gathering_in_turns(plan: GatherPlan) -> Iterator[Alive]:
    """Yields what is alive while bucket follows bucket; the last is what stays."""
    made = {
        bucket.slots[0].leaf: _gathered_bytes(plan, bucket.slots[0].leaf)
        for bucket in plan.buckets
        if bucket.kind != "packed"
    }
    for bucket in (b for b in plan.buckets if b.kind == "packed"):
        yield Alive(full=sum(made.values()), temp=bucket.row_bytes + bucket.send_bytes)
        for slot in bucket.slots:
            made[slot.leaf] = _full_bytes(plan.leaves[slot.leaf])
        yield Alive(full=sum(made.values()), temp=bucket.send_bytes)
    yield Alive(full=sum(made.values()))


def reducing_at_once(plan: ReducePlan, *, accumulates: bool) -> Iterator[Alive]:
    """Yields what is alive while one call reduces all; the last is what stays."""
    shards = 0 if accumulates else sum(map(_shard_bytes, plan.leaves))
    yield Alive(
        full=sum(map(_full_bytes, plan.leaves)),
        shards=shards,
        temp=max(map(_temp_bytes_at_once, plan.buckets), default=0),
    )
    yield Alive(shards=shards)


def reducing_in_turns(
    plan: ReducePlan, *, accumulates: bool, kept: bool
) -> Iterator[Alive]:
    """Yields what is alive while bucket follows bucket; the last is what stays.

    Args:
      plan: the plan.
      accumulates: whether shards are added in place to accumulators, which are not
        counted.
      kept: whether all gradients exist before the first is reduced.
    """
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
    yield Alive(shards=0 if accumulates else sum(map(_shard_bytes, plan.leaves)))


def _temp_bytes_at_once(bucket: Bucket) -> int:
    if bucket.kind == "packed" and bucket.recv_rows == 1:
        # It receives over what it sent.
        return bucket.send_bytes
    return bucket.send_bytes + bucket.recv_bytes


def _gathered_bytes(plan: GatherPlan, index: int) -> int:
    leaf, route = plan.leaves[index], plan.routes[index]
    # Where a rank holds all of a leaf, its shard is the parameter.
    if route.move == Move.OWN and leaf.dtype == leaf.shard_dtype:
        return 0
    return _full_bytes(leaf)


def _full_bytes(leaf: LeafSpec) -> int:
    return array_bytes(leaf.shape, leaf.dtype)


def _shard_bytes(leaf: LeafSpec) -> int:
    return array_bytes(leaf.cut.shard_shape, leaf.shard_dtype)
