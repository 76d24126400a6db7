"""Leaves that do not divide, buckets that are too small, and how many collectives."""

import jax
import numpy as np
import oracle
import pytest
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

MAKE_SUM = Policy(op="sum")


def reduce(mesh, grads, policy=MAKE_SUM, **options):
    """Returns every rank's shards."""
    return PerRank(mesh).run(
        lambda g: jaxzero.shard_grads(g, "data", policy=policy, **options), grads
    )


def check(mesh, grads, policy=MAKE_SUM, cuts=None):
    """Asserts that every rank's shards are exactly the oracle's."""
    full = oracle.reduce(grads, policy.op, policy.divide_by)
    ranks = len(grads)
    for rank, shards in enumerate(reduce(mesh, grads, policy, cuts=cuts)):
        oracle.assert_same(shards, oracle.shard(full, ranks, rank, cuts))


@pytest.mark.parametrize("direct_bytes", [0, None], ids=["direct", "packed"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("size", [1, 2, 71, 72, 73, 75, 76])
def test_uneven_leaves_are_padded_with_zeros(make_mesh, size, ranks, direct_bytes):
    """The collective has one count for all ranks, so the last shards hold zeros."""
    policy = Policy(op="sum", direct_bytes=direct_bytes)
    check(make_mesh(ranks), [{"g": np.ones(size, np.float32)}] * ranks, policy)


def test_73_ones_over_4_ranks(make_mesh):
    """Three shards of 19 fours; the last has 16 fours and 3 zeros."""
    result = reduce(make_mesh(4), [{"g": np.ones(73, np.float32)}] * 4)
    for rank in range(3):
        np.testing.assert_array_equal(result[rank]["g"], [4.0] * 19)
    np.testing.assert_array_equal(result[3]["g"], [4.0] * 16 + [0.0] * 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(5, 3), (3, 5), (1, 1), (1, 9, 2), (7, 7, 7)])
@pytest.mark.parametrize("bucket_bytes", [1, 64, None])
def test_padded_leaves_do_not_overlap(make_mesh, sizes, dtype, bucket_bytes):
    """Offsets that advance by the true size would mix a leaf with its neighbour."""
    tree = {f"leaf{i}": oracle.stored(np.ones(n), dtype) for i, n in enumerate(sizes)}
    check(make_mesh(4), [tree] * 4, Policy(op="sum", bucket_bytes=bucket_bytes))


def test_leaf_as_large_as_the_bucket_is_reduced(make_mesh):
    """A limit that is off by one at equality would keep local gradients."""
    grads = [np.full((4, 4), 2 * r, np.float32) for r in range(2)]
    for shard in reduce(make_mesh(2), grads, Policy(bucket_bytes=64)):
        np.testing.assert_array_equal(shard, np.ones((2, 4)))


@pytest.mark.parametrize("direct_bytes", [0, 64, 1 << 30], ids=lambda n: f"direct{n}")
@pytest.mark.parametrize("bucket_bytes", [1, 16, 32, 48, 60, 63, 64, 65, 68, 127, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_leaf_near_the_bucket_limit_is_reduced(
    make_mesh, bucket_bytes, direct_bytes, dtype
):
    """64 bytes of float32 against every limit around them."""
    grads = [oracle.integers({"a": (4, 4), "b": (3,)}, r, dtype=dtype) for r in (0, 1)]
    policy = Policy(op="sum", bucket_bytes=bucket_bytes, direct_bytes=direct_bytes)
    check(make_mesh(2), grads, policy)


@pytest.mark.parametrize("order", ["abc", "bac", "cab", "bca"])
@pytest.mark.parametrize("ranks", [2, 3], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("cut", [None, "whole", "flat"])
def test_leaf_larger_than_the_bucket_is_reduced(make_mesh, order, ranks, cut):
    """It is sent in several pieces, wherever it stands in the tree."""
    size = {"a": 4, "b": 100, "c": 4}
    tree = {f"{i}{name}": (size[name],) for i, name in enumerate(order)}
    grads = [oracle.integers(tree, r) for r in range(ranks)]
    check(make_mesh(ranks), grads, Policy(op="sum", bucket_bytes=32), cut)


@pytest.mark.parametrize(
    "shapes",
    [
        {"e": (0, 8), "w": (8,)},
        {"e": (0, 8)},
        {"e": (3, 0), "f": (0,), "s": (), "w": (2, 2)},
    ],
    ids=["with_w", "alone", "several"],
)
@pytest.mark.parametrize("cut", [None, "flat", "whole", 0])
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_empty_leaves_give_empty_shards_and_come_back(
    make_mesh, shapes, cut, check_vma
):
    """No collective is issued for them."""
    cuts = {name: None if not shape else cut for name, shape in shapes.items()}
    grads = [oracle.integers(shapes, r) for r in range(2)]
    like = jax.eval_shape(lambda: grads[0])
    full = oracle.reduce(grads, "sum")

    def step(g):
        shards = jaxzero.shard_grads(g, "data", policy=MAKE_SUM, cuts=cuts)
        return shards, jaxzero.gather_params(shards, like, "data", cuts=cuts)

    result = PerRank(make_mesh(2), check_vma=check_vma).run(step, grads)
    for rank, (shards, back) in enumerate(result):
        oracle.assert_same(shards, oracle.shard(full, 2, rank, cuts))
        oracle.assert_same(back, full)
    plan = jaxzero.make_plan({"e": np.zeros((0, 8), np.float32)}, 2)
    assert plan.num_collectives == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)], ids=str)
@pytest.mark.parametrize("cut", [None, "whole"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_one_rank_still_casts_scales_and_accumulates(
    make_mesh, dtype, shape, cut, check_vma
):
    """Without a second rank there is no collective, but everything else happens."""
    grads = [oracle.stored(np.full(shape, 5.0), dtype)]
    into = [np.full(oracle.shard_leaf(grads[0], 1, 0, cut).shape, 0.5, np.float32)]
    policy = Policy(divide_by=4, comm_dtype="float16")
    ranks = PerRank(make_mesh(1), check_vma=check_vma)
    plain, added = ranks.run(
        lambda g, a: (
            jaxzero.shard_grads(g, "data", cuts=cut),
            jaxzero.shard_grads(g, "data", cuts=cut, policy=policy, into=a),
        ),
        grads,
        into,
    )[0]
    assert (plain.dtype, added.dtype) == (grads[0].dtype, np.float32)
    np.testing.assert_array_equal(plain.astype(np.float32), np.full(plain.shape, 5.0))
    np.testing.assert_array_equal(added, np.full(added.shape, 1.75))


def test_bucket_size_never_changes_a_result(make_mesh):
    """Three accumulating steps over 20 leaves, bit for bit."""
    shapes = [(n, 1 + n % 3) for n in range(1, 21)]
    steps = [
        [[oracle.integers(shapes, 10 * k + r) for k in range(3)] for r in range(4)]
    ][0]

    def step(policy):
        def accumulate(chunks):
            acc = None
            for grads in chunks:
                acc = jaxzero.shard_grads(grads, "data", into=acc, policy=policy)
            return acc

        return PerRank(make_mesh(4)).run(accumulate, steps)

    expected = step(Policy(bucket_bytes=64))
    for bucket_bytes in (1, 4096, 1 << 30):
        oracle.assert_same(step(Policy(bucket_bytes=bucket_bytes)), expected)


@pytest.mark.parametrize("slow_copies", [1, 8])
def test_a_bucket_is_not_overwritten_while_it_is_sent(make_mesh, slow_copies):
    """Six leaves with distinct constants through buckets of 1 KiB."""
    grads = [
        [np.full(256, i + 1, np.float32) for i in range(6)] for _ in range(slow_copies)
    ]
    policy = Policy(bucket_bytes=1024)
    result = reduce(make_mesh(2), [grads, grads], policy)
    for shards in result:
        for leaves in shards:
            for i, shard in enumerate(leaves):
                np.testing.assert_array_equal(shard, np.full(128, i + 1))


def test_a_full_bucket_does_not_stay_full():
    """100 leaves in buckets that hold 50: two collectives, not fifty-one."""
    tree = [np.zeros(10, np.float32)] * 100
    # A shard of 5 floats takes 32 aligned bytes in each of 2 rows.
    policy = Policy(bucket_bytes=50 * 2 * 32)
    assert jaxzero.make_plan(tree, 2, policy).num_collectives == 2


def test_wire_carries_leaves_and_not_the_whole_bucket():
    """3 floats over 2 ranks: one aligned unit per rank, however large the bucket."""
    tree = {"w": np.zeros(3, np.float32)}
    plan = jaxzero.make_plan(tree, 2, Policy(bucket_bytes=1 << 30))
    assert (plan.num_collectives, plan.wire_bytes, plan.padding_bytes) == (1, 32, 20)


def test_direct_leaves_leave_no_empty_bucket_behind():
    """A tree of large leaves only issues one collective for each."""
    tree = [np.zeros((64, 64), np.float32)] * 3
    plan = jaxzero.make_plan(tree, 2, Policy(direct_bytes=0))
    assert [bucket.kind for bucket in plan.buckets] == ["direct"] * 3
    assert plan.num_collectives == 3


@pytest.mark.parametrize(
    ("count", "shape", "most"), [(500, (3,), 1), (1000, (100,), 1), (2000, (), 1)]
)
@pytest.mark.parametrize("transport", ["nccl", "xla"])
def test_many_small_leaves_take_few_collectives(count, shape, most, transport):
    """Small messages would dominate, or fill the queues of a slow rank."""
    tree = [np.zeros(shape, np.float32)] * count
    plan = jaxzero.make_plan(tree, 8, Policy(transport=transport))
    assert plan.num_collectives <= most


@pytest.mark.parametrize(("size", "ranks"), [(7, 2), (24, 3), (1, 5), (6, 6), (13, 8)])
@pytest.mark.parametrize("comm_dtype", ["float32", "bfloat16", "float16"])
def test_summing_on_arrival_takes_any_size(make_mesh, size, ranks, comm_dtype):
    """Sizes that blocks or ranks do not divide take the same path on all ranks."""
    grads = [oracle.integers({"w": (size,)}, r) for r in range(ranks)]
    check(
        make_mesh(ranks),
        grads,
        Policy(op="sum", reduction="float32", comm_dtype=comm_dtype),
    )
