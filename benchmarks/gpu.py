"""GPU benchmarks: `python benchmarks/gpu.py [--save]`, alone or on several ranks.

    python benchmarks/gpu.py
    python -m jaxzero launch -n 4 --platform cuda -- python benchmarks/gpu.py

One rank measures local work against the bandwidth of a device copy; several measure
reductions against what a JAX user would write. All do the same work: sum bfloat16
gradients, divide by the number of ranks, add to float32 accumulators in place.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import record

from jaxzero import Policy
from jaxzero._cli.bench import rivals, trees
from jaxzero._cli.bench.limits import flat_call
from jaxzero._cli.bench.per_rank import Arrays, Way
from jaxzero._cli.bench.table import Row, table
from jaxzero._cli.bench.timing import Call, interleaved_medians
from jaxzero._cli.bench.trees import Tree
from jaxzero._cli.bench.workload import Workload
from jaxzero.distributed import initialize, started_by

WIRE = None
"""All ways send gradients in their own dtype."""


def large() -> Tree:
    """Returns 221 leaves with 1.27e9 parameters."""
    return trees.gpt2(layers=18, width=2304) | {"head": (2304, 3000)}


def copy_bandwidth(numel: int = 1 << 30) -> float:
    """Returns bytes read and written per second by a device copy."""
    copy = jax.jit(lambda x: -x)
    array = jax.block_until_ready(copy(jnp.ones(numel, jnp.float32)))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(4):
            result = copy(array)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / 4)
    return 2 * 4 * numel / statistics.median(times)


def local_rows(repeats: int) -> list[Row]:
    """Local work at one rank: 10 bytes per parameter have to move."""
    tree = large()
    work = Workload(tree, ["bfloat16"])
    numel = sum(leaf.size for leaf in work.grads.values())
    limit = copy_bandwidth()

    def plain(grads: Arrays, into: Arrays | None) -> Arrays:
        return {name: rivals.stored(g, name, into) for name, g in grads.items()}

    seconds = times(
        work,
        {
            "XLA, leaf by leaf": plain,
            "jaxzero": functools.partial(rivals.ours, Policy()),
        },
        repeats,
        at_once=10,
    )
    what = f"{len(tree)} leaves, {numel / 1e9:.2f}e9 parameters"
    rows: list[Row] = [
        {
            "what": what,
            "how": how,
            "ms": value * 1e3,
            "GB/s": 10 * numel / value / 1e9,
            "of a copy": 10 * numel / value / limit,
        }
        for how, value in seconds.items()
    ]
    rows.append(
        {
            "what": "copy of as many bytes",
            "how": "XLA",
            "ms": 10 * numel / limit * 1e3,
            "GB/s": limit / 1e9,
            "of a copy": 1.0,
        }
    )
    return rows


def host_rows(repeats: int) -> list[Row]:
    """Time of one more call in a program: what the host needs at most."""
    work = Workload(trees.small(leaves=300, numel=64), ["bfloat16"])

    def several(count: int) -> Way:
        def reduce(grads: Arrays, into: Arrays | None) -> Arrays:
            assert into is not None
            for _ in range(count):
                into = rivals.ours(Policy(), grads, into)
            return into

        return reduce

    seconds = times(work, {"few": several(10), "many": several(60)}, 10 * repeats)
    return [
        {
            "what": "300 leaves of 64",
            "how": "one more call",
            "microseconds": (seconds["many"] - seconds["few"]) / 50 * 1e6,
        }
    ]


def wire_rows(name: str, tree: Tree, dtypes: Sequence[str], repeats: int) -> list[Row]:
    """Reductions on several ranks, and the same bytes as one flat leaf."""
    work = Workload(tree, dtypes)
    flat_bytes = sum(leaf.nbytes for leaf in work.grads.values()) // work.ranks
    seconds = times(
        work,
        {
            "per leaf": functools.partial(rivals.per_leaf, WIRE),
            "one group": functools.partial(rivals.grouped, WIRE),
            "concatenated": functools.partial(rivals.concatenated, WIRE),
            "jaxzero": functools.partial(rivals.ours, Policy()),
            "jaxzero float32": functools.partial(
                rivals.ours, Policy(reduction="float32")
            ),
        },
        repeats,
        at_once=2,
        limits={"one flat leaf": flat_call({"bfloat16": flat_bytes})},
    )
    return [
        {
            "what": f"{name}, {len(tree)} leaves, {flat_bytes / 1e6:.0f} MB",
            "ranks": work.ranks,
            "how": how,
            "ms": value * 1e3,
            "of jaxzero": value / seconds["jaxzero"],
        }
        for how, value in seconds.items()
    ]


def times(
    work: Workload,
    ways: dict[str, Way],
    repeats: int,
    *,
    at_once: int = 1,
    limits: dict[str, Call] | None = None,
) -> dict[str, float]:
    """Returns the median seconds of each way, and before them of the limits."""
    calls = dict(limits or {})
    for how, way in ways.items():
        calls[how] = work.call(work.step(way))
    return interleaved_medians(calls, repeats, at_once=at_once)


def main() -> None:
    """Runs the benchmarks that the number of ranks allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results/*.json")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if started_by():
        initialize()
    tables: dict[str, list[Row]] = {}
    if jax.device_count() == 1:
        tables["local"] = local_rows(options.repeats)
        tables["host"] = host_rows(options.repeats)
    else:
        tables["gpt2"] = wire_rows(
            "GPT-2 124M", trees.gpt2(), ["bfloat16"], options.repeats
        )
        tables["awkward"] = wire_rows(
            "uneven, mixed dtypes",
            trees.awkward(),
            ["bfloat16", "float32"],
            options.repeats,
        )
    if jax.process_index() == 0:
        for name, rows in tables.items():
            print(table(rows), flush=True)
            print()
            if options.save:
                record.save(f"gpu_{name}_{jax.device_count()}", rows)


if __name__ == "__main__":
    main()
