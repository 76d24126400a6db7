"""Results that say where they come from."""

import json
import pathlib
import subprocess
from typing import Any

from jaxzero._cli.bench.environment import environment
from jaxzero._cli.bench.table import Row

RESULTS = pathlib.Path(__file__).parent / "results"


def save(
    name: str,
    rows: list[Row],
    folder: pathlib.Path = RESULTS,
    found: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Writes rows, commit and environment to <folder>/<name>.json.

    Args:
      name: of the file.
      rows: what was measured.
      folder: where to.
      found: the environment; None asks JAX for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    where = environment() if found is None else found
    report = {"environment": {"commit": _commit(), **where}, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=RESULTS.parent,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    except OSError:  # no git: what was measured is worth more
        return "unknown"
    return found or "unknown"
