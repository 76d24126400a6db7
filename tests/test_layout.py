"""One layout, given to every function, in place of the same options each time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import Layout, Policy, make_layout

PARAMS = {
    "w": np.arange(64, dtype=np.float32).reshape(16, 4) / 8,
    "odd": np.arange(7, dtype=np.float32) - 3,
    "norm": np.ones(24, np.float32),
    "bias": np.full(2, 0.5, np.float32),
}
LIKE = jax.eval_shape(lambda: PARAMS)


def cuts(path: str, shape: tuple[int, ...]) -> str | None:
    return "whole" if "norm" in path else None


def layout_of(mesh: Any, **options: Any) -> Layout:
    return make_layout(LIKE, "data", mesh=mesh, cuts=cuts, min_shard_numel=4, **options)


def test_layout_says_how_each_leaf_is_spread(mesh8):
    layout = layout_of(mesh8)
    shards = {leaf.path: leaf.shard_shape for leaf in layout.leaves}
    assert shards == {
        "['bias']": (2,),
        "['norm']": (24,),
        "['odd']": (1,),
        "['w']": (2, 4),
    }
    assert [leaf.names for leaf in layout.leaves] == [(), (), ("data",), ("data",)]
    assert layout.specs["w"] == P("data")
    assert layout.specs["norm"] == P()


@pytest.mark.parametrize("typed", [True, False])
def test_functions_that_are_given_a_layout_agree(mesh8, typed):
    """True leaves to shards, to a mean of gradients, its norm, and back."""
    layout = layout_of(mesh8)
    clip = jaxzero.clip_by_global_norm(1.0, layout)

    def run(shards):
        full = jaxzero.gather_params(shards, layout)
        rank = jax.lax.axis_index("data").astype(jnp.float32)
        grads = jax.tree.map(lambda leaf: leaf * rank, full)
        mean, stats = jaxzero.shard_grads(grads, layout, into=shards, with_stats=True)
        norm = jaxzero.global_norm(mean, layout)
        return mean, stats.norm, norm, clip.update(mean, ())[0]

    mapped = jax.shard_map(
        run,
        mesh=mesh8,
        in_specs=(layout.specs,),
        out_specs=(layout.specs, P(), P(), layout.specs),
        check_vma=typed,
    )
    shards = jaxzero.shard_params(PARAMS, mesh8, layout)
    mean, measured, norm, clipped = jax.jit(mapped)(shards)
    expected = {path: leaf * 4.5 for path, leaf in PARAMS.items()}
    length = np.sqrt(
        sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in expected.values())
    )
    found = jaxzero.unshard_params(mean, layout)
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf)
        small = jaxzero.unshard_params(clipped, layout)[path]
        np.testing.assert_allclose(small, leaf / length, rtol=1e-5)
    np.testing.assert_allclose([measured, norm], length, rtol=1e-6)


def test_layout_holds_replicas(make_mesh):
    mesh = make_mesh((4, 2), ("data", "replica"))
    layout = layout_of(mesh, replicate_axis="replica")
    assert (layout.group_size, layout.replicas) == (4, 2)

    def run(leaf):
        rank = jax.lax.axis_index(("data", "replica")).astype(jnp.float32)
        grads = jax.tree.map(lambda leaf: leaf * rank, leaf)
        return jaxzero.shard_grads(grads, layout)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=layout.specs)
    found = jaxzero.unshard_params(jax.jit(mapped)(PARAMS), layout)
    for path, leaf in PARAMS.items():
        np.testing.assert_array_equal(found[path], leaf * 3.5)


def test_layout_in_a_shard_map_takes_its_mesh(mesh8):
    def run(leaf):
        layout = make_layout(leaf, "data", cuts="flat")
        assert layout.group_size == 8
        return jaxzero.shard_grads(leaf, layout, policy=Policy(op="sum"))

    mapped = jax.shard_map(
        run, mesh=mesh8, in_specs=P(), out_specs=P("data"), check_vma=False
    )
    np.testing.assert_array_equal(mapped(np.ones(16, np.float32)), np.full(16, 8.0))


def test_plan_and_estimate_of_a_layout_are_those_of_its_options():
    layout = make_layout(
        LIKE, "data", mesh={"data": 8, "r": 2}, replicate_axis="r", cuts=cuts
    )
    plan = jaxzero.make_plan(layout)
    assert (plan.group_size, plan.replicas, plan.divisor) == (8, 2, 16.0)
    assert plan.leaves == jaxzero.make_plan(LIKE, 8, cuts=cuts).leaves
    assert jaxzero.estimate_memory(layout) == jaxzero.estimate_memory(
        LIKE, 8, replicas=2, cuts=cuts
    )


def test_zero3_trains_in_a_layout(mesh8):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["norm"])

    batch = np.eye(16, dtype=np.float32)
    found = []
    for given in (layout_of(mesh8), "data"):
        zero = jaxzero.zero3(loss_fn, optax.sgd(0.5), mesh8, given)
        state, metrics = zero.step(zero.init(PARAMS), batch)
        found.append((zero.export_state(state)["params"], metrics.loss))
    assert state.layout != layout_of(mesh8)
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.ones((16, 5), np.float32)}, r"\(16, 5\); expected \(16, 4\)"),
        ({"more": np.ones(8, np.float32)}, r"has a leaf \['more'\], which the layout"),
    ],
)
def test_tree_that_is_not_of_the_layout_is_refused(mesh8, change, message):
    with pytest.raises(ValueError, match=message):
        jaxzero.shard_params(PARAMS | change, mesh8, layout_of(mesh8))


def test_layout_of_another_mesh_is_refused(mesh8, make_mesh):
    with pytest.raises(ValueError, match="for 4 ranks and 1 replicas; the mesh has 8"):
        jaxzero.shard_params(PARAMS, mesh8, layout_of({"data": 4}))
    with pytest.raises(ValueError, match="the layout has the axis 'data', which"):
        jaxzero.shard_params(PARAMS, make_mesh((8,), ("x",)), layout_of(mesh8))


def test_options_beside_a_layout_are_refused(mesh8):
    layout = layout_of(mesh8)
    with pytest.raises(ValueError, match=r"cuts='flat' stands beside a layout"):
        jaxzero.shard_params(PARAMS, mesh8, layout, cuts="flat")
    with pytest.raises(ValueError, match=r"group_size=8 stands beside a layout"):
        jaxzero.make_plan(layout, 8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis_name": "model"}, ValueError, "axis 'model' is not in the mesh"),
        ({"mesh": None}, ValueError, r"expected one of its axes \(none\)"),
        ({"min_shard_numel": -1}, ValueError, "expected at least 0"),
        ({"min_shard_numel": 1.5}, TypeError, "expected a whole number of elements"),
        ({"replicate_axis": "data"}, ValueError, "named twice"),
    ],
)
def test_layout_that_cannot_be_made_says_why(options, error, message):
    given = {"axis_name": "data", "mesh": {"data": 2}} | options
    with pytest.raises(error, match=message):
        make_layout(LIKE, given.pop("axis_name"), **given)


def test_stacked_layers_are_for_zero3_alone(mesh8):
    layout = make_layout({"w": LIKE["w"]}, "data", mesh=mesh8, stacked="w")
    with pytest.raises(NotImplementedError, match="stacks 16 layers"):
        jaxzero.shard_params({"w": PARAMS["w"]}, mesh8, layout)
