"""Best `bucket_bytes` and `direct_bytes`: `python benchmarks/sweep.py --out FOLDER`.

    python -m jaxzero launch -n 4 --platform cuda -- \
        python benchmarks/sweep.py --out /tmp/found

Each is varied around the transport's default while the other keeps it. bfloat16
gradients are added to float32 accumulators. A value's score is the geometric mean over
trees of the default's time divided by its time.
"""

import argparse
import functools
import math
import pathlib
from collections.abc import Sequence

import bandwidth
import bus
import jax
import matplotlib
import record
import repeated
from matplotlib.figure import Figure

from jaxzero import Policy
from jaxzero._cli.bench import rivals
from jaxzero._cli.bench.per_rank import Way
from jaxzero._cli.bench.table import table
from jaxzero._transports import GPU
from jaxzero.distributed import initialize, started_by

DEFAULTS = {
    "bucket_bytes": GPU.limits.bucket_bytes,
    "direct_bytes": GPU.limits.direct_bytes,
}
VALUES = {
    "bucket_bytes": [mebibytes << 20 for mebibytes in (4, 16, 64, 128, 256, 512, 1024)],
    "direct_bytes": [kibibytes << 10 for kibibytes in (64, 256, 1024, 4096, 16384)]
    + [64 << 20, DEFAULTS["direct_bytes"]],
}
TINY_VALUES = {"bucket_bytes": [1 << 10, 1 << 20], "direct_bytes": [1 << 10, 1 << 20]}
TREES = ("gpt2", "llama")


def rows(
    name: str, options: argparse.Namespace, values: dict[str, list[int]]
) -> list[bus.Row]:
    """Measures all values with one tree, and the default first."""
    tree = bandwidth.tree_of(name, tiny=options.tiny)
    bench = repeated.Bench(tree, "bfloat16", options.count)
    settings = [(option, value) for option, all_ in values.items() for value in all_]
    ways: dict[tuple[str, int], tuple[str, Way]] = {
        (option, value): (
            "float32",
            functools.partial(rivals.ours, Policy(**DEFAULTS | {option: value})),
        )
        for option, value in settings
    }
    default: tuple[str, Way] = (
        "float32",
        functools.partial(rivals.ours, Policy(**DEFAULTS)),
    )
    seconds = bench.seconds({("default", 0): default, **ways}, options.repeats)
    return [
        bus.row(
            tree=name,
            leaves=len(tree),
            nbytes=bench.nbytes,
            ranks=bench.work.ranks,
            wire="bfloat16",
            into="float32",
            how="jaxzero",
            seconds=seconds[setting],
        )
        | {
            "option": setting[0],
            "bytes": setting[1],
            "of default": seconds["default", 0] / seconds[setting],
        }
        for setting in settings
    ]


def best(found: Sequence[bus.Row], option: str) -> tuple[int, float]:
    """Returns the value with the highest score, and its score.

    Only values that all trees were measured with count.
    """
    scores: dict[int, list[float]] = {}
    for row in found:
        if row["option"] == option:
            scores.setdefault(row["bytes"], []).append(row["of default"])
    trees = max(map(len, scores.values()))
    means = {
        value: math.exp(sum(map(math.log, each)) / trees)
        for value, each in scores.items()
        if len(each) == trees
    }
    value = max(means, key=means.__getitem__)
    return value, means[value]


def plot(found: Sequence[bus.Row], png: pathlib.Path) -> None:
    """Draws bus bandwidth against each option's value."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(10, 4), layout="constrained")
    ranks = found[0]["ranks"]
    figure.suptitle(f"shard_grads over {ranks} ranks, bfloat16 into float32")
    options = list(dict.fromkeys(row["option"] for row in found))
    every_axes = figure.subplots(1, len(options), sharey=True, squeeze=False)[0]
    for axes, option in zip(every_axes, options, strict=True):
        for tree in dict.fromkeys(row["tree"] for row in found):
            line = [r for r in found if r["option"] == option and r["tree"] == tree]
            axes.plot(
                [row["bytes"] / 2**20 for row in line],
                [row["GB/s"] for row in line],
                "o-",
                label=f"{tree}, {line[0]['leaves']} leaves, {line[0]['MB']:.0f} MB",
            )
        axes.axvline(DEFAULTS[option] / 2**20, color="0.6", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"{option} (MiB), dotted: default")
        axes.grid(alpha=0.3)
    every_axes[0].set_ylabel("bus bandwidth (GB/s)")
    every_axes[0].set_ylim(bottom=0)
    every_axes[0].legend(frameon=False)
    figure.savefig(png, dpi=130)


def main() -> None:
    """Measures tree by tree, saves and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for JSON and PNG")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--count", type=int, default=20, help="reductions per program")
    parser.add_argument("--tiny", action="store_true", help="a few numbers per tree")
    options = parser.parse_args()
    if started_by():
        initialize()
    found: list[bus.Row] = []
    for name in TREES:
        new = rows(name, options, TINY_VALUES if options.tiny else VALUES)
        found += new
        if jax.process_index() > 0:
            continue
        print(table(new), end="\n\n", flush=True)
        if options.out:
            save_as = f"sweep_{jax.device_count()}"
            record.save(save_as, found, options.out)
            plot(found, options.out / f"{save_as}.png")
    if jax.process_index() == 0:
        for option in DEFAULTS:
            value, score = best(found, option)
            print(f"best {option}: {value}, {score:.3f} times the default's speed")


if __name__ == "__main__":
    main()
