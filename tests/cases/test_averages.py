"""What is summed, and by what it is divided."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from per_rank import PerRank

import jaxzero
from jaxzero import Policy


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("size", [4, 5, 8], ids=lambda n: f"size{n}")
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradient_of_a_replicated_parameter_is_summed_once(
    make_mesh, check_vma, size, op, kind
):
    """With varying types `grad` has summed it already; without, it has not."""
    data = np.array([[r + j / 4 for j in range(size)] for r in range(4)], np.float32)
    mesh = make_mesh(4, kind=kind)

    def step(params, x):
        grads = jax.grad(lambda p: jnp.sum(p * x[0]))(params)
        return jaxzero.shard_grads(grads, "data", policy=Policy(op=op))

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        check_vma=check_vma,
    )
    params = jax.device_put(
        np.zeros(size, np.float32), NamedSharding(mesh, PartitionSpec())
    )
    placed = jax.device_put(data, NamedSharding(mesh, PartitionSpec("data")))
    result = jax.jit(mapped)(params, placed)
    oracle.assert_same(result, oracle.shards(oracle.reduce(list(data), op), 4))


@pytest.mark.parametrize("ranks", [2, 3, 8], ids=lambda n: f"n{n}")
def test_the_last_microbatch_is_reduced_like_the_others(make_mesh, ranks):
    """A microbatch that is added after the reduction would stay local."""
    first = [np.float32([1 + 2 * r]) for r in range(ranks)]
    last = [np.float32([5 + 2 * r]) for r in range(ranks)]

    def step(a, b):
        acc = jaxzero.shard_grads(a, "data")
        return jaxzero.shard_grads(b, "data", into=acc)

    shards = PerRank(make_mesh(ranks)).run(step, first, last)
    expected = 6.0 + 2 * (ranks - 1)
    assert [float(s[0]) for s in shards] == [expected] + [0.0] * (ranks - 1)


@pytest.mark.parametrize(
    ("dtype", "into_dtype", "expected"),
    [
        ("bfloat16", "float32", 264.0),
        ("float16", "float32", 264.0),
        ("bfloat16", "bfloat16", 256.0),
        ("float32", "bfloat16", 256.0),
    ],
)
def test_accumulators_keep_their_own_precision(make_mesh, dtype, into_dtype, expected):
    """A bfloat16 accumulator loses every 1 added to 256; a float32 one does not."""
    grads = [oracle.stored(np.ones(2), dtype)] * 2
    start = [oracle.stored(np.full(1, 256.0), into_dtype)] * 2

    def step(g, acc):
        for _ in range(8):
            acc = jaxzero.shard_grads(g, "data", into=acc)
        return acc

    for shard in PerRank(make_mesh(2)).run(step, grads, start):
        assert shard.dtype == np.dtype(into_dtype)
        assert float(shard[0]) == expected


@pytest.mark.parametrize("comm_dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("reduction", ["native", "float32"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["once", "into"])
def test_sums_are_not_divided(make_mesh, comm_dtype, reduction, accumulate):
    """Contrastive losses need summed gradients, on every wire."""
    policy = Policy(op="sum", comm_dtype=comm_dtype, reduction=reduction)
    grads = [{"w": np.full(4, 1 + 2 * r, np.float32)} for r in range(2)]

    def step(g):
        acc = jax.tree.map(lambda _: jnp.full(2, 10.0), g) if accumulate else None
        return jaxzero.shard_grads(g, "data", policy=policy, into=acc)

    expected = [{"w": np.full(2, 14.0 if accumulate else 4.0)}] * 2
    oracle.assert_same(PerRank(make_mesh(2)).run(step, grads), expected)


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_divide_by_is_the_same_on_every_mesh(make_mesh, shape, dtype, check_vma):
    """One division by the whole number, not one per mesh axis."""
    mesh = make_mesh(shape, ("replica", "data"))
    ranks = PerRank(mesh, check_vma=check_vma)
    grads = [oracle.stored(np.ones(8), dtype)] * 8
    result = ranks.run(
        lambda g: jaxzero.shard_grads(
            g, "data", replicate_axis="replica", policy=Policy(divide_by=300)
        ),
        grads,
    )
    for shard in result:
        # 8 is exact on every wire, so what is left is one division and one rounding.
        oracle.assert_same(shard, oracle.stored(np.full(8 // shape[1], 8 / 300), dtype))


@pytest.mark.parametrize("cut", [None, "flat", "whole"])
def test_replicas_and_shards_give_what_one_axis_gives(make_mesh, cut):
    """Hybrid sharding with two microbatches equals all ranks on one axis."""
    shapes = {"a": (4, 3), "b": (5,), "c": ()}
    first = [oracle.integers(shapes, r) for r in range(4)]
    second = [oracle.integers(shapes, r + 100) for r in range(4)]

    def step(a, b):
        reduce = lambda g, acc: jaxzero.shard_grads(  # noqa: E731
            g, "data", replicate_axis="replica", into=acc, cuts=cut
        )
        return reduce(b, reduce(a, None))

    found = PerRank(make_mesh((2, 2), ("replica", "data"))).run(step, first, second)
    expected = oracle.reduce(second, into=oracle.reduce(first))
    for index, shards in enumerate(found):
        oracle.assert_same(shards, oracle.shard(expected, 2, index % 2, cut))


@pytest.mark.parametrize("ranks", [2, 4, 8], ids=lambda n: f"n{n}")
def test_clipping_uses_the_norm_of_the_whole_gradient(make_mesh, ranks):
    """The norm of a rank's shard would make clipping depend on the rank."""
    grads = [{"w": np.float32([3, 0, 0, 4])}] * ranks

    def step(g):
        shards, stats = jaxzero.shard_grads(g, "data", with_stats=True)
        scale = 1.0 / jnp.maximum(stats.norm, 1.0)
        return jax.tree.map(lambda s: s * scale, shards), stats.norm

    full = {"w": np.float32([0.6, 0, 0, 0.8])}
    for rank, (clipped, norm) in enumerate(PerRank(make_mesh(ranks)).run(step, grads)):
        assert norm == 5.0
        oracle.assert_close(clipped, oracle.shard(full, ranks, rank), ranks, "float32")


