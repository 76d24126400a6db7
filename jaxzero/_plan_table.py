"""What `print(plan)` shows."""

from collections.abc import Sequence

from jaxzero._plan import Bucket, Plan

MAX_ROWS = 24


def plan_table(plan: Plan) -> str:
    """Returns the plan as text: a summary, the buckets, the leaves."""
    return "\n".join(
        [
            *_summary(plan),
            "",
            *_table(
                ("bucket", "kind", "collective", "dtype", "leaves", "row", "wire"),
                [_bucket_row(i, bucket) for i, bucket in enumerate(plan.buckets)],
                right=(0, 4, 5, 6),
            ),
            "",
            *_table(
                ("leaf", "shape", "dtype", "layout", "shard", "stored", "travels"),
                [
                    (
                        leaf.path,
                        _shape(leaf.shape),
                        leaf.dtype,
                        leaf.cut.layout,
                        _shape(leaf.cut.shard_shape),
                        leaf.shard_dtype,
                        reason,
                    )
                    for leaf, reason in zip(plan.leaves, plan.reasons, strict=True)
                ],
            ),
        ]
    )


def format_bytes(count: float) -> str:
    """Returns a byte count with a binary unit, such as '1.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _summary(plan: Plan) -> list[str]:
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


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _table(
    header: Sequence[str],
    rows: list[tuple[str, ...]],
    right: Sequence[int] = (),
) -> list[str]:
    shown, hidden = rows[:MAX_ROWS], len(rows) - MAX_ROWS
    widths = [max(len(row[i]) for row in [header, *shown]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [tuple(header), *shown]
    ]
    return [*lines, f"... {hidden} more"] if hidden > 0 else lines
