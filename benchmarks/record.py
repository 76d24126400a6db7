"""Timing by medians, and results that say where they come from."""

import json
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Row = dict[str, Any]
RESULTS = pathlib.Path(__file__).parent / "results"


def interleaved_medians(
    calls: dict[str, Callable[[], Any]], repeats: int, warmups: int = 2
) -> dict[str, float]:
    """Returns the median seconds of each call.

    The calls take turns, so that a slow moment of the machine hits all of them and
    their ratios hold. Each timed run follows an untimed one of the same call, so that
    none pays for the memory that the call before it gave back.
    """
    for call in calls.values():
        for _ in range(warmups):
            jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            jax.block_until_ready(call())
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def environment() -> Row:
    """Returns commit, versions and hardware."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    devices = jax.devices()
    return {
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [
        line.split(":", 1)[1].strip()
        for line in text.splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def table(rows: list[Row]) -> str:
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


def save(name: str, rows: list[Row]) -> pathlib.Path:
    """Writes rows and environment to results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    report = {"environment": environment(), "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path