@pytest.mark.parametrize(
    ("tree", "norm"),
    [
        ({}, 0.0),
        ({"e": np.ones((0, 10), np.float32)}, 0.0),
        ({"e": np.ones((0, 10), np.float32), "w": np.ones(4, np.float32)}, 2.0),
        ({"n": None, "w": np.zeros(4, np.float32)}, 0.0),
    ],
    ids=["nothing", "only_empty", "empty_and_ones", "zeros"],
)
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_norm_of_empty_trees_is_zero(make_mesh, tree, norm, check_vma):
    """An empty group gives a scalar zero and no NaN."""
    ranks = PerRank(make_mesh(2), check_vma=check_vma)
    stats = jax.shard_map(
        lambda: jaxzero.shard_grads(
            jax.tree.map(jnp.asarray, tree), "data", with_stats=True
        )[1],
        mesh=ranks.mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    # Equal data on both ranks: its mean is itself only where it is not summed yet.
    already_summed = 2.0 if check_vma else 1.0
    result = jax.jit(stats)()
    assert result.norm.shape == ()
    assert float(result.norm) == pytest.approx(norm / already_summed, rel=1e-6)
    assert bool(result.all_finite)


@pytest.mark.parametrize("reduction", ["native", "float32"])
@pytest.mark.parametrize("ranks", [4, 8], ids=lambda n: f"n{n}")
def test_a_bfloat16_sum_is_rounded_once(make_mesh, reduction, ranks):
    """Rounding after each addition would leave 256."""
    grads = [
        oracle.stored(np.full(ranks, 1.0 if r else 256.0), "bfloat16")
        for r in range(ranks)
    ]
    policy = Policy(op="sum", reduction=reduction)
    expected = oracle.stored(np.full(1, 255.0 + ranks), "bfloat16")
    result = PerRank(make_mesh(ranks)).run(
        lambda g: jaxzero.shard_grads(g, "data", policy=policy), grads
    )
    oracle.assert_same(result, [expected] * ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 4, 5, 7])
