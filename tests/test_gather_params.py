"""gather_params: values, dtypes, types and the gradient that comes back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

SHAPES = {
    "even": (12, 2),
    "ragged": (7,),
    "scalar": (),
    "cut": (2, 5),
    "kept": (3, 2),
    "empty": (0, 4),
}
CUTS = {
    "even": None,
    "ragged": None,
    "scalar": None,
    "cut": 1,
    "kept": "whole",
    "empty": None,
}
TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])


def params(dtype: str = "float32") -> Any:
    return oracle.integers(SHAPES, 0, dtype=dtype)


def shards(ranks: int, dtype: str = "float32") -> list[Any]:
    cuts = CUTS | ({"scalar": "whole"} if dtype == "int32" else {})
    return [oracle.shard(params(dtype), ranks, rank, cuts) for rank in range(ranks)]


def like(dtype: str = "float32") -> Any:
    return jax.eval_shape(lambda: params(dtype))


def gather(mesh: Any, tree: Any, dtype: str, check_vma: bool, policy: Policy) -> Any:
    return PerRank(mesh, check_vma=check_vma).run(
        lambda s: jaxzero.gather_params(
            s, like(dtype), "data", policy=policy, cuts=CUTS
        ),
        tree,
    )


@pytest.mark.sampled(48)
@TYPED
@pytest.mark.parametrize("ranks", [1, 2, 3, 8], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int32"])
@pytest.mark.parametrize("bucket_bytes", [1, None])
@pytest.mark.parametrize("direct_bytes", [0, 1 << 40], ids=["direct", "packed"])
def test_every_rank_gets_every_leaf(
    make_mesh, ranks, dtype, check_vma, bucket_bytes, direct_bytes
):
    policy = Policy(bucket_bytes=bucket_bytes, direct_bytes=direct_bytes)
    for found in gather(
        make_mesh(ranks), shards(ranks, dtype), dtype, check_vma, policy
    ):
        oracle.assert_same(found, params(dtype))
        assert {leaf.dtype.name for leaf in found.values()} == {dtype}


@TYPED
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("compute", [None, "float32", "bfloat16", "float16"])
def test_compute_dtype_is_that_of_the_result(make_mesh, stored, compute, check_vma):
    """None keeps the dtype of `like`, here float32; integers keep theirs."""
    trees = [
        tree | {"step": oracle.stored(np.full(1, 3), "int32")}
        for tree in shards(3, stored)
    ]
    types = like() | {"step": jax.ShapeDtypeStruct((3,), "int32")}
    policy = Policy(compute_dtype=compute)
    found = PerRank(make_mesh(3), check_vma=check_vma).run(
        lambda s: jaxzero.gather_params(
            s, types, "data", policy=policy, cuts=CUTS | {"step": None}
        ),
        trees,
    )
    for tree in found:
        step = tree.pop("step")
        assert (step.dtype, step.tolist()) == (np.int32, [3, 3, 3])
        assert {leaf.dtype.name for leaf in tree.values()} == {compute or "float32"}
        oracle.assert_same(tree, params())


def test_what_is_lost_on_the_wire_is_one_rounding(make_mesh):
    full = np.random.default_rng(0).normal(size=(7,)).astype(np.float32)
    types = jax.ShapeDtypeStruct((7,), "float32")
    policy = Policy(compute_dtype="bfloat16")
    for found in PerRank(make_mesh(2)).run(
        lambda s: jaxzero.gather_params(s, types, "data", policy=policy),
        [oracle.shard(full, 2, r) for r in range(2)],
    ):
        oracle.assert_same(found, oracle.stored(full, "bfloat16"))


def test_padding_is_never_read(make_mesh):
    """NaN in the padding of a shard reaches neither the leaf nor its gradient."""
    types = jax.ShapeDtypeStruct((5,), "float32")
    padded = [np.float32([1, 2]), np.float32([3, 4]), np.float32([5, np.nan])]

    def step(s: Any) -> Any:
        full = jaxzero.gather_params(s, types, "data")
        grad = jax.grad(
            lambda s: jnp.sum(jaxzero.gather_params(s, types, "data") ** 2)
        )(s)
        return full, grad

    found = PerRank(make_mesh(3)).run(step, padded)
    for full, _ in found:
        np.testing.assert_array_equal(full, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(found[2][1], [30, 0])


@TYPED
@pytest.mark.parametrize("copies", [1, 2], ids=lambda n: f"r{n}")
@pytest.mark.parametrize("reduction", ["native", "float32"])
@pytest.mark.parametrize("comm_dtype", [None, "bfloat16"])
def test_gradient_has_the_dtype_of_the_shards(
    make_mesh, copies, check_vma, reduction, comm_dtype
):
    """float32 shards, bfloat16 parameters; summed over ranks and replicas."""
    mesh = make_mesh((2, copies), ("data", "replica"))
    policy = Policy(
        compute_dtype="bfloat16", comm_dtype=comm_dtype, reduction=reduction, op="mean"
    )
    data = [np.float32(r + 1) for r in range(2 * copies)]
    placed = jaxzero.shard_params(params(), mesh, "data", cuts=CUTS)
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)

    def step(s: Any, x: Any) -> Any:
        def loss(s: Any) -> jax.Array:
            full = jaxzero.gather_params(
                s, like(), "data", policy=policy, cuts=CUTS, replicate_axis="replica"
            )
            leaves = [jnp.sum(leaf.astype(jnp.float32)) for leaf in full.values()]
            return sum(leaves, start=jnp.float32(0)) * x[0]

        return jax.grad(loss)(s)

    ranks = PerRank(mesh)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, ranks.spec),
        out_specs=specs,
        check_vma=check_vma,
    )
    grads = jax.jit(mapped)(placed, ranks.place(data))
    assert {leaf.dtype.name for leaf in grads.values()} == {"float32"}
    full = jaxzero.unshard_params(grads, like(), cuts=CUTS)
    expected = {name: np.full(shape, sum(data)) for name, shape in SHAPES.items()}
    oracle.assert_same(full, expected)


def test_parameters_are_typed_as_varying(make_mesh):
    """Each rank computes with them on its own data, whole leaves included."""
    seen = {}

    def step(s: Any) -> Any:
        full = jaxzero.gather_params(s, like(), "data", cuts=CUTS)
        seen.update({k: jax.typeof(v).mat.varying for k, v in full.items()})
        return full

    PerRank(make_mesh(2)).run(step, shards(2))
    assert set(seen.values()) == {frozenset({"data"})}


def test_gathering_over_axes_in_any_order(make_mesh):
    for names in (("a", "b"), ("b", "a")):
        mesh = make_mesh((2, 3), ("a", "b"), order=[5, 1, 4, 2, 0, 3])
        found = PerRank(mesh, names).run(
            lambda s, names=names: jaxzero.gather_params(s, like(), names, cuts=CUTS),
            shards(6),
        )
        for tree in found:
            oracle.assert_same(tree, params())


def test_vmap_gathers_each_element(make_mesh):
    types = jax.ShapeDtypeStruct((7,), "float32")
    stacked = [np.stack([np.float32([r, k]) for k in range(3)]) for r in range(4)]
    found = PerRank(make_mesh(4)).run(
        jax.vmap(lambda s: jaxzero.gather_params(s, types, "data")), stacked
    )
    expected = [[0, k, 1, k, 2, k, 3] for k in range(3)]
    for leaf in found:
        np.testing.assert_array_equal(leaf, expected)


def test_forward_mode_is_refused_by_jax(make_mesh):
    """Derivatives are reverse-mode only."""
    types = jax.ShapeDtypeStruct((4,), "float32")
    ranks = PerRank(make_mesh(2))
    with pytest.raises(TypeError, match="forward-mode"):
        ranks.run(
            lambda s: jax.jvp(
                lambda s: jaxzero.gather_params(s, types, "data"), (s,), (s,)
            ),
            [np.ones(2, np.float32)] * 2,
        )


@TYPED
def test_small_leaves_stay_whole_and_their_gradients_are_summed(make_mesh, check_vma):
    mesh = make_mesh((2, 2), ("data", "replica"))
    policy = Policy(op="mean")
    full = {"kept": np.float32([1, 2, 3]), "cut": np.arange(8, dtype=np.float32)}
    layout = jaxzero.make_layout(
        full, "data", mesh=mesh, replicate_axis="replica", min_shard_numel=6
    )
    placed = jaxzero.shard_params(full, mesh, layout)
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    assert specs["kept"] == PartitionSpec()

    def step(s: Any, x: Any) -> Any:
        def loss(s: Any) -> jax.Array:
            tree = jaxzero.gather_params(s, layout, policy=policy)
            return (jnp.sum(tree["kept"] ** 2) + jnp.sum(tree["cut"] ** 2)) * x[0]

        return jax.grad(loss)(s)

    ranks = PerRank(mesh)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, ranks.spec),
        out_specs=specs,
        check_vma=check_vma,
    )
    data = [np.float32(r + 1) for r in range(4)]
    grads = jax.jit(mapped)(placed, ranks.place(data))
    found = jaxzero.unshard_params(grads, layout)
    oracle.assert_same(found, jax.tree.map(lambda leaf: 2 * leaf * 10, full))


@TYPED
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_narrow_floats_are_summed_in_float32(make_mesh, check_vma, dtype):
    """Over ranks and replicas, whole leaves too; rounded once, at the end."""
    mesh = make_mesh((4, 2), ("data", "replica"))
    full = {name: np.ones(6).astype(dtype) for name in ("cut", "kept")}
    types = {name: jax.ShapeDtypeStruct((6,), dtype) for name in full}
    cuts = {"cut": None, "kept": "whole"}
    placed = jaxzero.shard_params(full, mesh, "data", cuts=cuts)
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    # Exact in each dtype, as is their sum, but not all sums on the way.
    data = [np.float32(x) for x in (6, -6, 4, -4, 3, -3, 0.5, 1)]

    def step(s: Any, x: Any) -> Any:
        def loss(s: Any) -> jax.Array:
            tree = jaxzero.gather_params(
                s, types, "data", cuts=cuts, replicate_axis="replica"
            )
            assert {leaf.dtype.name for leaf in tree.values()} == {dtype}
            leaves = [jnp.sum(leaf.astype(jnp.float32)) for leaf in tree.values()]
            return (leaves[0] + leaves[1]) * x[0]

        return jax.grad(loss)(s)

    ranks = PerRank(mesh)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, ranks.spec),
        out_specs=specs,
        check_vma=check_vma,
    )
    grads = jax.jit(mapped)(placed, ranks.place(data))
    found = jaxzero.unshard_params(grads, types, cuts=cuts)
    assert {leaf.dtype.name for leaf in found.values()} == {dtype}
    for leaf in found.values():
        np.testing.assert_array_equal(leaf.astype(np.float32), np.full(6, 1.5))
