"""Fused calls on GPUs, against NumPy in float64, on any number of ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from multihost.spmd import Spmd

import jaxzero
from jaxzero import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

SHAPES = {
    "column": (37, 12),
    "empty": (0, 3),
    "even": (24, 64),
    "large": (48, 1000),
    "middle": (5, 26, 3),
    "ragged": (8191,),
    "scalar": (),
    "whole": (33,),
}
CUTS = {
    "column": 1,
    "empty": None,
    "even": None,
    "large": None,
    "middle": 1,
    "ragged": "flat",
    "scalar": None,
    "whole": "whole",
}
LEAF_DTYPES = ("float32", "bfloat16", "float16", "complex64")


def grads(ranks: int, seed: int = 0) -> list[Any]:
    """Whole numbers in all leaf dtypes, whose sums every dtype holds exactly."""

    def tree(rank: int, index: int, dtype: str) -> Any:
        numbers = [
            oracle.integers(SHAPES, 1000 * seed + 100 * index + 10 * part + rank)
            for part in range(2)
        ]
        if dtype != "complex64":
            return oracle.stored(jax.tree.map(lambda x: x / 2, numbers[0]), dtype)
        return jax.tree.map(
            lambda real, imaginary: (real + 1j * imaginary).astype(dtype), *numbers
        )

    return [
        {dtype: tree(rank, i, dtype) for i, dtype in enumerate(LEAF_DTYPES)}
        for rank in range(ranks)
    ]


def cuts() -> Any:
    return {dtype: CUTS for dtype in LEAF_DTYPES}


def assert_shards(found: dict[int, Any], full: Any, ranks: int) -> None:
    assert found
    for rank, tree in found.items():
        oracle.assert_same(tree, oracle.shard(full, ranks, rank, cuts()))


POLICIES = {
    "defaults": Policy(op="sum"),
    "mean": Policy(shard_dtype="float32"),
    "float32-wire": Policy(op="sum", comm_dtype="float32"),
    "bfloat16-wire": Policy(op="sum", comm_dtype="bfloat16"),
    "float16-wire": Policy(op="sum", comm_dtype="float16"),
    "bfloat16-shards": Policy(op="sum", shard_dtype="float32", comm_dtype="bfloat16"),
    "divided": Policy(divide_by=0.25, bucket_bytes=4096),
    "tiny-buckets": Policy(op="sum", bucket_bytes=1000),
    "all-direct": Policy(op="sum", direct_bytes=0),
    "direct-divided": Policy(divide_by=0.5, direct_bytes=0, shard_dtype="float32"),
    "float32-sums": Policy(op="sum", reduction="float32", shard_dtype="float32"),
    "float32-sums-bfloat16": Policy(
        op="sum", reduction="float32", comm_dtype="bfloat16", shard_dtype="float32"
    ),
    "float32-sums-direct": Policy(op="sum", reduction="float32", direct_bytes=0),
    "float32-sums-tiny": Policy(op="sum", reduction="float32", bucket_bytes=1000),
    "flushes": Policy(op="sum", flush_bytes=1),
    "flushes-divided": Policy(divide_by=0.25, flush_bytes=60000, bucket_bytes=4096),
    "through-xla": Policy(op="sum", transport="xla"),
    "through-xla-float32": Policy(op="sum", transport="xla", reduction="float32"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_sums_of_whole_numbers_are_exact(spmd: Spmd, name: str) -> None:
    """All layouts and leaf dtypes at once; with and without an accumulator."""
    policy = POLICIES[name]
    first, second = grads(spmd.ranks, 1), grads(spmd.ranks, 2)

    def both(a: Any, b: Any) -> Any:
        one = jaxzero.shard_grads(a, "data", policy=policy, cuts=cuts())
        two = jaxzero.shard_grads(b, "data", policy=policy, cuts=cuts(), into=one)
        return one, two

    if policy.op == "mean" and policy.divide_by is None:
        policy = Policy(divide_by=4.0, shard_dtype="float32")
    found = spmd.run(both, first, second)
    op = {"op": policy.op, "divide_by": policy.divide_by}
    full = oracle.reduce(first, **op)
    assert_shards({r: tree[0] for r, tree in found.items()}, full, spmd.ranks)
    total = oracle.reduce(second, into=full, **op)
    assert_shards({r: tree[1] for r, tree in found.items()}, total, spmd.ranks)


@pytest.mark.parametrize("transport", ["nccl", "xla"])
@pytest.mark.parametrize("reduction", ["native", "float32"])
def test_statistics_cover_every_leaf_once(
    spmd: Spmd, transport: Any, reduction: Any
) -> None:
    policy = Policy(
        op="sum", transport=transport, reduction=reduction, bucket_bytes=5000
    )
    data = grads(spmd.ranks)

    def measure(tree: Any) -> Any:
        _, stats = jaxzero.shard_grads(
            tree, "data", policy=policy, cuts=cuts(), with_stats=True
        )
        return stats

    full = oracle.reduce(data, "sum")
    for stats in spmd.run(measure, data).values():
        assert stats.all_finite
        np.testing.assert_allclose(stats.norm, oracle.global_norm(full), rtol=1e-5)
    data[-1]["float32"]["ragged"][-1] = np.nan
    for stats in spmd.run(measure, data).values():
        assert not stats.all_finite


@pytest.mark.parametrize("name", ["defaults", "all-direct", "tiny-buckets"])
@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_parameters_come_back_as_they_were(
    spmd: Spmd, name: str, compute_dtype: str | None
) -> None:
    full = grads(1)[0]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), full)
    if compute_dtype:  # complex leaves have no bfloat16 form
        full.pop("complex64")
        like.pop("complex64")
    options = {dtype: CUTS for dtype in full}
    policy = Policy(
        compute_dtype=compute_dtype,
        bucket_bytes=POLICIES[name].bucket_bytes,
        direct_bytes=POLICIES[name].direct_bytes,
    )
    found = spmd.run(
        lambda s: jaxzero.gather_params(s, like, "data", policy=policy, cuts=options),
        [oracle.shard(full, spmd.ranks, rank, options) for rank in range(spmd.ranks)],
    )
    assert found
    for tree in found.values():
        oracle.assert_same(tree, full)


@pytest.mark.parametrize("reduction", ["native", "float32"])
@pytest.mark.parametrize("direct_bytes", [None, 0])
def test_replicas_are_summed_too(
    hybrid: Spmd, reduction: Any, direct_bytes: int | None
) -> None:
    data = grads(hybrid.ranks)
    policy = Policy(op="sum", reduction=reduction, direct_bytes=direct_bytes)

    def reduce(tree: Any) -> Any:
        return jaxzero.shard_grads(
            tree, "data", policy=policy, cuts=cuts(), replicate_axis="replica"
        )

    shards = hybrid.ranks // 2
    full = oracle.reduce(data, "sum")
    for rank, tree in hybrid.run(reduce, data).items():
        oracle.assert_same(tree, oracle.shard(full, shards, rank % shards, cuts()))


def test_calls_alternate_with_native_collectives(hybrid: Spmd) -> None:
    """Two communicators in one program, for many steps: nothing hangs or is mixed."""
    data = grads(hybrid.ranks)

    def step(tree: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            total, count = carry
            shards = jaxzero.shard_grads(
                tree,
                "data",
                policy=Policy(op="sum"),
                cuts=cuts(),
                into=total,
                replicate_axis="replica",
            )
            return (shards, count + lax.psum(jnp.float32(1), "replica")), None

        first = jaxzero.shard_grads(
            tree,
            "data",
            policy=Policy(op="sum", shard_dtype="float32"),
            cuts=cuts(),
            replicate_axis="replica",
        )
        start = jax.tree.map(lambda x: x * 0, first)
        carry, _ = lax.scan(body, (start, jnp.float32(0)), None, length=300)
        return carry

    full = jax.tree.map(lambda x: 300 * x, oracle.reduce(data, "sum"))
    shards = hybrid.ranks // 2
    for rank, (tree, count) in hybrid.run(step, data, check_vma=False).items():
        assert count == 600
        oracle.assert_same(tree, oracle.shard(full, shards, rank % shards, cuts()))


def test_a_larger_group_between_two_calls_changes_nothing(hybrid: Spmd) -> None:
    """XLA may replace the communicator of a group when it makes a larger one."""
    data = grads(hybrid.ranks)

    def over(axes: Any) -> Any:
        return hybrid.jit(
            lambda tree: jaxzero.shard_grads(
                tree, axes, policy=Policy(op="sum"), cuts=cuts()
            )
        )

    small, large = over("data"), over(("replica", "data"))
    placed = hybrid.place(data)
    first = hybrid.local(small(placed))
    found = hybrid.local(large(placed))
    again = hybrid.local(small(placed))
    assert_shards(found, oracle.reduce(data, "sum"), hybrid.ranks)
    for rank, tree in again.items():
        oracle.assert_same(tree, first[rank])


def test_many_small_leaves_take_several_launches(spmd: Spmd) -> None:
    shapes = {f"{i:04}": (i % 13 + 1,) for i in range(2000)}
    data = [oracle.integers(shapes, rank, limit=4) for rank in range(spmd.ranks)]
    found = spmd.run(
        lambda tree: jaxzero.shard_grads(tree, "data", policy=Policy(op="sum")), data
    )
    full = oracle.reduce(data, "sum")
    for rank, tree in found.items():
        oracle.assert_same(tree, oracle.shard(full, spmd.ranks, rank))


def test_random_trees_of_random_dtypes(spmd: Spmd) -> None:
    """A new program each time, so that buffers move and temporary memory is stale."""
    for seed in range(12):
        random = np.random.default_rng(seed)
        shapes = {
            str(i): tuple(int(n) for n in random.integers(1, 40, random.integers(4)))
            for i in range(random.integers(1, 12))
        }
        dtypes = {k: str(random.choice(LEAF_DTYPES[:3])) for k in shapes}
        options = {
            k: random.choice(np.array([None, "flat", 0], object)) if shape else None
            for k, shape in shapes.items()
        }
        policy = Policy(
            op="sum",
            comm_dtype=random.choice(np.array([None, "float32", "bfloat16"], object)),
            reduction=str(random.choice(["native", "float32"])),
            shard_dtype="float32",
            # Not smaller: each bucket is a collective, and a thousand steps add up.
            bucket_bytes=int(random.integers(20_000, 200_000)),
            direct_bytes=int(random.integers(0, 4000)),
        )
        data = [
            {
                k: oracle.stored(v, dtypes[k])
                for k, v in oracle.integers(shapes, rank, limit=4).items()
            }
            for rank in range(spmd.ranks)
        ]
        step = spmd.jit(
            lambda t, p=policy, c=options: jaxzero.shard_grads(
                t, "data", policy=p, cuts=c
            )
        )
        placed = spmd.place(data)
        full = oracle.reduce(data, "sum")
        for _ in range(84):  # a thousand steps in all
            found = step(placed)
        for rank, tree in spmd.local(found).items():
            oracle.assert_same(tree, oracle.shard(full, spmd.ranks, rank, options))
