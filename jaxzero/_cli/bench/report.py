"""What `bench` prints: a table, how to read it, and rows for scripts."""

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from jaxzero._cli.bench.comparison import Request, Timing, wire_bytes
from jaxzero._cli.bench.environment import gpus_are_shared
from jaxzero._cli.bench.table import table as aligned

WIDTH = 88


def machine(found: dict[str, Any]) -> str:
    """Returns one line on versions and hardware."""
    return (
        f"jaxzero {found['jaxzero']}, JAX {found['jax']}, {found['device']},"
        f" processor {found['processor']}"
    )


def title(name: str, request: Request) -> str:
    """Returns one line on what is compared."""
    policy = request.policy
    wire = f", {policy.comm_dtype} on the wire" if policy.comm_dtype else ""
    how = ", jaxzero sums in float32" if policy.reduction == "float32" else ""
    return (
        f"{name}: {len(request.tree)} leaves, {parameters(request) / 1e6:.3g} M"
        f" parameters, {' and '.join(request.dtypes)}{wire}{how}"
    )


def table(timings: Sequence[Timing]) -> str:
    """Returns all times, the limit last."""
    names = {"limit": "limit: "}
    return aligned(
        [
            {
                "how": names.get(timing.kind, "") + timing.how,
                "ms": timing.ms,
                "times jaxzero": f"{timing.ratio_to_jaxzero:.2f}",
            }
            for timing in timings
        ]
    )


def reading(request: Request, timings: Sequence[Timing]) -> str:
    """Returns which rival is fastest, and how to read the table."""
    rival = fastest_rival(timings)
    (limit,) = (timing for timing in timings if timing.kind == "limit")
    text = (
        f"Above 1 jaxzero is faster. Fastest rival: {rival.how},"
        f" {rival.ratio_to_jaxzero:.2f} times as long as jaxzero; the limit:"
        f" {limit.ratio_to_jaxzero:.2f} times."
    )
    if request.devices[0].platform == "cpu":
        text += " CPU devices share cores: read ratios, not ms."
    elif gpus_are_shared():
        text += " Ranks of one GPU talk through sockets: read ratios, not ms."
    return textwrap.fill(text, WIDTH)


def fastest_rival(timings: Sequence[Timing]) -> Timing:
    """Returns the rival with the shortest time."""
    rivals = (timing for timing in timings if timing.kind == "rival")
    return min(rivals, key=lambda timing: timing.ms)


def rows(
    name: str, request: Request, timings: Sequence[Timing]
) -> list[dict[str, Any]]:
    """Returns a row for each time, ready for JSON."""
    return [
        {
            "tree": name,
            "leaves": len(request.tree),
            "parameters": parameters(request),
            "ranks": len(request.devices),
            "grads": list(request.dtypes),
            "wire_bytes": wire_bytes(request),
            "reduction": request.policy.reduction,
            "repeats": request.repeats,
            **dataclasses.asdict(timing),
        }
        for timing in timings
    ]


def parameters(request: Request) -> int:
    """Returns the number of elements of one gradient."""
    return sum(map(math.prod, request.tree.values()))
