"""Clipping of shards, against clipping of the whole tree in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero

SHAPES = {"even": (8, 3), "ragged": (7,), "scalar": (), "cut": (3, 5), "kept": (6,)}
CUTS = {"even": None, "ragged": None, "scalar": None, "cut": 1, "kept": "whole"}
TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])


def clipped(
    mesh: Any,
    full: Any,
    max_norm: float,
    cuts: Any = None,
    *,
    check_vma: bool = True,
    names: Any = "data",
    **options: Any,
) -> Any:
    """Returns the shards of all ranks side by side after clipping."""
    shards = jaxzero.shard_params(full, mesh, names, cuts=cuts)
    specs = jax.tree.map(lambda x: x.sharding.spec, shards)
    clip = jaxzero.clip_by_global_norm(max_norm, names, cuts=cuts, **options)

    def step(tree: Any) -> Any:
        state = clip.init(tree)
        tree, after = clip.update(tree, state, tree)
        assert after == state == ()
        return tree

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma
    )
    return jax.block_until_ready(jax.jit(mapped)(shards))


def expected(full: Any, max_norm: float) -> Any:
    norm = oracle.global_norm(full)
    factor = max_norm / norm if norm >= max_norm else 1.0
    return jax.tree.map(lambda x: oracle.wide(x) * factor, full)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8], ids=lambda n: f"n{n}")
@TYPED
@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clips", "fits"])
@pytest.mark.parametrize("with_like", [True, False], ids=["like", "shards"])
def test_shards_are_those_of_the_clipped_tree(
    make_mesh, ranks, check_vma, max_norm, with_like
):
    full = oracle.integers(SHAPES, 0)
    assert 0.5 < oracle.global_norm(full) < 1e6
    like = full if with_like else None
    found = clipped(
        make_mesh(ranks), full, max_norm, CUTS, check_vma=check_vma, like=like
    )
    wanted = oracle.shards(expected(full, max_norm), ranks, CUTS)
    oracle.assert_close(found, wanted, 4, "float32")
    if max_norm == 1e6:
        oracle.assert_same(found, wanted)


@TYPED
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_dtypes_are_kept(make_mesh, check_vma, dtype):
    full = oracle.integers(SHAPES, 1, dtype=dtype)
    found = clipped(make_mesh(3), full, 2.0, CUTS, check_vma=check_vma)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {dtype}
    wanted = oracle.shards(expected(full, 2.0), 3, CUTS)
    oracle.assert_close(found, wanted, 1, dtype, "float32")


def test_64_bit_leaves_are_clipped_in_64_bits(make_mesh, x64):
    """Also where float32 holds neither the norm nor the leaf."""
    for size in (1e-100, 1.0, 1e100):
        full = {"d": np.full(7, size), "z": np.full(3, size * 1j), "f": np.float32([1])}
        found = clipped(make_mesh(4), full, 0.25)
        assert [found[k].dtype.name for k in "dzf"] == ["float64", "complex128"] + [
            "float32"
        ]
        wanted = oracle.shards(expected(full, 0.25), 4)
        for key in "dz":
            np.testing.assert_allclose(found[key], wanted[key], rtol=1e-6)
    full = {"d": np.full(7, 1 / 3)}
    np.testing.assert_allclose(
        clipped(make_mesh(1), full, 0.25)["d"], expected(full, 0.25)["d"], rtol=1e-15
    )


@pytest.mark.parametrize("size", [6e37, 1e30, 1e-30, 1e-37])
def test_extreme_numbers(make_mesh, size):
    full = {"w": np.full(9, size, np.float32), "z": np.full(4, size, np.complex64)}
    limit = size * 0.5
    found = clipped(make_mesh(4), full, limit)
    wanted = oracle.shards(expected(full, limit), 4)
    for key in full:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-6)


@TYPED
@pytest.mark.parametrize(
    "full",
    [
        {},
        {"w": np.zeros(5, np.float32), "kept": np.zeros(2, np.float16)},
        {"e": np.zeros((0, 3), np.float32), "w": np.float32([0.25]), "n": None},
    ],
    ids=["empty", "zeros", "empty-leaf"],
)
def test_nothing_to_clip_is_left_alone(make_mesh, full, check_vma):
    found = clipped(make_mesh(2), full, 1.0, check_vma=check_vma)
    oracle.assert_same(found, oracle.shards(full, 2))


@TYPED
def test_axes_as_a_tuple_and_copies_along_another(make_mesh, check_vma):
    full = oracle.integers(SHAPES, 0)
    mesh = make_mesh((2, 2, 2), ("a", "copy", "b"))
    found = clipped(mesh, full, 1.0, CUTS, names=("b", "a"), check_vma=check_vma)
    wanted = oracle.shards(expected(full, 1.0), 4, CUTS)
    oracle.assert_close(found, wanted, 4, "float32")


def test_small_leaves_that_the_layout_keeps_whole(make_mesh):
    full = {"small": np.float32([3, 4]), "large": np.full(12, 2, np.float32)}
    mesh = make_mesh(4)
    layout = jaxzero.make_layout(full, "data", mesh=mesh, min_shard_numel=4)
    clip = jaxzero.clip_by_global_norm(1.0, layout)
    mapped = jax.shard_map(
        lambda t: clip.update(t, ())[0],
        mesh=mesh,
        in_specs=({"small": P(), "large": P("data")},),
        out_specs={"small": P(), "large": P("data")},
        check_vma=False,
    )
    oracle.assert_close(jax.jit(mapped)(full), expected(full, 1.0), 4, "float32")


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_norm_does_what_it_does_in_optax(make_mesh, bad):
    optax = pytest.importorskip("optax")
    full = {"w": np.float32([1, bad, 2, 3]), "v": np.float32([5, 6])}
    found = clipped(make_mesh(2), full, 1.0)
    wanted, _ = optax.clip_by_global_norm(1.0).update(full, ())
    np.testing.assert_array_equal(found["w"], wanted["w"])
    np.testing.assert_array_equal(found["v"], wanted["v"])


@TYPED
@jax.numpy_dtype_promotion("standard")  # optax mixes dtypes
def test_a_chain_of_optax_takes_it(make_mesh, check_vma):
    """Three steps of clipped momentum, as on the whole tree."""
    optax = pytest.importorskip("optax")
    full = {"w": np.float32(np.arange(10)), "m": np.ones((4, 2), np.float32)}
    mesh = make_mesh(4)
    ours = optax.chain(
        jaxzero.clip_by_global_norm(1.0, "data"), optax.sgd(0.5, momentum=0.9)
    )
    whole = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9))

    def train(transform: Any, params: Any) -> Any:
        state = transform.init(params)
        for _ in range(3):
            updates, state = transform.update(params, state, params, extra="ignored")
            params = optax.apply_updates(params, updates)
        return params

    shards = jaxzero.shard_params(full, mesh, "data")
    mapped = jax.shard_map(
        functools.partial(train, ours),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    found = jaxzero.unshard_params(jax.block_until_ready(jax.jit(mapped)(shards)), full)
    wanted = jax.tree.map(np.asarray, train(whole, full))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found,
        wanted,
    )


def test_the_derivative_of_clipping_is_finite_at_zero(make_mesh):
    clip = jaxzero.clip_by_global_norm(1.0, "data")
    mapped = jax.shard_map(
        jax.grad(lambda w: jax.lax.psum(jnp.sum(clip.update(w, ())[0]), "data")),
        mesh=make_mesh(2),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.zeros(4)), np.ones(4))


@pytest.mark.parametrize("max_norm", [0, -1.0, np.inf, np.nan])
def test_limit_must_be_finite_and_above_zero(max_norm):
    with pytest.raises(ValueError, match=r"max_norm=.*expected a finite number above"):
        jaxzero.clip_by_global_norm(max_norm, "data")


@pytest.mark.parametrize("max_norm", ["1", None, True, [1.0]])
def test_limit_must_be_a_number(max_norm):
    with pytest.raises(TypeError, match=r"max_norm=.*known at trace time"):
        jaxzero.clip_by_global_norm(max_norm, "data")


def test_limit_must_not_be_traced():
    with pytest.raises(TypeError, match=r"max_norm=.*known at trace time"):
        jax.jit(lambda m: jaxzero.clip_by_global_norm(m, "data") and m)(1.0)


def test_messages_name_the_transform():
    clip = jaxzero.clip_by_global_norm(np.float32(1), "data")
    with pytest.raises(ValueError, match="clip_by_global_norm: axis 'data' is not"):
        clip.update({"w": np.ones(2)}, ())
