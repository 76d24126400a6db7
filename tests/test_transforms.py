"""shard_grads and gather_params under JAX's transformations."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

RANKS = 4
SHAPES = {"even": (8, 3), "ragged": (7,), "scalar": (), "cut": (3, 5), "kept": (6,)}
CUTS = {"even": None, "ragged": None, "scalar": None, "cut": 1, "kept": "whole"}
TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])


def trees(seed: int = 0, ranks: int = RANKS) -> list[Any]:
    return [
        oracle.integers(SHAPES, 10 * seed + rank, dtype=np.float32)
        for rank in range(ranks)
    ]


def dot(a: Any, b: Any) -> jax.Array:
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
    return sum(jax.tree.leaves(products), start=jnp.float32(0))


@TYPED
def test_the_two_functions_are_each_others_transpose(make_mesh, check_vma) -> None:
    """Over all ranks, <shard(x), y> equals <x, gather(y)> for cut leaves."""
    names = [name for name in SHAPES if name != "kept"]
    x = [{k: tree[k] for k in names} for tree in trees(1)]
    cuts = {k: CUTS[k] for k in names}
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), x[0])
    y = [
        oracle.shard(oracle.stored(trees(2)[0] | {}, "float32"), RANKS, r, CUTS)
        for r in range(RANKS)
    ]
    y = [{k: tree[k] for k in names} for tree in y]

    def both(x: Any, y: Any) -> Any:
        down = jaxzero.shard_grads(x, "data", policy=Policy(op="sum"), cuts=cuts)
        up = jaxzero.gather_params(y, like, "data", cuts=cuts)
        return dot(down, y), dot(x, up)

    found = PerRank(make_mesh(RANKS), check_vma=check_vma).run(both, x, y)
    left, right = (sum(float(pair[i]) for pair in found) for i in range(2))
    assert left == right != 0


@TYPED
def test_gradient_through_shard_grads_gathers(make_mesh, check_vma) -> None:
    x, weights = trees(3), trees(4)
    shard_weights = [oracle.shard(weights[0], RANKS, r, CUTS) for r in range(RANKS)]

    def loss_grad(x: Any, w: Any) -> Any:
        def loss(x: Any) -> jax.Array:
            shards = jaxzero.shard_grads(x, "data", cuts=CUTS)
            shards.pop("kept")
            return dot(shards, {k: w[k] for k in shards})

        return jax.grad(loss)(x)

    run = PerRank(make_mesh(RANKS), check_vma=check_vma).run
    expected = {k: v / RANKS for k, v in weights[0].items()}
    expected["kept"] = np.zeros(6)
    for tree in run(loss_grad, x, jax.tree.map(np.float32, shard_weights)):
        oracle.assert_same(tree, expected)


@TYPED
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "checkpoint"])
def test_gradient_through_gather_params_is_summed(make_mesh, check_vma, remat) -> None:
    """Whole leaves too; equal to the gradient of the unsharded loss."""
    params = jax.tree.map(np.float32, trees(5)[0])
    like = jax.eval_shape(lambda: params)
    data = trees(6)
    mesh = make_mesh(RANKS)
    shards = jaxzero.shard_params(params, mesh, "data", cuts=CUTS)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shards)

    def loss(full: Any, x: Any) -> jax.Array:
        return dot(jax.tree.map(lambda p, g: p * p * g, full, x), x)

    def sharded_loss(shards: Any, x: Any) -> jax.Array:
        return loss(jaxzero.gather_params(shards, like, "data", cuts=CUTS), x)

    function = jax.checkpoint(sharded_loss) if remat else sharded_loss

    def step(shards: Any, stacked: Any) -> Any:
        return jax.grad(function)(shards, jax.tree.map(lambda v: v[0], stacked))

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=specs,
        check_vma=check_vma,
    )
    grads = jax.jit(mapped)(shards, PerRank(mesh).place(data))
    expected = oracle.reduce(
        [{k: 2.0 * params[k] * x[k] ** 2 for k in x} for x in data], "sum"
    )
    oracle.assert_same(
        jaxzero.unshard_params(grads, like, cuts=CUTS),
        jax.tree.map(np.float32, expected),
    )


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "unrolled"])
def test_accumulating_in_a_loop(make_mesh, loop) -> None:
    """The accumulator keeps its type, so it is a valid carry."""
    steps = 5
    per_step = [trees(10 + i) for i in range(steps)]
    stacked = [
        jax.tree.map(lambda *v: np.stack(v), *(per_step[i][r] for i in range(steps)))
        for r in range(RANKS)
    ]

    def add(total: Any, grads: Any) -> Any:
        return jaxzero.shard_grads(
            grads, "data", into=total, policy=Policy(op="sum"), cuts=CUTS
        )

    def run(grads: Any) -> Any:
        zero = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)
        total = jaxzero.shard_grads(zero, "data", cuts=CUTS)
        if loop == "scan":
            total, _ = lax.scan(lambda t, g: (add(t, g), None), total, grads)
        elif loop == "fori_loop":

            def body(i: Any, t: Any) -> Any:
                return add(t, jax.tree.map(lambda g: g[i], grads))

            total = lax.fori_loop(0, steps, body, total)
        else:
            for i in range(steps):
                total = add(total, jax.tree.map(lambda g, i=i: g[i], grads))
        total["kept"] = lax.pcast(total["kept"], "data", to="varying")
        return total

    full = oracle.reduce([g for step in per_step for g in step], "sum")
    for rank, tree in enumerate(PerRank(make_mesh(RANKS)).run(run, stacked)):
        oracle.assert_same(
            tree, jax.tree.map(np.float32, oracle.shard(full, RANKS, rank, CUTS))
        )


@TYPED
def test_vmap_reduces_each_element(make_mesh, check_vma) -> None:
    data = [np.float32(np.arange(24).reshape(3, 8) + rank) for rank in range(RANKS)]
    run = PerRank(make_mesh(RANKS), check_vma=check_vma).run
    found = run(jax.vmap(lambda t: jaxzero.shard_grads(t, "data")), data)
    full = oracle.reduce(data)
    for rank, tree in enumerate(found):
        for i in range(3):
            oracle.assert_same(tree[i], np.float32(oracle.shard(full[i], RANKS, rank)))


def test_export_needs_only_the_documented_names(mesh8) -> None:
    def reduce(stacked: Any) -> Any:
        return jaxzero.shard_grads(stacked[0], "data")

    mapped = jax.shard_map(reduce, mesh=mesh8, in_specs=P("data"), out_specs=P("data"))
    sharding = NamedSharding(mesh8, P("data"))
    data = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    argument = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    with pytest.raises(ValueError, match="jaxzero_"):
        export.export(jax.jit(mapped))(argument)
    checks = [
        export.DisabledSafetyCheck.custom_call(name) for name in jaxzero.CUSTOM_CALLS
    ]
    exported = export.export(jax.jit(mapped), disabled_checks=checks)(argument)
    again = export.deserialize(exported.serialize())
    found = jax.jit(again.call)(jax.device_put(data, sharding))
    oracle.assert_same(found, np.float32(data.mean(axis=0)))


def test_a_shard_is_no_replicated_result(mesh8) -> None:
    mapped = jax.shard_map(
        lambda g: jaxzero.shard_grads(g[0], "data"),
        mesh=mesh8,
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(mapped, np.ones((8, 16), np.float32))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")], ids="-".join)
@pytest.mark.parametrize("reverse", [False, True], ids=["in_order", "reversed"])
def test_ranks_follow_the_users_order_of_axes(make_mesh, names, reverse) -> None:
    """Also over devices that are in another order than their numbers."""
    order = list(range(6))[::-1] if reverse else list(range(6))
    mesh = make_mesh((2, 3), ("a", "b"), order=order)
    data = [np.float32(np.arange(13) * (rank + 1)) for rank in range(6)]

    def reduce(leaf: Any) -> Any:
        return jaxzero.shard_grads(leaf, names, policy=Policy(op="sum"))

    full = oracle.reduce(data, "sum")
    for rank, shard in enumerate(PerRank(mesh, names).run(reduce, data)):
        oracle.assert_same(shard, np.float32(oracle.shard(full, 6, rank)))


@pytest.mark.parametrize("ranks", [1, 3, 5, 6])
def test_axes_of_size_one_and_odd_sizes(make_mesh, ranks) -> None:
    mesh = make_mesh((ranks, 1), ("data", "one"))
    data = trees(7, ranks)
    run = PerRank(mesh).run

    # A whole leaf is typed as equal on all ranks, and these come back one per rank.
    names = [name for name in SHAPES if name != "kept"]
    data = [{k: tree[k] for k in names} for tree in data]
    cuts = {k: CUTS[k] for k in names}

    def reduce_some(tree: Any) -> Any:
        return jaxzero.shard_grads(
            tree, ("data", "one"), policy=Policy(op="sum"), cuts=cuts
        )

    full = oracle.reduce(data, "sum")
    for rank, tree in enumerate(run(reduce_some, data)):
        oracle.assert_same(
            tree, jax.tree.map(np.float32, oracle.shard(full, ranks, rank, cuts))
        )


def test_a_leaf_equal_along_one_axis_is_summed_along_the_other(make_mesh) -> None:
    mesh = make_mesh((2, 3), ("a", "b"))
    data = np.float32(np.arange(3 * 12).reshape(3, 12))

    def reduce(leaf: Any) -> Any:
        return jaxzero.shard_grads(leaf[0], ("a", "b"), policy=Policy(op="sum"))

    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P("b"), out_specs=P(("a", "b")))
    placed = jax.device_put(data, NamedSharding(mesh, P("b")))
    oracle.assert_same(jax.jit(mapped)(placed), data.sum(axis=0))


@pytest.mark.multiprocess
def test_an_exported_program_runs_in_a_fresh_process(tmp_path) -> None:
    """Which traces nothing of ours, so that it has to register the calls."""
    start = (
        "import os, sys\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "os.environ['JAX_PLATFORMS'] = 'cpu'\n"
        "import jax, jaxzero, numpy as np\n"
        "from jax import export\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "mesh = jax.make_mesh((2,), ('data',))\n"
        "sharding = NamedSharding(mesh, P('data'))\n"
    )
    write = (
        "step = jax.shard_map(lambda x: jaxzero.shard_grads(x[0], 'data'), mesh=mesh,\n"
        "    in_specs=P('data'), out_specs=P('data'))\n"
        "checks = [export.DisabledSafetyCheck.custom_call(n)\n"
        "    for n in jaxzero.CUSTOM_CALLS]\n"
        "like = jax.ShapeDtypeStruct((2, 5), 'float32', sharding=sharding)\n"
        "saved = export.export(jax.jit(step), disabled_checks=checks)(like)\n"
        "open(sys.argv[1], 'wb').write(saved.serialize())\n"
    )
    read = (
        "jaxzero.register()\n"
        "saved = export.deserialize(open(sys.argv[1], 'rb').read())\n"
        "data = np.arange(10, dtype=np.float32).reshape(2, 5)\n"
        "print(*np.asarray(jax.jit(saved.call)(jax.device_put(data, sharding))))\n"
    )
    for program in (write, read):
        finished = subprocess.run(
            [sys.executable, "-c", start + program, str(tmp_path / "program")],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["2.5", "3.5", "4.5", "5.5", "6.5", "0.0"]