@pytest.mark.parametrize("comm_dtype", [None, "bfloat16"])
def test_float32_reduction_equals_a_float32_wire(make_mesh, dtype, size, comm_dtype):
    """Uneven leaves, accumulation and the mean included."""
    grads = [oracle.integers((size,), r, dtype=dtype) for r in range(2)]
    acc = [np.full((-(-size // 2),), 0.5, np.float32) for _ in range(2)]

    def run(policy):
        step = lambda g, a: jaxzero.shard_grads(  # noqa: E731
            g, "data", into=a, policy=policy
        )
        return PerRank(make_mesh(2)).run(step, grads, acc)

    found = run(Policy(reduction="float32", comm_dtype=comm_dtype))
    oracle.assert_same(found, run(Policy(comm_dtype="float32")))
    full = oracle.reduce(grads)
    for rank, shard in enumerate(found):
        oracle.assert_same(shard, oracle.shard(full, 2, rank, "flat") + 0.5)


@pytest.mark.parametrize("bucket_bytes", [16, 64, None])
def test_an_unused_parameter_gets_zeros(make_mesh, bucket_bytes):
    """Its bucket is sent all the same."""
    grads = [
        {"unused": np.zeros(3, np.float32), "used": np.full(5, r, np.float32)}
        for r in range(2)
    ]
    policy = Policy(op="sum", bucket_bytes=bucket_bytes)
    result = PerRank(make_mesh(2)).run(
        lambda g: jaxzero.shard_grads(g, "data", policy=policy), grads
    )
    for rank, shards in enumerate(result):
        oracle.assert_same(shards, oracle.shard(oracle.reduce(grads, "sum"), 2, rank))


def test_accumulating_chunks_equals_reducing_their_sum(make_mesh):
    """Four reductions into one accumulator, or one of four summed gradients."""
    chunks = [
        [oracle.integers({"a": (3, 5), "b": (8,)}, 10 * k + r) for k in range(4)]
        for r in range(4)
    ]
    ranks = PerRank(make_mesh(4))

    def one_by_one(chunks):
        acc = None
        for chunk in chunks:
            acc = jaxzero.shard_grads(chunk, "data", into=acc)
        return acc

    def at_once(chunks):
        total = jax.tree.map(lambda *leaves: sum(leaves), *chunks)
        return jaxzero.shard_grads(total, "data")

    oracle.assert_same(ranks.run(one_by_one, chunks), ranks.run(at_once, chunks))


@pytest.mark.parametrize("cut", [None, "flat", 1])
def test_sharded_and_replicated_training_agree(make_mesh, cut):
    """Eight steps of gradient descent; whole leaves take an all-reduce instead."""
    true = {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "v": np.ones((2, 5))}
    params = jax.tree.map(np.float32, true)
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    data = [np.float32([r - 1, 2 * r, 1]) for r in range(4)]

    def loss(p, x):
        return jnp.sum(p["w"] @ x) + x[0] * jnp.sum(p["v"])

    def train(cuts):
        def step(shards, x):
            for _ in range(8):
                full = jaxzero.gather_params(shards, like, "data", cuts=cuts)
                grads = jax.grad(loss)(full, x)
                reduced = jaxzero.shard_grads(grads, "data", cuts=cuts)
                # A step of 1/4 of whole quarters stays exact in float32.
                shards = jax.tree.map(lambda s, g: s - g / 4, shards, reduced)
            return jaxzero.gather_params(shards, like, "data", cuts=cuts)

        start = [oracle.shard(params, 4, r, cuts) for r in range(4)]
        return PerRank(make_mesh(4), check_vma=False).run(step, start, data)

    oracle.assert_same(train(cut), train("whole"))
