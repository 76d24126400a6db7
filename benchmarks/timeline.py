"""Draws a profile of `overlap.py --trace`: `python benchmarks/timeline.py TRACE PNG`.

Two rows, kernels of the compute stream and of the stream of collectives, over a stretch
of the backward pass.
"""

import argparse
import gzip
import json
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Event = dict[str, Any]
KINDS = {
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
    "all-gather": ("AllGather",),
    "reduce-scatter": ("ReduceScatter",),
    "pack, unpack": ("jaxzero",),
}
COLOURS = {
    "matrix products": "#4477aa",
    "all-gather": "#228833",
    "reduce-scatter": "#ee6677",
    "pack, unpack": "#ccbb44",
    "other": "#bbbbbb",
}


def kernels(path: pathlib.Path) -> dict[str, list[Event]]:
    """Returns the kernels of each GPU stream, in order."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    streams: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        name = names.get((event.get("pid"), event.get("tid")), "")
        if event.get("ph") == "X" and name.startswith("Stream"):
            streams.setdefault(name, []).append(event)
    return streams


def kind(event: Event) -> str:
    """Returns which kind of kernel an event is."""
    for name, words in KINDS.items():
        if any(word in event["name"] for word in words):
            return name
    return "other"


def draw(path: pathlib.Path, png: pathlib.Path, milliseconds: float) -> None:
    """Draws the stretch that begins a third of the way into the profile."""
    streams = kernels(path)
    reductions = [
        event
        for events in streams.values()
        for event in events
        if kind(event) == "reduce-scatter"
    ]
    start = reductions[len(reductions) // 4]["ts"] - 1000 * milliseconds / 10
    figure, axes = plt.subplots(figsize=(11, 2.6))
    rows = {"collectives": [], "compute": []}
    for events in streams.values():
        is_collective = any(
            kind(event) in ("all-gather", "reduce-scatter") for event in events
        )
        rows["collectives" if is_collective else "compute"] += events
    shown = set()
    for height, (_, events) in enumerate(rows.items()):
        for event in events:
            begin = (event["ts"] - start) / 1000
            if begin > milliseconds or begin + event["dur"] / 1000 < 0:
                continue
            what = kind(event)
            axes.barh(
                height,
                event["dur"] / 1000,
                left=begin,
                height=0.7,
                color=COLOURS[what],
                label=None if what in shown else what,
            )
            shown.add(what)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, milliseconds)
    axes.set_xlabel("milliseconds of a backward pass, rank 0 of 2 on one H200")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=5, frameon=False)
    figure.savefig(png, dpi=130, bbox_inches="tight")


def main() -> None:
    """Reads the command line and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=pathlib.Path, help="a *.trace.json.gz")
    parser.add_argument("png", type=pathlib.Path)
    parser.add_argument("--milliseconds", type=float, default=320)
    options = parser.parse_args()
    draw(options.trace, options.png, options.milliseconds)


if __name__ == "__main__":
    main()
