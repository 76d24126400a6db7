"""Plans: which leaf travels in which bucket, at which offset, and why. No JAX."""

import dataclasses
import hashlib
from collections.abc import Sequence

from jaxzero._dtypes import component_bytes, components
from jaxzero._plan.types import Bucket, LeafSpec, Limits, Route, Slot
from jaxzero._text import format_bytes, text_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What reductions and gathers share: a static list of buckets, equal on all ranks.

    Attributes:
      group_size: ranks along the shard axis.
      limits: bucket and direct sizes in force.
      leaves: the leaves, in tree order, empty ones included.
      routes: per leaf, how it travels.
      buckets: the buckets, in the order in which they are sent.
    """

    group_size: int
    limits: Limits
    leaves: tuple[LeafSpec, ...]
    routes: tuple[Route, ...]
    buckets: tuple[Bucket, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Per leaf, how it travels and why."""
        return tuple(map(str, self.routes))

    @property
    def num_collectives(self) -> int:
        """Collectives that one call issues."""
        return sum(bucket.collective != "none" for bucket in self.buckets)

    @property
    def fingerprint(self) -> str:
        """A short hash of everything in the plan; equal on ranks that agree."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherPlan(Plan):
    """The plan of `gather_params`: shards to full leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReducePlan(Plan):
    """The plan of `shard_grads`: a static list of buckets, equal on every rank.

    Made by `make_plan`. `print(plan)` shows a table of its buckets and leaves.

    Attributes:
      group_size: ranks along the shard axis.
      limits: bucket and direct sizes in force.
      leaves: the leaves, in tree order, empty ones included.
      routes: per leaf, how it travels.
      buckets: the buckets, in the order in which they are sent.
      replicas: ranks along the replicate axis; 1 without one.
      divisor: what the sum is divided by.
    """

    replicas: int
    divisor: float

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

    def __str__(self) -> str:
        return "\n".join(
            [
                *_summary(self),
                "",
                *text_table(
                    ("bucket", "kind", "collective", "dtype", "leaves", "row", "wire"),
                    [_bucket_row(i, bucket) for i, bucket in enumerate(self.buckets)],
                    right=(0, 4, 5, 6),
                ),
                "",
                *text_table(
                    ("leaf", "shape", "dtype", "layout", "shard", "stored", "travels"),
                    [
                        _leaf_row(leaf, route)
                        for leaf, route in zip(self.leaves, self.routes, strict=True)
                    ],
                ),
            ]
        )


def _summary(plan: ReducePlan) -> list[str]:
    replicas = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
    waste = plan.padding_bytes / plan.wire_bytes if plan.wire_bytes else 0.0
    return [
        f"Plan: {len(plan.leaves)} leaves over {plan.group_size} ranks{replicas}, "
        f"{plan.num_collectives} collectives, sum divided by {plan.divisor:g}",
        f"  wire per rank    {format_bytes(plan.wire_bytes)}",
        f"  of it padding    {format_bytes(plan.padding_bytes)} ({waste:.2%})",
        f"  peak temporary   {format_bytes(plan.peak_temp_bytes)} "
        f"(bucket_bytes {format_bytes(plan.limits.bucket_bytes)}, "
        f"direct_bytes {format_bytes(plan.limits.direct_bytes)})",
    ]


def _bucket_row(index: int, bucket: Bucket) -> tuple[str, ...]:
    return (
        str(index),
        bucket.kind,
        bucket.collective,
        bucket.comm_dtype,
        str(len(bucket.slots)),
        format_bytes(bucket.row_bytes),
        format_bytes(bucket.wire_bytes),
    )


def _leaf_row(leaf: LeafSpec, route: Route) -> tuple[str, ...]:
    return (
        leaf.path,
        _shape(leaf.shape),
        leaf.dtype,
        leaf.cut.layout,
        _shape(leaf.cut.shard_shape),
        leaf.shard_dtype,
        str(route),
    )


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _true_numel(leaf: LeafSpec, bucket: Bucket, slot: Slot) -> int:
    """Returns the reals of the leaf itself, over all rows, inside a slot."""
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
