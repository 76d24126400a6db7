"""`shard_grads` between processes, against NumPy in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from multihost.spmd import Spmd, assert_alike, digest, everyones

import jaxzero
from jaxzero import Policy

SHAPES = {
    "empty": (0, 4),
    "even": (24, 3),
    "odd": (5,),
    "scalar": (),
    "table": (31, 7),
}


def grads(ranks: int, dtype: str = "float32", seed: int = 0) -> list[Any]:
    """Whole numbers, whose sums every dtype holds exactly."""
    return [
        oracle.integers(SHAPES, rank + 1000 * seed, dtype=dtype, limit=4)
        for rank in range(ranks)
    ]


def noise(ranks: int, dtype: str = "float32") -> list[Any]:
    """Numbers of magnitude about 1 that no dtype holds exactly."""
    return [
        {
            name: np.asarray(
                np.random.default_rng([rank, i]).uniform(-1, 1, shape)
            ).astype(dtype)
            for i, (name, shape) in enumerate(SHAPES.items())
        }
        for rank in range(ranks)
    ]


def assert_shards(
    found: dict[int, Any], full: Any, ranks: int, cuts: Any = None
) -> None:
    assert found
    for rank, tree in found.items():
        oracle.assert_same(tree, oracle.shard(full, ranks, rank, cuts))


POLICIES = {
    "defaults": Policy(op="sum"),
    "bfloat16-wire": Policy(op="sum", comm_dtype="bfloat16"),
    "float16-wire": Policy(op="sum", comm_dtype="float16"),
    "float32-reduction": Policy(
        op="sum", comm_dtype="bfloat16", reduction="float32", shard_dtype="float32"
    ),
    "divide-by": Policy(divide_by=0.25),
    "tiny-buckets": Policy(op="sum", bucket_bytes=64),
    "all-direct": Policy(op="sum", direct_bytes=0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_sums_of_whole_numbers_are_exact(spmd: Spmd, name: str) -> None:
    policy = POLICIES[name]
    data = grads(spmd.ranks)
    found = spmd.run(lambda g: jaxzero.shard_grads(g, "data", policy=policy), data)
    full = oracle.reduce(data, policy.op, policy.divide_by)
    assert_shards(found, full, spmd.ranks)


@pytest.mark.parametrize(
    ("leaf", "wire", "reduction"),
    [
        ("float32", None, "native"),
        ("float32", "bfloat16", "native"),
        ("bfloat16", None, "float32"),
        ("bfloat16", "float32", "native"),
    ],
    ids=lambda value: str(value),
)
def test_means_are_right_to_rounding(
    spmd: Spmd, leaf: str, wire: str | None, reduction: Any
) -> None:
    data = noise(spmd.ranks, leaf)
    policy = Policy(comm_dtype=wire, reduction=reduction, shard_dtype="float32")
    found = spmd.run(lambda g: jaxzero.shard_grads(g, "data", policy=policy), data)
    full = oracle.reduce(data)
    for rank, tree in found.items():
        oracle.assert_close(
            tree, oracle.shard(full, spmd.ranks, rank), spmd.ranks, leaf, wire or leaf
        )


def test_microbatches_accumulate_in_the_dtype_of_into(spmd: Spmd) -> None:
    first = grads(spmd.ranks, "bfloat16", seed=1)
    second = grads(spmd.ranks, "bfloat16", seed=2)
    policy = Policy(op="sum", shard_dtype="float32")

    def both(a: Any, b: Any) -> Any:
        total = jaxzero.shard_grads(a, "data", policy=policy)
        return jaxzero.shard_grads(b, "data", policy=policy, into=total)

    found = spmd.run(both, first, second)
    full = oracle.reduce(second, "sum", into=oracle.reduce(first, "sum"))
    assert_shards(found, full, spmd.ranks)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}


def test_every_layout_is_cut_as_told(spmd: Spmd) -> None:
    cuts = {"empty": None, "even": 1, "odd": "whole", "scalar": None, "table": "flat"}
    data = grads(spmd.ranks)
    policy = Policy(op="sum")
    found = spmd.run(
        lambda g: jaxzero.shard_grads(g, "data", policy=policy, cuts=cuts), data
    )
    assert_shards(found, oracle.reduce(data, "sum"), spmd.ranks, cuts)


def test_statistics_are_those_of_the_whole_tree_on_every_rank(spmd: Spmd) -> None:
    data = grads(spmd.ranks)
    cuts = {"empty": None, "even": None, "odd": "whole", "scalar": None, "table": None}

    def measure(g: Any) -> Any:
        _, stats = jaxzero.shard_grads(g, "data", cuts=cuts, with_stats=True)
        return stats

    step = spmd.jit(measure)
    norm = oracle.global_norm(oracle.reduce(data))
    measured = list(spmd.local(step(spmd.place(data))).values())
    for stats in measured:
        np.testing.assert_allclose(stats.norm, norm, rtol=1e-6)
        assert stats.all_finite
    assert_alike(float(measured[0].norm))

    data[-1]["table"][-1, -1] = np.inf
    for stats in spmd.local(step(spmd.place(data))).values():
        assert not stats.all_finite


def test_replicas_hold_the_sum_over_all_ranks(hybrid: Spmd) -> None:
    data = grads(hybrid.ranks)
    found = hybrid.run(
        lambda g: jaxzero.shard_grads(
            g, "data", replicate_axis="replica", policy=Policy(op="sum")
        ),
        data,
    )
    full = oracle.reduce(data, "sum")
    shard_ranks = hybrid.ranks // 2
    for rank, tree in found.items():
        oracle.assert_same(tree, oracle.shard(full, shard_ranks, rank % shard_ranks))


def test_an_axis_tuple_counts_ranks_in_its_own_order(hybrid: Spmd) -> None:
    data = grads(hybrid.ranks)
    found = hybrid.run(
        lambda g: jaxzero.shard_grads(g, ("data", "replica"), policy=Policy(op="sum")),
        data,
    )
    full = oracle.reduce(data, "sum")
    for rank, tree in found.items():
        replica, position = divmod(rank, hybrid.ranks // 2)
        oracle.assert_same(
            tree, oracle.shard(full, hybrid.ranks, position * 2 + replica)
        )


def test_the_gradient_of_replicated_parameters_is_not_summed_twice(
    spmd: Spmd,
) -> None:
    params = np.arange(spmd.ranks * 2.0, dtype=np.float32)
    weights = [oracle.integers((2 * spmd.ranks,), rank) for rank in range(spmd.ranks)]

    def step(w: jax.Array, p: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda q: jnp.vdot(w[0], q))(p)
        return jaxzero.shard_grads(gradient, "data")[None]

    for check_vma in (True, False):
        mapped = jax.shard_map(
            step,
            mesh=spmd.mesh,
            in_specs=(spmd.spec, PartitionSpec()),
            out_specs=spmd.spec,
            check_vma=check_vma,
        )
        found = spmd.local(jax.jit(mapped)(spmd.place(weights), params))
        # The sum is exact, so the one division is the only rounding.
        mean = oracle.stored(oracle.reduce(weights), "float32")
        assert_shards(found, mean, spmd.ranks)


def test_all_processes_make_the_same_plan_and_program(spmd: Spmd) -> None:
    if jax.process_count() > 1:
        seeds = everyones(digest(hash("a leaf")))
        assert len(set(seeds)) == len(seeds), "the test needs different hash seeds"
    # The order of a set is that of the hashes, so it differs between processes.
    names = {f"layer{i}" for i in range(40)}
    data = [
        {name: np.ones((3 + int(name[5:]),), np.float32) for name in names}
        for _ in range(spmd.ranks)
    ]
    plan = jaxzero.make_plan(data[0], spmd.ranks, Policy(bucket_bytes=256))
    assert_alike(plan.fingerprint)
    step = spmd.jit(
        lambda g: jaxzero.shard_grads(g, "data", policy=Policy(bucket_bytes=256))
    )
    assert_alike(step.lower(spmd.place(data)).as_text())


def test_trees_with_other_leaves_have_another_fingerprint(spmd: Spmd) -> None:
    """Ranks that use different experts can be told apart before they hang.

    Zeros for the unused ones make the trees, and so the programs, equal.
    """
    mine = jax.process_index() % 2
    leaf = np.full((4,), 2.0, np.float32)
    sparse = {"e0": leaf if mine == 0 else None, "e1": leaf if mine == 1 else None}
    fingerprints = everyones(digest(jaxzero.make_plan(sparse, spmd.ranks).fingerprint))
    assert len(set(fingerprints)) == min(2, jax.process_count())

    owner = [rank % 2 for rank in range(spmd.ranks)]
    filled = [
        {f"e{e}": leaf if owner[rank] == e else 0 * leaf for e in range(2)}
        for rank in range(spmd.ranks)
    ]
    policy = Policy(op="sum")
    found = spmd.run(lambda g: jaxzero.shard_grads(g, "data", policy=policy), filled)
    assert_shards(found, oracle.reduce(filled, "sum"), spmd.ranks)


def test_compiling_waits_for_no_other_process(spmd: Spmd) -> None:
    """A rank that alone meets a new shape must not hang while it compiles."""
    if jax.default_backend() != "cpu":
        pytest.skip("XLA:GPU shares autotuning results between processes")
    if jax.process_index() == 0:
        shape = (spmd.ranks, 16, 33)
        step = spmd.jit(lambda g: jaxzero.shard_grads(g, "data"))
        step.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()


def test_a_result_unused_on_one_process_is_still_reduced(spmd: Spmd) -> None:
    data = [
        {"a": np.full((8,), rank, np.float32), "b": np.ones((8,), np.float32)}
        for rank in range(spmd.ranks)
    ]
    both = jax.process_index() % 2 == 1

    def step(g: Any) -> Any:
        shards = jaxzero.shard_grads(g, "data")
        return shards if both else {"a": shards["a"]}

    full = oracle.reduce(data)
    found = spmd.run(step, data)
    assert_shards(found, full if both else {"a": full["a"]}, spmd.ranks)


def _two_calls(g: Any) -> Any:
    first = jaxzero.shard_grads({"w": g["even"]}, "data", policy=Policy(op="sum"))
    second = jaxzero.shard_grads({"w": g["table"]}, "data", policy=Policy(op="sum"))
    return {"even": first["w"], "table": second["w"]}


def _with_other_collectives(g: Any) -> Any:
    before = lax.psum(g["scalar"], "data")
    shards = jaxzero.shard_grads(g, "data", policy=Policy(op="sum"))
    after = lax.all_gather(g["odd"], "data")
    return {**shards, "before": before, "after": after}


@pytest.mark.parametrize("step", [_two_calls, _with_other_collectives])
def test_independent_collectives_in_one_program_do_not_hang(
    spmd: Spmd, step: Callable[[Any], Any]
) -> None:
    data = grads(spmd.ranks)
    full = oracle.reduce(data, "sum")
    jitted = spmd.jit(step, check_vma=False)
    placed = spmd.place(data)
    for _ in range(20):
        results = jitted(placed)
    for rank, tree in spmd.local(results).items():
        for name in tree.keys() & full.keys():
            oracle.assert_same(
                tree[name], oracle.shard_leaf(full[name], spmd.ranks, rank)
            )
        if "after" in tree:
            np.testing.assert_array_equal(tree["before"], full["scalar"])
            np.testing.assert_array_equal(
                tree["after"], np.stack([one["odd"] for one in data])
            )


def test_groups_of_one_axis_and_of_both_take_turns(hybrid: Spmd) -> None:
    data = grads(hybrid.ranks)
    policy = Policy(op="sum")

    def step(g: Any) -> Any:
        over_one = jaxzero.shard_grads(g["even"], "data", policy=policy)
        over_both = jaxzero.shard_grads(g["even"], ("replica", "data"), policy=policy)
        again = jaxzero.shard_grads(g["table"], "data", policy=policy)
        return over_one, over_both, again

    jitted = hybrid.jit(step)
    placed = hybrid.place(data)
    for _ in range(20):
        results = jitted(placed)
    half = hybrid.ranks // 2
    for rank, (over_one, over_both, again) in hybrid.local(results).items():
        replica, position = divmod(rank, half)
        group = oracle.reduce(data[replica * half : (replica + 1) * half], "sum")
        everyone = oracle.reduce(data, "sum")
        oracle.assert_same(over_one, oracle.shard_leaf(group["even"], half, position))
        oracle.assert_same(
            over_both, oracle.shard_leaf(everyone["even"], hybrid.ranks, rank)
        )
        oracle.assert_same(again, oracle.shard_leaf(group["table"], half, position))
