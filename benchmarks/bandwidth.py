"""Bus bandwidth of reductions: `python benchmarks/bandwidth.py [--out FOLDER]`.

    python -m jaxzero launch -n 4 --platform cuda -- \
        python benchmarks/bandwidth.py --out /tmp/found

Gradients are in the dtype in which they travel. Each way returns shards in that dtype
("fresh") or adds to float32 accumulators. The limit is one psum_scatter of as many
bytes in one leaf, without any other work. Reductions are repeated inside a program.
Tables are saved as they come, so that a run that is stopped early leaves some.
"""

import argparse
import functools
import pathlib

import bus
import jax
import record
import repeated

from jaxzero import Policy
from jaxzero._cli.bench import rivals, trees
from jaxzero._cli.bench.per_rank import Way
from jaxzero._cli.bench.table import table
from jaxzero._cli.bench.trees import Tree
from jaxzero._cli.models import Llama
from jaxzero.distributed import initialize, started_by

FLAT = "one flat leaf"
SUMS_IN_FLOAT32 = "jaxzero, float32 sums"
TREES = {
    "gpt2": trees.gpt2,
    "llama": functools.partial(trees.llama, layers=2),
    "small": trees.small,
}
TINY_LLAMA = Llama(layers=1, width=32, hidden=64, heads=4, kv_heads=1, vocabulary=1)
TINY: dict[str, Tree] = {
    "gpt2": trees.layer(width=16),
    "llama": trees.llama(model=TINY_LLAMA),
    "small": trees.small(leaves=5),
}
"""For CPU devices: to see that all of it runs."""


def tree_of(name: str, *, tiny: bool) -> Tree:
    """Returns a tree by its name."""
    return TINY[name] if tiny else TREES[name]()


def ways() -> dict[str, Way]:
    """Returns what is compared; all in the gradients' own dtype."""
    return {
        rivals.JAXZERO: functools.partial(rivals.ours, Policy()),
        SUMS_IN_FLOAT32: functools.partial(rivals.ours, Policy(reduction="float32")),
        "per leaf": functools.partial(rivals.per_leaf, None),
        "one group": functools.partial(rivals.grouped, None),
        "concatenated": functools.partial(rivals.concatenated, None),
    }


def rows(
    name: str, tree: Tree, wire: str, *, count: int, repeats: int
) -> list[bus.Row]:
    """Measures all ways with one tree in one dtype."""
    bench = repeated.Bench(tree, wire, count)
    into_all = {
        (into, how): (into, way)
        for into in ("fresh", "float32")
        for how, way in ways().items()
    }
    seconds = bench.seconds(
        {("fresh", FLAT): ("fresh", repeated.flat), **into_all}, repeats
    )
    limit = seconds["fresh", FLAT]
    return [
        bus.row(
            tree=name,
            leaves=len(tree),
            nbytes=bench.nbytes,
            ranks=bench.work.ranks,
            wire=wire,
            into=into,
            how=how,
            seconds=value,
        )
        | {
            "of flat": limit / value,
            "times jaxzero": value / seconds[into, rivals.JAXZERO],
        }
        for (into, how), value in seconds.items()
    ]


def main() -> None:
    """Measures table by table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for a JSON file")
    parser.add_argument("--trees", nargs="+", default=list(TREES), choices=TREES)
    parser.add_argument(
        "--wires", nargs="+", default=["bfloat16", "float32"], metavar="DTYPE"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--count", type=int, default=20, help="reductions per program")
    parser.add_argument("--tiny", action="store_true", help="a few numbers per tree")
    options = parser.parse_args()
    if started_by():
        initialize()
    found: list[bus.Row] = []
    for name in options.trees:
        tree = tree_of(name, tiny=options.tiny)
        for wire in options.wires:
            new = rows(name, tree, wire, count=options.count, repeats=options.repeats)
            found += new
            if jax.process_index() == 0:
                print(table(new), end="\n\n", flush=True)
                if options.out:
                    save_as = f"bandwidth_{jax.device_count()}"
                    record.save(save_as, found, options.out)


if __name__ == "__main__":
    main()
