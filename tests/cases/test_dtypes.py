"""Leaf, comm and shard dtype are three independent choices."""

import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import oracle
import pytest
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

WIRES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("grad", WIRES)
@pytest.mark.parametrize("acc", WIRES)
@pytest.mark.parametrize("comm_dtype", [None, "float32", "bfloat16"])
def test_shards_take_the_dtype_of_the_accumulator(make_mesh, grad, acc, comm_dtype):
    """Mixed precision may promote a gradient; its shard stays as it was."""
    grads = [oracle.integers((16,), r, dtype=grad) for r in range(2)]
    into = [oracle.integers((8,), r + 10, dtype=acc) for r in range(2)]
    policy = Policy(comm_dtype=comm_dtype)
    mean = oracle.reduce(grads)
    result = PerRank(make_mesh(2)).run(
        lambda g, a: jaxzero.shard_grads(g, "data", into=a, policy=policy), grads, into
    )
    for rank, shard in enumerate(result):
        assert shard.dtype == into[rank].dtype
        # Halves of whole numbers below 16 are exact in all of these dtypes.
        oracle.assert_same(shard, oracle.wide(into[rank]) + oracle.shard(mean, 2, rank))


@pytest.mark.parametrize("shard_dtype", [None, "float32", "bfloat16", "float16"])
def test_mixed_dtypes_in_one_tree(make_mesh, shard_dtype):
    """One call; each leaf keeps its dtype unless the policy says otherwise."""
    dtypes = {"w": "bfloat16", "norm": "float32", "scale": "float16", "bias": "float32"}
    grads = [
        {name: oracle.stored(np.full(8, v), d) for name, d in dtypes.items()}
        for v in (1, 3)
    ]
    policy = Policy(shard_dtype=shard_dtype)
    for shards in PerRank(make_mesh(2)).run(
        lambda g: jaxzero.shard_grads(g, "data", policy=policy), grads
    ):
        for name, dtype in dtypes.items():
            assert shards[name].dtype == np.dtype(shard_dtype or dtype)
            oracle.assert_same(shards[name], np.full(4, 2.0))


@pytest.mark.parametrize("leaf", WIRES)
@pytest.mark.parametrize("comm_dtype", WIRES)
@pytest.mark.parametrize("acc", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["native", "float32"])
def test_every_wire_takes_every_leaf(make_mesh, leaf, comm_dtype, acc, reduction):
    """Two accumulating calls of 6 uneven elements over 4 ranks."""
    rng = np.random.default_rng(0)
    grads = [[oracle.stored(rng.normal(size=6), leaf)] * 2 for _ in range(4)]
    start = [oracle.stored(np.zeros(2), acc)] * 4
    policy = Policy(comm_dtype=comm_dtype, reduction=reduction)

    def step(chunks, acc):
        for grad in chunks:
            acc = jaxzero.shard_grads(grad, "data", into=acc, policy=policy)
        return acc

    full = 2 * oracle.reduce([g[0] for g in grads])
    for rank, shard in enumerate(PerRank(make_mesh(4)).run(step, grads, start)):
        assert shard.dtype == np.dtype(acc)
        oracle.assert_close(
            shard, oracle.shard(full, 4, rank), 4, leaf, comm_dtype, acc, scale=4.0
        )


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("reduction", ["native", "float32"])
@pytest.mark.parametrize("value", [60000.0, -65504.0, 2.0**-14, 2.0**-20])
@pytest.mark.parametrize("cut", [None, "whole"])
def test_a_float16_mean_neither_overflows_nor_vanishes(
    make_mesh, ranks, reduction, value, cut
):
    """The sum of four 60000 is no float16, but their mean is."""
    grads = [oracle.stored(np.full(ranks, value), "float16")] * ranks
    policy = Policy(reduction=reduction)
    result = PerRank(make_mesh(ranks)).run(
        lambda g: jaxzero.shard_grads(g, "data", policy=policy, cuts=cut), grads
    )
    expected = oracle.wide(grads[0])
    for shard in result:
        assert shard.dtype == np.float16
        oracle.assert_close(
            shard, expected[: shard.size], ranks, "float16", scale=abs(value)
        )


@pytest.mark.parametrize(
    ("reduction", "values"),
    [("native", (2.0**-20, 1.0, 8192.0)), ("float32", (2.0**-24, 1.0, 65504.0))],
)
def test_a_float16_mean_over_64_ranks(reduction, values):
    """The divisor is split: all of it first loses 2**-20, all last overflows.

    A float16 wire that sums cannot take both ends of the range at once; one that is
    summed on arrival can.
    """
    program = f"""
import jax, numpy as np, jaxzero
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((64,), ("data",))
policy = jaxzero.Policy(reduction={reduction!r})
step = jax.jit(jax.shard_map(
    lambda g: jaxzero.shard_grads(g[0], "data", policy=policy),
    mesh=mesh, in_specs=P("data"), out_specs=P("data")))
for value in {values}:
    grads = np.full((64, 64), value, np.float16)
    out = np.asarray(step(jax.device_put(grads, jax.NamedSharding(mesh, P("data")))))
    np.testing.assert_array_equal(out, np.full(64, np.float16(value)))
"""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=64"
    }
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int32", "bool", "float8_e4m3fn", "float8_e5m2"],
)
def test_narrow_leaves_are_not_summed_as_they_are(make_mesh, dtype):
    """Their sums would wrap; the message names the leaf and the way out."""
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    grads = [{"layer": [np.ones(2, narrow)]}] * 2
    ranks = PerRank(make_mesh(2))
    with pytest.raises(TypeError, match=rf"leaf \['layer'\]\[0\] has dtype {dtype}.*"):
        ranks.run(lambda g: jaxzero.shard_grads(g, "data"), grads)


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [
        ("int8", (120, 100), 220),
        ("uint8", (255, 255), 510),
        ("bool", (True, True), 2),
        ("float8_e4m3fn", (448.0, 448.0), 896),
    ],
)
def test_narrow_leaves_are_widened_on_request(make_mesh, dtype, values, total):
    """With a `comm_dtype` they become it, and their shards too."""
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    grads = [np.full(2, v).astype(narrow) for v in values]
    policy = Policy(op="sum", comm_dtype="float32")
    for shard in PerRank(make_mesh(2)).run(
        lambda g: jaxzero.shard_grads(g, "data", policy=policy), grads
    ):
        assert shard.dtype == np.float32
        np.testing.assert_array_equal(shard, [total])


@pytest.mark.parametrize("comm_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("cut", [None, "whole", 1, "flat"])
def test_complex_leaves_are_pairs_of_reals(make_mesh, comm_dtype, cut):
    """On the wire, in the mean, and when they are gathered again."""
    parts = [oracle.integers({"re": (4, 3), "im": (4, 3)}, r) for r in range(4)]
    grads = [(p["re"] + 1j * p["im"]).astype(np.complex64) for p in parts]
    policy = Policy(comm_dtype=comm_dtype)
    like = jax.ShapeDtypeStruct((4, 3), "complex64")

    def step(g):
        shard = jaxzero.shard_grads(g, "data", policy=policy, cuts=cut)
        return shard, jaxzero.gather_params(
            shard, like, "data", policy=policy, cuts=cut
        )

    full = oracle.reduce(grads)
    for rank, (shard, back) in enumerate(PerRank(make_mesh(4)).run(step, grads)):
        assert shard.dtype == np.complex64
        oracle.assert_same(shard, oracle.shard(full, 4, rank, cut))
        oracle.assert_same(back, full)
