"""Text that commands and printed results share: byte counts and tables."""

from collections.abc import Sequence

MAX_ROWS = 24
"""Rows that a table shows."""


def format_bytes(count: float) -> str:
    """Returns a byte count with a binary unit, such as '1.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
) -> list[str]:
    """Returns the lines of a table; rows beyond `MAX_ROWS` are only counted.

    Args:
      header: titles of the columns.
      rows: cells of the rows.
      right: columns that are aligned to the right.
    """
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
