"""GPU benchmarks: `python benchmarks/gpu.py [--save]`, alone or on several ranks.

    python benchmarks/gpu.py
    python -m jaxzero.testing.launch -n 4 --platform cuda -- python benchmarks/gpu.py

One rank measures local work against the bandwidth of a device copy; several measure
reductions against what a JAX user would write. All do the same work: sum bfloat16
gradients, divide by the number of ranks, add to float32 accumulators in place.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import record
import trees
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxzero
from jaxzero import Policy
from jaxzero.testing import initialize, started_by

AXIS = "data"
Arrays = dict[str, jax.Array]
Step = Callable[[Arrays, Arrays], Arrays]


def large() -> trees.Tree:
    """Returns 221 leaves with 1.27e9 parameters."""
    return trees.gpt2(layers=18, width=2304, vocab=50257) | {"head": (2304, 3000)}


def awkward() -> trees.Tree:
    """Returns leaves that do not divide by the number of ranks."""
    return {
        f"{kind}{i}": shape
        for i in range(24)
        for kind, shape in (
            ("kernel", (1021, 1531 + i)),
            ("bias", (1531 + i,)),
            ("table", (257, 4099)),
        )
    }


def flat_shard(leaf: jax.Array, ranks: int) -> jax.Array:
    """Returns the leaf, flat and padded, as one row per rank."""
    flat = leaf.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % ranks)).reshape(ranks, -1)


def accumulate(shard: jax.Array, into: jax.Array, ranks: int) -> jax.Array:
    """Returns what every rival does with what it receives."""
    return into + shard.astype(into.dtype).reshape(into.shape) / ranks


def per_leaf(ranks: int, grads: Arrays, into: Arrays) -> Arrays:
    """One psum_scatter per leaf; XLA combines them as it likes."""

    def reduce(leaf: jax.Array, old: jax.Array) -> jax.Array:
        rows = flat_shard(leaf, ranks)
        return accumulate(lax.psum_scatter(rows, AXIS), old, ranks)

    return jax.tree.map(reduce, grads, into)


def grouped(ranks: int, grads: Arrays, into: Arrays) -> Arrays:
    """One psum_scatter per leaf, all in one NCCL group."""
    rows = jax.tree.map(lambda leaf: flat_shard(leaf, ranks), grads)
    with set_xla_metadata(collective_group_key="grads"):
        shards = jax.tree.map(lambda leaf: lax.psum_scatter(leaf, AXIS), rows)
    return jax.tree.map(lambda s, old: accumulate(s, old, ranks), shards, into)


def concatenated(ranks: int, grads: Arrays, into: Arrays) -> Arrays:
    """One psum_scatter per dtype, of all leaves side by side."""
    results: Arrays = {}
    for dtype in sorted({str(leaf.dtype) for leaf in grads.values()}):
        rows = {
            name: flat_shard(leaf, ranks)
            for name, leaf in grads.items()
            if leaf.dtype == dtype
        }
        row = lax.psum_scatter(jnp.concatenate(list(rows.values()), axis=1), AXIS)
        start = 0
        for name, leaf in rows.items():
            numel = leaf.shape[1]
            shard = lax.slice_in_dim(row, start, start + numel)
            results[name] = accumulate(shard, into[name], ranks)
            start += numel
    return results


def ours(policy: Policy, _: int, grads: Arrays, into: Arrays) -> Arrays:
    """The fused call."""
    return jaxzero.shard_grads(grads, AXIS, into=into, policy=policy, cuts="flat")


class Bench:
    """A tree on a mesh of all GPUs."""

    def __init__(self, tree: trees.Tree, dtypes: Callable[[int], Any]) -> None:
        self.ranks = jax.device_count()
        self.mesh: Mesh = jax.make_mesh(
            (self.ranks,), (AXIS,), axis_types=(AxisType.Auto,)
        )
        self.spec = PartitionSpec(AXIS)
        self.tree = tree
        self.dtypes = dtypes
        self.grads = self._create(
            lambda: {
                name: jnp.full((self.ranks, *shape), 1.0 + i % 3, dtypes(i))
                for i, (name, shape) in enumerate(tree.items())
            }
        )

    def _create(self, make: Callable[[], Any]) -> Any:
        sharding = NamedSharding(self.mesh, self.spec)
        return jax.jit(make, out_shardings=sharding)()

    def sums(self) -> Arrays:
        """Returns fresh accumulators, flat."""

        def numel(shape: trees.Shape) -> int:
            total = 1
            for size in shape:
                total *= size
            return -(-total // self.ranks) * self.ranks

        return self._create(
            lambda: {
                name: jnp.zeros((numel(shape),), jnp.float32)
                for name, shape in self.tree.items()
            }
        )

    def step(self, reduce: Callable[[int, Arrays, Arrays], Arrays]) -> Step:
        """Returns a jitted reduction that donates its accumulators."""

        def local(grads: Arrays, into: Arrays) -> Arrays:
            own = {name: g.reshape(g.shape[1:]) for name, g in grads.items()}
            return reduce(self.ranks, own, into)

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=self.spec,
            out_specs=self.spec,
        )
        return jax.jit(mapped, donate_argnums=1)

    def seconds(self, step: Step, repeats: int, at_once: int) -> float:
        """Returns the median time of a step, measured `at_once` steps at a time."""
        into = self.sums()
        into = jax.block_until_ready(step(self.grads, into))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(at_once):
                into = step(self.grads, into)
            jax.block_until_ready(into)
            times.append((time.perf_counter() - start) / at_once)
        return statistics.median(times)


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


def local_rows(repeats: int) -> list[record.Row]:
    """Local work at one rank: 10 bytes per parameter have to move."""
    tree = large()
    bench = Bench(tree, lambda _: jnp.bfloat16)
    numel = sum(leaf.size for leaf in bench.grads.values())
    limit = copy_bandwidth()
    rows: list[record.Row] = []

    def plain(_: int, grads: Arrays, into: Arrays) -> Arrays:
        return {k: accumulate(g, into[k], 1) for k, g in grads.items()}

    for name, reduce in (
        ("XLA, leaf by leaf", plain),
        ("jaxzero", functools.partial(ours, Policy())),
    ):
        seconds = bench.seconds(bench.step(reduce), repeats, at_once=10)
        bandwidth = 10 * numel / seconds
        rows.append(
            {
                "what": f"{len(tree)} leaves, {numel / 1e9:.2f}e9 parameters",
                "how": name,
                "ms": seconds * 1e3,
                "GB/s": bandwidth / 1e9,
                "of a copy": bandwidth / limit,
            }
        )
    rows.append(
        {
            "what": "copy",
            "how": "XLA",
            "ms": float("nan"),
            "GB/s": limit / 1e9,
            "of a copy": 1.0,
        }
    )
    return rows


def host_rows(repeats: int) -> list[record.Row]:
    """Time of one more call in a program: what the host needs at most."""
    tree = trees.small(leaves=300, numel=64)
    bench = Bench(tree, lambda _: jnp.bfloat16)

    def several(count: int) -> Callable[[int, Arrays, Arrays], Arrays]:
        def reduce(_: int, grads: Arrays, into: Arrays) -> Arrays:
            for _ in range(count):
                into = jaxzero.shard_grads(grads, AXIS, into=into, cuts="flat")
            return into

        return reduce

    few, many = (
        bench.seconds(bench.step(several(count)), 10 * repeats, at_once=1)
        for count in (10, 60)
    )
    return [
        {
            "what": "300 leaves of 64",
            "how": "one more call",
            "microseconds": (many - few) / 50 * 1e6,
        }
    ]


def wire_rows(
    name: str,
    tree: trees.Tree,
    dtypes: Callable[[int], Any],
    repeats: int,
) -> list[record.Row]:
    """Reductions on several ranks, and the same bytes as one flat leaf."""
    bench = Bench(tree, dtypes)
    flat_bytes = sum(leaf.nbytes for leaf in bench.grads.values()) // bench.ranks
    row = -(-flat_bytes // 2 // bench.ranks // 64) * 64
    flat = Bench({"all": (bench.ranks, row)}, lambda _: jnp.bfloat16)
    limit = flat.step(
        lambda _, grads, into: {
            "all": lax.psum_scatter(grads["all"], AXIS).astype(jnp.float32)
        }
    )
    steps = {
        "per leaf": bench.step(per_leaf),
        "one group": bench.step(grouped),
        "concatenated": bench.step(concatenated),
        "jaxzero": bench.step(functools.partial(ours, Policy())),
        "jaxzero float32": bench.step(
            functools.partial(ours, Policy(reduction="float32"))
        ),
    }
    seconds = {"one flat leaf": flat.seconds(limit, repeats, at_once=2)}
    for how, step in steps.items():
        seconds[how] = bench.seconds(step, repeats, at_once=2)
    return [
        {
            "what": f"{name}, {len(tree)} leaves, {flat_bytes / 1e6:.0f} MB",
            "ranks": bench.ranks,
            "how": how,
            "ms": value * 1e3,
            "of jaxzero": value / seconds["jaxzero"],
        }
        for how, value in seconds.items()
    ]


def main() -> None:
    """Runs the benchmarks that the number of ranks allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results/*.json")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if started_by():
        initialize()
    bfloat16 = jnp.dtype(jnp.bfloat16)
    mixed = (bfloat16, jnp.dtype(jnp.float32))
    tables: dict[str, list[record.Row]] = {}
    if jax.device_count() == 1:
        tables["local"] = local_rows(options.repeats)
        tables["host"] = host_rows(options.repeats)
    else:
        tables["gpt2"] = wire_rows(
            "GPT-2 124M", trees.gpt2(), lambda _: bfloat16, options.repeats
        )
        tables["awkward"] = wire_rows(
            "uneven, mixed dtypes", awkward(), lambda i: mixed[i % 2], options.repeats
        )
    if jax.process_index() == 0:
        for name, rows in tables.items():
            print(record.table(rows), flush=True)
            print()
            if options.save:
                record.save(f"gpu_{name}_{jax.device_count()}", rows)


if __name__ == "__main__":
    main()
