"""Results that say where they come from."""

import json
import pathlib
import subprocess

from jaxzero._bench.environment import environment
from jaxzero._bench.table import Row

RESULTS = pathlib.Path(__file__).parent / "results"


def save(name: str, rows: list[Row]) -> pathlib.Path:
    """Writes rows, commit and environment to results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    report = {"environment": {"commit": _commit(), **environment()}, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return found or "unknown"
