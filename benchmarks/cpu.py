"""CPU benchmarks: `python benchmarks/cpu.py [--quick] [--save]`.

Everything that is compared runs in this one process, in turns, and the result is a
ratio of medians. The rivals do the same work: sum, divide by the number of ranks.
"""

import argparse
import concurrent.futures
import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

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
import trees  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import jaxzero  # noqa: E402
from jaxzero import _ffi  # noqa: E402

AXIS = "data"
Arrays = dict[str, jax.Array]
Reduce = Callable[[Arrays], Any]


def per_leaf(grads: Arrays) -> Arrays:
    """Returns the shards by one psum_scatter per leaf, as JAX users write it."""

    def reduce(leaf: jax.Array) -> jax.Array:
        flat = leaf.reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % DEVICES))
        return lax.psum_scatter(flat, AXIS, tiled=True) / DEVICES

    return jax.tree.map(reduce, grads)


def concatenated(grads: Arrays) -> jax.Array:
    """Returns the shards by one psum_scatter of all leaves, concatenated."""
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(grads)])
    flat = jnp.pad(flat, (0, -flat.size % DEVICES))
    return lax.psum_scatter(flat, AXIS, tiled=True) / DEVICES


def ours(grads: Arrays, policy: jaxzero.Policy = jaxzero.Policy()) -> Any:  # noqa: B008
    """Returns the shards by jaxzero."""
    return jaxzero.shard_grads(grads, AXIS, policy=policy)


def jitted(mesh: jax.sharding.Mesh, reduce: Reduce) -> Any:
    """Returns a reduction over the leading axis of stacked gradients."""

    def local(stacked: Arrays) -> Any:
        return reduce(jax.tree.map(lambda leaf: leaf[0], stacked))

    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))


def stacked_grads(mesh: jax.sharding.Mesh, tree: trees.Tree) -> Arrays:
    """Returns one full gradient per device."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    make = jax.jit(
        lambda: {
            name: jnp.full((DEVICES, *shape), 1.0 + i % 7, jnp.float32)
            for i, (name, shape) in enumerate(tree.items())
        },
        out_shardings=sharding,
    )
    return make()


def reductions(
    name: str, tree: trees.Tree, repeats: int, rivals: dict[str, Reduce]
) -> list[record.Row]:
    """Times jaxzero against rivals on one tree."""
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    grads = stacked_grads(mesh, tree)
    calls = {
        key: functools.partial(jitted(mesh, reduce), grads)
        for key, reduce in {"jaxzero": ours, **rivals}.items()
    }
    seconds = record.interleaved_medians(calls, repeats)
    return [
        {
            "benchmark": name,
            "how": key,
            "ms": seconds[key] * 1e3,
            "ratio to jaxzero": seconds[key] / seconds["jaxzero"],
        }
        for key in calls
    ]


def bandwidth(name: str, tree: trees.Tree, repeats: int) -> list[record.Row]:
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
        copy = memcpy(count)
        seconds = record.interleaved_medians({key: call, "memcpy": copy}, repeats)
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


def memcpy(count: int) -> Callable[[], None]:
    """Returns a copy of `count` bytes into fresh memory by as many threads as cores.

    Fresh, because XLA gives a custom call fresh result buffers too.
    """
    threads = os.cpu_count() or 1
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    source = np.ones(count, np.uint8)
    parts = np.linspace(0, count, threads + 1).astype(int)

    def copy() -> None:
        target = np.empty(count, np.uint8)
        jobs = [
            pool.submit(np.copyto, target[a:b], source[a:b])
            for a, b in itertools.pairwise(parts)
        ]
        for job in jobs:
            job.result()

    return copy


def compile_times(leaves: int, repeats: int) -> list[record.Row]:
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
        for key, reduce in (("jaxzero", ours), ("per leaf", per_leaf)):
            jax.clear_caches()
            start = time.perf_counter()
            jitted(mesh, reduce).lower(like).compile()
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
    sections: list[Callable[[], list[record.Row]]] = [
        lambda: compile_times(300, 3),
        lambda: reductions(
            "1000 leaves f32[100]", trees.small(), 20, {"per leaf": per_leaf}
        ),
        lambda: bandwidth("GPT-2 124M", gpt2, repeats),
        lambda: reductions(
            "GPT-2 124M",
            gpt2,
            repeats,
            {"per leaf": per_leaf, "concatenate": concatenated},
        ),
    ]
    rows: list[record.Row] = []
    for section in sections:
        new = section()
        print(record.table(new), end="\n\n", flush=True)
        rows += new
    if options.save:
        print(record.save("cpu", rows))


if __name__ == "__main__":
    main()
