"""shard_grads: what it takes, what it leaves alone, and when it is traced."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])


class Layer(NamedTuple):
    w: Any
    b: Any


def test_trees_of_any_containers_keep_them(make_mesh):
    shapes = {"layers": [Layer((4, 3), (3,)), Layer((3, 3), None)], "last": ((), (5,))}
    grads = [
        jax.tree.map(
            lambda shape, r=r: oracle.integers(shape, r),
            shapes,
            is_leaf=lambda x: type(x) is tuple and all(isinstance(n, int) for n in x),
        )
        for r in range(4)
    ]
    full = oracle.reduce(grads)
    found = PerRank(make_mesh(4)).run(lambda g: jaxzero.shard_grads(g, "data"), grads)
    for rank, tree in enumerate(found):
        assert isinstance(tree["layers"][0], Layer)
        oracle.assert_same(tree, oracle.shard(full, 4, rank))


@TYPED
def test_leaves_without_a_gradient_pass_through(make_mesh, check_vma):
    optax = pytest.importorskip("optax")
    zero = np.zeros(3, jax.dtypes.float0)

    def step(g: Any) -> Any:
        tree = {"w": g, "none": None, "int": zero, "masked": optax.MaskedNode()}
        shards = jaxzero.shard_grads(tree, "data")
        again = jaxzero.shard_grads(tree, "data", into=shards, with_stats=True)[0]
        for result in (shards, again):
            assert result["none"] is None
            assert result["int"] is zero
            assert result["masked"] == optax.MaskedNode()
        return again["w"]

    ranks = PerRank(make_mesh(2), check_vma=check_vma)
    for shard in ranks.run(step, [np.ones(4, np.float32)] * 2):
        np.testing.assert_array_equal(shard, [2, 2])


@TYPED
def test_constants_are_leaves_that_all_ranks_hold(make_mesh, check_vma):
    """NumPy arrays and Python numbers; typed, they count as already summed."""

    def step(g: Any) -> Any:
        tree = {"g": g, "array": np.full(2, 4.0, np.float32), "number": 6.0}
        return jaxzero.shard_grads(tree, "data")

    ranks = PerRank(make_mesh(2), check_vma=check_vma)
    found = ranks.run(step, [np.ones(2, np.float32)] * 2)
    scale = 0.5 if check_vma else 1.0
    for rank, shards in enumerate(found):
        number = 6 * scale if rank == 0 else 0
        expected = {"g": 1, "array": 4 * scale, "number": number}
        oracle.assert_same(
            shards, {name: np.float32([value]) for name, value in expected.items()}
        )


def test_weakly_typed_leaves_give_strongly_typed_shards(make_mesh):
    weak = []

    def step(x: Any) -> Any:
        shard = jaxzero.shard_grads(2.0 * jax.lax.axis_index("data") + 1.0, "data")
        weak.append(jax.typeof(shard).weak_type)
        return shard

    with jax.numpy_dtype_promotion("standard"):
        found = PerRank(make_mesh(2)).run(step, [np.ones(1, np.float32)] * 2)
    assert weak == [False]
    assert [s.tolist() for s in found] == [[2.0], [0.0]]


@TYPED
def test_one_operation_at_a_time_gives_the_same(make_mesh, check_vma):
    """Without `jit`."""
    grads = [oracle.integers((5,), r) for r in range(4)]
    ranks = PerRank(make_mesh(4), check_vma=check_vma)
    jitted = ranks.run(lambda g: jaxzero.shard_grads(g, "data"), grads)
    mapped = jax.shard_map(
        lambda g: jaxzero.shard_grads(g[0], "data"),
        mesh=ranks.mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    eager = mapped(ranks.place(grads))
    oracle.assert_same(eager, np.concatenate(jitted))


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("bucket_bytes", [32, None])
def test_only_donated_accumulators_are_overwritten(make_mesh, donate, bucket_bytes):
    mesh = make_mesh(4)
    grads = np.ones((4, 64), np.float32)
    policy = Policy(bucket_bytes=bucket_bytes)

    def step(g: Any, acc: Any) -> Any:
        return jaxzero.shard_grads(g[0], "data", into=acc, policy=policy)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    jitted = jax.jit(mapped, donate_argnums=1 if donate else ())
    spread = NamedSharding(mesh, P("data"))
    grads = jax.device_put(grads, spread)
    # Computed, because JAX may lend NumPy's memory, which cannot be donated.
    first = jax.jit(lambda x: x + 1)(jax.device_put(np.full(64, np.float32(6)), spread))
    where = first.addressable_shards[0].data.unsafe_buffer_pointer()
    result = jitted(grads, first)
    np.testing.assert_array_equal(result, np.full(64, 8.0))
    assert first.is_deleted() == donate
    if donate:
        assert result.addressable_shards[0].data.unsafe_buffer_pointer() == where
    else:
        np.testing.assert_array_equal(first, np.full(64, 7.0))
    assert not grads.is_deleted()
    np.testing.assert_array_equal(grads, np.ones((4, 64)))


def test_callable_cuts_see_path_and_shape(make_mesh):
    seen = []

    def cuts(path: str, shape: tuple[int, ...]) -> Any:
        seen.append((path, shape))
        return {0: "whole", 1: "flat", 2: 1}[len(shape)]

    grads = [oracle.integers({"a": (4, 3), "b": [(4,), ()]}, r) for r in range(2)]
    found = PerRank(make_mesh(2)).run(
        lambda g: jaxzero.shard_grads(g, "data", cuts=cuts), grads
    )
    assert seen == [("['a']", (4, 3)), ("['b'][0]", (4,)), ("['b'][1]", ())]
    full = oracle.reduce(grads)
    for rank, tree in enumerate(found):
        expected = oracle.shard(full, 2, rank, {"a": 1, "b": ["flat", "whole"]})
        oracle.assert_same(tree, expected)


@TYPED
@pytest.mark.parametrize("cut", [None, "whole"])
def test_other_axes_of_the_mesh_are_left_alone(make_mesh, check_vma, cut):
    """Leaves that vary over a third axis, beside some that do not."""
    mesh = make_mesh((2, 2, 2), ("data", "replica", "model"))
    ranks = PerRank(mesh, ("model", "data", "replica"), check_vma=check_vma)
    grads = [oracle.integers({"a": (5,), "b": (4, 3)}, r) for r in range(8)]
    same = np.arange(3, dtype=np.float32)

    def step(g: Any) -> Any:
        position = jax.lax.axis_index("data") + jax.lax.axis_index("replica")
        tree = g | {"same": same * position.astype(jnp.float32)}
        return jaxzero.shard_grads(
            tree, "data", replicate_axis="replica", cuts=cut, policy=Policy(op="sum")
        )

    for index, tree in enumerate(ranks.run(step, grads)):
        group = grads[4 * (index // 4) : 4 * (index // 4) + 4]
        full = oracle.reduce(group, "sum") | {"same": 4.0 * same}
        oracle.assert_same(tree, oracle.shard(full, 2, index // 2 % 2, cut))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_nested_shard_maps_may_bind_the_axes_in_turn(make_mesh, kind):
    """The way out of a partly manual shard_map, with data."""
    mesh = make_mesh((4, 2), ("data", "model"), kind)
    grads = np.stack([oracle.integers((4, 6), r) for r in range(4)])

    def outer(stacked: Any) -> Any:
        inner = jax.shard_map(
            lambda g: jaxzero.shard_grads(g[0], "data"),
            in_specs=P(None, None, "model"),
            out_specs=P(None, "model"),
            axis_names={"model"},
        )
        return inner(stacked)

    mapped = jax.shard_map(
        outer, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(grads, NamedSharding(mesh, P("data", None, "model")))
        result = jax.jit(mapped)(placed)
    oracle.assert_same(result, oracle.reduce(list(grads)))


def test_padding_does_not_trip_the_nan_check(make_mesh):
    """Nothing that XLA hands over uninitialised reaches a result."""
    grads = [oracle.integers({"a": (5,), "b": (3,), "s": ()}, r) for r in range(4)]
    policy = Policy(bucket_bytes=16, op="sum")
    with jax.debug_nans(True):
        found = PerRank(make_mesh(4)).run(
            lambda g: jaxzero.shard_grads(g, "data", policy=policy), grads
        )
    full = oracle.reduce(grads, "sum")
    for rank, tree in enumerate(found):
        oracle.assert_same(tree, oracle.shard(full, 4, rank))


def test_equal_policies_share_one_program(make_mesh):
    """A policy is hashable, so it may be a static argument."""
    mesh = make_mesh(2)
    traces = []

    def reduce(stacked: Any, policy: Policy) -> Any:
        traces.append(policy)
        return jax.shard_map(
            lambda g: jaxzero.shard_grads(g[0], "data", policy=policy),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )(stacked)

    jitted = jax.jit(reduce, static_argnums=1)
    data = jax.device_put(np.ones((2, 4), np.float32), NamedSharding(mesh, P("data")))
    for comm_dtype in ("bfloat16", jnp.bfloat16, np.dtype("bfloat16")):
        jitted(data, Policy(comm_dtype=comm_dtype))
    assert len(traces) == 1
    jitted(data, Policy(comm_dtype="float16"))
    assert len(traces) == 2


@pytest.mark.parametrize("promotion", ["strict", "standard"])
@pytest.mark.parametrize("reduction", ["native", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_any_rule_of_dtype_promotion_will_do(make_mesh, promotion, reduction, dtype):
    """No value of ours is promoted by JAX's rules, replicas included."""
    grads = [oracle.integers((6,), r, dtype=dtype) for r in range(4)]
    mesh = make_mesh((2, 2), ("data", "replica"))
    with jax.numpy_dtype_promotion(promotion):
        found = PerRank(mesh).run(
            lambda g: jaxzero.shard_grads(
                g,
                "data",
                replicate_axis="replica",
                policy=Policy(reduction=reduction),
                with_stats=True,
            ),
            grads,
        )
    full = oracle.reduce(grads)
    for index, (shard, _) in enumerate(found):
        assert shard.dtype.name == dtype
        oracle.assert_same(shard, oracle.shard(full, 2, index // 2))


SMALL = {"w": (8, 3), "b": (5,), "s": (), "e": (0, 3), "asked": (4,)}
SMALL_CUTS = {"w": None, "b": None, "s": None, "e": None, "asked": "flat"}
SMALL_LAYOUT = SMALL_CUTS | {"b": "whole", "s": "whole", "e": "whole"}
"""What min_shard_numel=6 makes of the cuts: an explicit one wins."""


@TYPED
@pytest.mark.parametrize("accumulate", [False, True], ids=["anew", "into"])
@pytest.mark.parametrize("replicate_axis", [None, "replica"])
@pytest.mark.parametrize("reduction", ["native", "float32"])
def test_small_leaves_are_summed_whole_and_counted_once(
    make_mesh, check_vma, accumulate, replicate_axis, reduction
):
    sizes = (2, 2) if replicate_axis else (4, 1)
    mesh = make_mesh(sizes, ("data", "replica"))
    policy = Policy(reduction=reduction)
    grads = [oracle.integers(SMALL, r) for r in range(4)]
    start = oracle.integers(SMALL, 99)
    into = [
        oracle.shard(start, sizes[0], r // sizes[1], SMALL_LAYOUT) for r in range(4)
    ]

    layout = jaxzero.make_layout(
        grads[0],
        "data",
        mesh=mesh,
        cuts=SMALL_CUTS,
        min_shard_numel=6,
        replicate_axis=replicate_axis,
    )

    def step(g: Any, acc: Any) -> Any:
        return jaxzero.shard_grads(
            g,
            layout,
            into=acc if accumulate else None,
            policy=policy,
            with_stats=True,
        )

    full = oracle.reduce(grads, into=start if accumulate else None)
    found = PerRank(mesh, check_vma=check_vma).run(step, grads, into)
    for rank, (shards, stats) in enumerate(found):
        want = oracle.shard(full, sizes[0], rank // sizes[1], SMALL_LAYOUT)
        oracle.assert_same(shards, want)
        assert float(stats.norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)
        assert bool(stats.all_finite)


def test_small_leaves_share_the_plan_of_the_reduction():
    tree = oracle.integers(SMALL, 0)
    layout = jaxzero.make_layout(
        tree, "data", mesh={"data": 4}, cuts=SMALL_CUTS, min_shard_numel=6
    )
    plan = jaxzero.make_plan(layout)
    by_hand = jaxzero.make_plan(tree, 4, Policy(), SMALL_LAYOUT)
    assert plan.num_collectives == by_hand.num_collectives
    layouts = {leaf.path: leaf.cut.layout for leaf in plan.leaves}
    assert layouts == {leaf.path: leaf.cut.layout for leaf in by_hand.leaves}


def test_accumulators_of_another_layout_are_refused(make_mesh):
    def step(g: Any) -> Any:
        shards = jaxzero.shard_grads(g, "data")
        layout = jaxzero.make_layout(g, "data", min_shard_numel=6)
        return jaxzero.shard_grads(g, layout, into=shards)

    with pytest.raises(ValueError, match="or give the same layout to both"):
        PerRank(make_mesh(2)).run(step, [np.ones(5, np.float32)] * 2)
