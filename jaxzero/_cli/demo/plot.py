"""The demo's picture: loss against step, and memory per device."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxzero._cli.demo.check import CheckResult
from jaxzero._cli.demo.result import DemoResult

SHARDED_COLOR = "#0b6e99"
UNSHARDED_COLOR = "#d9822b"
PARTS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "Adam state",
    "total": "total",
}


def save_plot(path: Path, result: DemoResult) -> None:
    """Writes the picture in the format that the file's ending names."""
    # A Figure of its own never touches pyplot's global state or a display.
    matplotlib.use("Agg")
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(
        f"Parameters, gradients and Adam state over {result.options.devices} devices,"
        f" {result.options.comm_dtype} wire"
    )
    grid = figure.add_gridspec(1, 2, width_ratios=(1.35, 1))
    left, right = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    if result.check is None:
        loss_axes = left.subplots()
    else:
        loss_axes, difference_axes = left.subplots(
            2, 1, sharex=True, height_ratios=(2, 1)
        )
        _draw_difference(difference_axes, result.check)
    _draw_losses(loss_axes, result)
    _draw_memory(right.subplots(), result)
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, result: DemoResult) -> None:
    axes.plot(
        _steps(result.run.curve.losses),
        _bits(result.run.curve.losses),
        color=SHARDED_COLOR,
        linewidth=2.5,
        label=f"sharded over {result.options.devices} devices",
    )
    if result.check is None:
        axes.set_xlabel("step")
    else:
        axes.plot(
            _steps(result.check.losses),
            _bits(result.check.losses),
            color=UNSHARDED_COLOR,
            linewidth=1.5,
            linestyle="--",
            label="unsharded, one device",
        )
    axes.set_ylabel("training loss (bits per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_difference(axes: Axes, check: CheckResult) -> None:
    # Equal losses have no place on a logarithmic axis.
    differences = np.array(check.differences)
    places = np.flatnonzero(differences)
    axes.plot(1 + places, differences[places], ".", color="0.35")
    axes.axhline(check.tolerance, color="#b00020", linewidth=1, linestyle=":")
    axes.annotate(
        f"tolerance {check.tolerance:g}",
        (1, check.tolerance),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color="#b00020",
        fontsize="small",
    )
    axes.set_yscale("log")
    axes.margins(y=0.25)
    axes.set_xlabel("step")
    axes.set_ylabel("relative difference\nof the losses")
    axes.grid(alpha=0.3)


def _draw_memory(axes: Axes, result: DemoResult) -> None:
    places = np.arange(len(PARTS))
    height = 0.38
    ours = f"sharded, {result.options.devices} devices"
    for offset, color, label, sizes in (
        (-height / 2, UNSHARDED_COLOR, "unsharded", result.unsharded),
        (height / 2, SHARDED_COLOR, ours, result.sharded),
    ):
        megabytes = [getattr(sizes, part) / 1e6 for part in PARTS]
        bars = axes.barh(places + offset, megabytes, height, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
    axes.set_yticks(places, list(PARTS.values()))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("memory per device (MB)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")


def _steps(values: Sequence[float]) -> range:
    return range(1, len(values) + 1)


def _bits(losses: Sequence[float]) -> list[float]:
    return [loss / math.log(2) for loss in losses]
