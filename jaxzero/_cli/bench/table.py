"""Rows of results as text."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Returns rows with equal keys as an aligned text table."""
    header = list(rows[0])
    cells = [header] + [[_cell(row[key]) for key in header] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
