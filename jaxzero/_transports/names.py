"""What profilers call a bucket, in both transports."""

from collections.abc import Sequence

from jaxzero._plan import Bucket
from jaxzero._text import format_bytes

PREFIX = "jaxzero/"
"""Begins every name scope."""


def bucket_name(number: int, bucket: Bucket) -> str:
    """Returns the name of a bucket, such as "bucket3_bfloat16_12MiB".

    Args:
      number: its place in the plan.
      bucket: the bucket.
    """
    return f"bucket{number}_{bucket.comm_dtype}_{_size(_rows_bytes(bucket))}"


def call_name(verb: str, buckets: Sequence[Bucket]) -> str:
    """Returns the name of a call, such as "reduce_scatter_4buckets_36MiB"."""
    total = sum(map(_rows_bytes, buckets))
    return f"{verb}_{len(buckets)}buckets_{_size(total)}"


def _rows_bytes(bucket: Bucket) -> int:
    # Not wire_bytes, which says nothing of a bucket that stays on its rank.
    return bucket.send_rows * bucket.row_bytes


def _size(count: int) -> str:
    return format_bytes(count).replace(".0 ", "").replace(" ", "")
