"""CPU benchmarks: `python benchmarks/cpu.py [--quick] [--save]`.

Everything that is compared runs in this one process, in turns, and the result is a
ratio of medians. The rivals do the same work: sum, divide by the number of ranks.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={DEVICES}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import record  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import jaxzero  # noqa: E402
from jaxzero import _ffi  # noqa: E402
from jaxzero._cli.bench import limits, rivals, trees  # noqa: E402
from jaxzero._cli.bench.per_rank import AXIS, Way, jitted  # noqa: E402
from jaxzero._cli.bench.table import Row, table  # noqa: E402
from jaxzero._cli.bench.timing import interleaved_medians  # noqa: E402
from jaxzero._cli.bench.trees import Tree  # noqa: E402
from jaxzero._cli.bench.workload import Workload  # noqa: E402

DTYPE = "float32"
OURS: Way = functools.partial(rivals.ours, jaxzero.Policy())
PER_LEAF: Way = functools.partial(rivals.per_leaf, None)
CONCATENATE: Way = functools.partial(rivals.concatenated, None)


def reductions(
    name: str, tree: Tree, repeats: int, others: dict[str, Way]
) -> list[Row]:
    """Times jaxzero against rivals on one tree, without accumulators."""
    work = Workload(tree, [DTYPE])
    calls = {
        key: functools.partial(jitted(work.mesh, way, accumulates=False), work.grads)
        for key, way in {"jaxzero": OURS, **others}.items()
    }
    seconds = interleaved_medians(calls, repeats)
    return [
        {
            "benchmark": name,
            "how": key,
            "ms": seconds[key] * 1e3,
            "ratio to jaxzero": seconds[key] / seconds["jaxzero"],
        }
        for key in calls
    ]


def bandwidth(name: str, tree: Tree, repeats: int) -> list[Row]:
    """Times pack and unpack of a tree against memcpy of the same bytes."""
    policy = jaxzero.Policy(transport="xla", direct_bytes=1 << 60, bucket_bytes=1 << 40)
    like = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in tree.items()}
    plan = jaxzero.make_plan(like, DEVICES, policy)
    (bucket,) = plan.buckets
    leaves = [jnp.ones(leaf.shape, jnp.float32) for leaf in plan.leaves]
    send = jax.ShapeDtypeStruct((DEVICES, bucket.row_numel), jnp.float32)
    pack = jax.jit(
        lambda leaves: _ffi.call(
            _ffi.PACK,
            [send],
            leaves,
            slots=_ffi.leaf_slots(bucket, plan.leaves),
            group_size=np.int64(DEVICES),
            pre_scale=np.float64(1),
        )
    )
    row = jnp.ones((1, bucket.row_numel), jnp.float32)
    results = [
        jax.ShapeDtypeStruct(spec.cut.shard_shape, jnp.float32) for spec in plan.leaves
    ]
    unpack = jax.jit(
        lambda row: _ffi.call(
            _ffi.UNPACK,
            [*results, jax.ShapeDtypeStruct((2,), jnp.float32)],
            [row],
            slots=_ffi.shard_slots(bucket, plan.leaves),
            num_rows=np.int64(1),
            divisor=np.float64(DEVICES),
            with_stats=np.int64(0),
        )
    )
    rows = []
    for key, call, count in (
        ("pack", functools.partial(pack, leaves), bucket.send_bytes),
        ("unpack", functools.partial(unpack, row), bucket.row_bytes),
    ):
        copy = limits.memcpy(count)
        seconds = interleaved_medians({key: call, "memcpy": copy}, repeats)
        for how in (key, "memcpy"):
            rows.append(
                {
                    "benchmark": f"{key} of {name}",
                    "how": how,
                    "ms": seconds[how] * 1e3,
                    "GB/s copied": count / seconds[how] / 1e9,
                    "ratio to memcpy": seconds["memcpy"] / seconds[how],
                }
            )
    return rows


def compile_times(leaves: int, repeats: int) -> list[Row]:
    """Times trace plus compile of a tree of uneven leaves."""
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    tree = {f"leaf{i:03d}": (64 + i, 8) for i in range(leaves)}
    spec = NamedSharding(mesh, PartitionSpec(AXIS))
    like = {
        name: jax.ShapeDtypeStruct((DEVICES, *shape), jnp.float32, sharding=spec)
        for name, shape in tree.items()
    }
    seconds: dict[str, list[float]] = {"jaxzero": [], "per leaf": []}
    for _ in range(repeats):
        for key, way in (("jaxzero", OURS), ("per leaf", PER_LEAF)):
            jax.clear_caches()
            start = time.perf_counter()
            jitted(mesh, way, accumulates=False).lower(like).compile()
            seconds[key].append(time.perf_counter() - start)
    medians = {key: float(np.median(values)) for key, values in seconds.items()}
    return [
        {
            "benchmark": f"trace + compile, {leaves} leaves",
            "how": key,
            "ms": value * 1e3,
            "ratio to per leaf": value / medians["per leaf"],
        }
        for key, value in medians.items()
    ]


def main() -> None:
    """Runs all benchmarks and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--save", action="store_true", help="write results/cpu.json")
    options = parser.parse_args()
    repeats = 3 if options.quick else 7
    gpt2 = trees.gpt2()
    sections: list[Callable[[], list[Row]]] = [
        lambda: compile_times(300, 3),
        lambda: reductions(
            "1000 leaves f32[100]", trees.small(), 20, {"per leaf": PER_LEAF}
        ),
        lambda: bandwidth("GPT-2 124M", gpt2, repeats),
        lambda: reductions(
            "GPT-2 124M",
            gpt2,
            repeats,
            {"per leaf": PER_LEAF, "concatenate": CONCATENATE},
        ),
    ]
    rows: list[Row] = []
    for section in sections:
        new = section()
        print(table(new), end="\n\n", flush=True)
        rows += new
    if options.save:
        print(record.save("cpu", rows))


if __name__ == "__main__":
    main()
