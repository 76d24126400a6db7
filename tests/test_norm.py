"""Norm and finiteness of sharded trees, against NumPy on the whole tree."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero

SHAPES = {"even": (8, 3), "ragged": (7,), "scalar": (), "cut": (3, 5), "kept": (6,)}
CUTS = {"even": None, "ragged": None, "scalar": None, "cut": 1, "kept": "whole"}
TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 8], ids=lambda n: f"n{n}")


def like_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def outside(
    function: Any, mesh: Any, full: Any, cuts: Any, *, check_vma: bool = True, **options
) -> Any:
    """Returns what a function of shards gives, called on global arrays."""
    names = options.get("names", "data")
    shards = jaxzero.shard_params(full, mesh, names, cuts=cuts)
    specs = jax.tree.map(lambda x: x.sharding.spec, shards)
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=options.get("out_specs", P()),
        check_vma=check_vma,
    )
    return jax.block_until_ready(jax.jit(mapped)(shards))


def norm_of(mesh: Any, full: Any, cuts: Any = None, **options: Any) -> Any:
    """Returns the norm, which `out_specs=P()` says is equal on every rank."""
    check_vma = options.pop("check_vma", True)
    names = options.pop("names", "data")
    function = functools.partial(
        jaxzero.global_norm, axis_name=names, cuts=cuts, **options
    )
    return outside(function, mesh, full, cuts, check_vma=check_vma, names=names)


@pytest.mark.sampled(6)
@RANKS
@TYPED
@pytest.mark.parametrize("with_like", [True, False], ids=["like", "shards"])
def test_norm_counts_every_element_once(make_mesh, ranks, check_vma, with_like):
    full = oracle.integers(SHAPES, 0)
    like = like_of(full) if with_like else None
    norm = norm_of(make_mesh(ranks), full, CUTS, like=like, check_vma=check_vma)
    assert (norm.dtype, norm.shape) == (jnp.float32, ())
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


@TYPED
def test_norm_is_bitwise_equal_on_all_ranks(make_mesh, check_vma):
    full = {"w": np.random.default_rng(0).normal(size=(101,)).astype(np.float32)}
    shards = [oracle.shard(full, 8, r) for r in range(8)]
    found = PerRank(make_mesh(8), check_vma=check_vma).run(
        lambda t: jaxzero.global_norm(t, "data"), shards
    )
    assert len({float(norm) for norm in found}) == 1
    assert float(found[0]) == pytest.approx(oracle.global_norm(full), rel=1e-6)


@TYPED
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_norm_of_every_dtype(make_mesh, check_vma, dtype):
    full = oracle.integers(SHAPES, 1, dtype=dtype)
    norm = norm_of(make_mesh(3), full, CUTS, check_vma=check_vma)
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


@TYPED
def test_norm_of_complex_and_64_bit_leaves(make_mesh, x64, check_vma):
    full = {
        "z": np.array([3 + 4j, 0, 12j]),
        "c": np.complex64([1j]),
        "d": np.full(3, 2.0),
        "kept": np.float64([3]),
        "f": np.float32([1]),
    }
    cuts = {"z": None, "c": None, "d": None, "kept": "whole", "f": None}
    norm = norm_of(make_mesh(2), full, cuts, like=like_of(full), check_vma=check_vma)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


@pytest.mark.parametrize("size", [1e38, 1e30, 1e-30, 1e-37])
@TYPED
def test_norm_survives_squares_that_float32_does_not_hold(make_mesh, size, check_vma):
    full = {"w": np.full(9, size, np.float32), "kept": np.float32([size])}
    norm = norm_of(
        make_mesh(4), full, {"w": None, "kept": "whole"}, check_vma=check_vma
    )
    expected = np.sqrt(10.0) * float(np.float32(size))
    assert float(norm) == pytest.approx(expected, rel=1e-6)


def test_norm_survives_leaves_of_very_different_sizes(make_mesh):
    full = {"a": np.float32([1e30] * 3), "b": np.float32([1e-30]), "c": np.float32([2])}
    norm = norm_of(make_mesh(2), full)
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


def test_norm_of_many_elements_is_not_lost_to_rounding(make_mesh):
    full = {"w": np.full(3_000_000, 0.1, np.float32)}
    norm = norm_of(make_mesh(2), full)
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cut", [None, "flat", 0, 1, -1])
@TYPED
def test_padding_is_left_out_whatever_it_holds(make_mesh, cut, check_vma):
    """Only with `like`: without it, what the padding holds counts."""
    full = {"w": np.float32(np.arange(35).reshape(5, 7))}
    cut_dim = 0 if cut in (None, "flat") else cut
    shape = (35,) if cut in (None, "flat") else (5, 7)

    def poisoned(shards: Any, like: Any) -> Any:
        chunk = shards["w"].shape[cut_dim]
        at = jax.lax.axis_index("data") * chunk
        where = jax.lax.broadcasted_iota(jnp.int32, shards["w"].shape, cut_dim % 2)
        bad = at + where >= shape[cut_dim]
        tree = {"w": jnp.where(bad, jnp.nan, shards["w"])}
        return jaxzero.global_norm(tree, "data", like=like, cuts=cut)

    mesh = make_mesh(8)
    shards = functools.partial(outside, mesh=mesh, full=full, cuts=cut)
    norm = shards(lambda t: poisoned(t, like_of(full)), check_vma=check_vma)
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)
    assert np.isnan(shards(lambda t: poisoned(t, None), check_vma=check_vma))


def test_type_tells_a_whole_leaf_without_cuts(make_mesh):
    full = {"w": np.ones(8, np.float32), "kept": np.float32([3, 4, 5])}
    cuts = {"w": None, "kept": "whole"}
    for like in (None, like_of(full)):
        function = functools.partial(jaxzero.global_norm, axis_name="data", like=like)
        norm = outside(function, make_mesh(4), full, cuts)
        assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


def test_a_shard_that_is_typed_equal_counts_on_every_rank_with_like(make_mesh):
    """A constant made inside the shard_map, such as zeros plus one."""
    like = {"w": jax.ShapeDtypeStruct((8,), "float32")}

    def step() -> Any:
        return jaxzero.global_norm({"w": jnp.ones(2)}, "data", like=like)

    mapped = jax.shard_map(step, mesh=make_mesh(4), in_specs=(), out_specs=P())
    assert float(jax.jit(mapped)()) == pytest.approx(np.sqrt(8))


@TYPED
@pytest.mark.parametrize("with_like", [True, False], ids=["like", "shards"])
def test_whole_leaf_that_is_typed_as_varying_counts_once(
    make_mesh, check_vma, with_like
):
    like = {"w": jax.ShapeDtypeStruct((2,), "float32")} if with_like else None
    found = PerRank(make_mesh(4), check_vma=check_vma).run(
        lambda t: jaxzero.global_norm(t, "data", like=like, cuts="whole"),
        [{"w": np.float32([3, 4])}] * 4,
    )
    assert [float(norm) for norm in found] == [5.0] * 4


@pytest.mark.sampled(4)
@TYPED
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_norm_over_a_tuple_of_axes(make_mesh, names, kind, check_vma):
    full = oracle.integers(SHAPES, 2)
    norm = norm_of(
        make_mesh((2, 4), ("a", "b"), kind),
        full,
        CUTS,
        names=names,
        like=like_of(full),
        check_vma=check_vma,
    )
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


@TYPED
def test_copies_along_a_second_axis_do_not_count(make_mesh, check_vma):
    full = oracle.integers(SHAPES, 2)
    mesh = make_mesh((2, 2), ("replica", "data"))
    norm = norm_of(mesh, full, CUTS, check_vma=check_vma)
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


def test_leaf_equal_along_one_of_two_axes_counts_once_along_it(make_mesh):
    mesh = make_mesh((2, 4), ("a", "b"))
    w, v = np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)
    mapped = jax.shard_map(
        lambda w, v: jaxzero.global_norm((w, v), ("a", "b")),
        mesh=mesh,
        in_specs=(P(("a", "b")), P("b")),
        out_specs=P(),
    )
    assert float(jax.jit(mapped)(w, v)) == pytest.approx(oracle.global_norm((w, v)))


def test_norm_varies_over_a_further_axis_of_the_leaves(make_mesh):
    mesh = make_mesh((2, 4), ("model", "data"))
    w, v = np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)
    mapped = jax.shard_map(
        lambda w, v: jaxzero.global_norm((w, v), "data")[None],
        mesh=mesh,
        in_specs=(P(("model", "data")), P("data")),
        out_specs=P("model"),
    )
    expected = [oracle.global_norm((half, v)) for half in (w[:4], w[4:])]
    np.testing.assert_allclose(jax.jit(mapped)(w, v), expected, rtol=1e-6)


@TYPED
def test_cut_from_a_callable_is_resolved_from_true_shapes(make_mesh, check_vma):
    full = oracle.integers({"small": (6,), "large": (50,)}, 0)
    asked = []

    def small_whole(path: str, shape: tuple[int, ...]) -> str | None:
        asked.append((path, shape))
        return "whole" if shape[0] < 10 else None

    cuts = {"small": "whole", "large": None}

    def step(tree: Any) -> Any:
        return jaxzero.global_norm(tree, "data", like=like_of(full), cuts=small_whole)

    norm = outside(step, make_mesh(4), full, cuts, check_vma=check_vma)
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)
    assert set(asked) == {("['small']", (6,)), ("['large']", (50,))}


@TYPED
def test_leaves_below_the_smallest_shard_count_once(make_mesh, check_vma):
    full = oracle.integers({"small": (6,), "large": (50,)}, 0)

    def step(tree: Any) -> Any:
        layout = jaxzero.make_layout(like_of(full), "data", min_shard_numel=10)
        return jaxzero.global_norm(tree, layout)

    cuts = {"small": "whole", "large": None}
    norm = outside(step, make_mesh(4), full, cuts, check_vma=check_vma)
    assert float(norm) == pytest.approx(oracle.global_norm(full), rel=1e-6)


EMPTY = [{}, None, (), {"e": np.zeros((0, 10), np.float32)}, {"a": None}]


@pytest.mark.parametrize("tree", EMPTY, ids=str)
@TYPED
def test_empty_trees(make_mesh, tree, check_vma):
    def step() -> Any:
        norm = jaxzero.global_norm(tree, "data")
        return norm, jaxzero.all_finite(tree, "data")

    mapped = jax.shard_map(
        step, mesh=make_mesh(2), in_specs=(), out_specs=P(), check_vma=check_vma
    )
    norm, finite = jax.jit(mapped)()
    assert (norm.dtype, norm.shape, float(norm)) == (jnp.float32, (), 0.0)
    assert (finite.dtype, finite.shape, bool(finite)) == (jnp.bool_, (), True)


def test_nan_and_infinity_reach_the_norm_of_every_rank(make_mesh):
    for bad, check in ((np.nan, np.isnan), (np.inf, np.isposinf)):
        for key in SHAPES:
            full = oracle.integers(SHAPES, 0)
            full[key] = np.array(full[key])
            full[key].reshape(-1)[-1] = bad
            assert check(norm_of(make_mesh(3), full, CUTS))


def test_norm_takes_one_collective(mesh8):
    like = oracle.integers(SHAPES, 0)
    shards = jaxzero.shard_params(like, mesh8, "data", cuts=CUTS)
    specs = jax.tree.map(lambda x: x.sharding.spec, shards)
    for function in (
        functools.partial(jaxzero.global_norm, axis_name="data", cuts=CUTS),
        functools.partial(jaxzero.all_finite, axis_name="data"),
    ):
        mapped = jax.shard_map(function, mesh=mesh8, in_specs=(specs,), out_specs=P())
        text = jax.jit(mapped).lower(shards).compile().as_text()
        assert text.count(" all-reduce(") == 1


def test_norm_works_under_vmap(make_mesh):
    full = np.float32(np.arange(24).reshape(3, 8))
    mapped = jax.shard_map(
        jax.vmap(lambda row: jaxzero.global_norm(row, "data")),
        mesh=make_mesh(4),
        in_specs=P(None, "data"),
        out_specs=P(),
    )
    np.testing.assert_allclose(
        jax.jit(mapped)(full), np.linalg.norm(full, axis=1), rtol=1e-6
    )


# Gradients.


def tree_gradient(full: Any) -> Any:
    norm = oracle.global_norm(full)
    return jax.tree.map(lambda x: oracle.wide(x) / (norm or 1.0), full)


@pytest.mark.sampled(6)
@RANKS
@TYPED
@pytest.mark.parametrize("with_like", [True, False], ids=["like", "shards"])
def test_gradient_from_outside_is_that_of_the_tree(
    make_mesh, ranks, check_vma, with_like
):
    full = oracle.integers(SHAPES, 3)
    mesh = make_mesh(ranks)
    shards = jaxzero.shard_params(full, mesh, "data", cuts=CUTS)
    mapped = jax.shard_map(
        lambda t: jaxzero.global_norm(
            t, "data", cuts=CUTS, like=like_of(full) if with_like else None
        ),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda x: x.sharding.spec, shards),),
        out_specs=P(),
        check_vma=check_vma,
    )
    found = jax.block_until_ready(jax.jit(jax.grad(mapped))(shards))
    expected = oracle.shards(tree_gradient(full), ranks, CUTS)
    oracle.assert_close(found, expected, 4, "float32")


@RANKS
@TYPED
def test_gradient_from_inside_is_that_of_the_tree(make_mesh, ranks, check_vma):
    """Without types it is that of the sum of all ranks' results, as of `lax.psum`."""
    full = oracle.integers(SHAPES, 3)
    mesh = make_mesh(ranks)

    def step(tree: Any) -> Any:
        return jax.grad(lambda t: jaxzero.global_norm(t, "data", cuts=CUTS))(tree)

    specs = jax.tree.map(
        lambda x: x.sharding.spec,
        jaxzero.shard_params(full, mesh, "data", cuts=CUTS),
    )
    found = outside(step, mesh, full, CUTS, check_vma=check_vma, out_specs=specs)
    gradient = tree_gradient(full)
    if not check_vma:
        gradient = {
            key: leaf if key == "kept" else leaf * ranks
            for key, leaf in gradient.items()
        }
    expected = oracle.shards(gradient, ranks, CUTS)
    oracle.assert_close(found, expected, 4, "float32", scale=ranks)


@pytest.mark.parametrize("size", [1e38, 1e-37])
def test_gradient_of_extreme_numbers(make_mesh, size):
    full = {"w": np.full(9, size, np.float32), "tiny": np.float32([size * 1e-20])}
    found = outside(
        jax.grad(lambda t: jaxzero.global_norm(t, "data")),
        make_mesh(2),
        full,
        None,
        out_specs=P("data"),
    )
    np.testing.assert_allclose(found["w"][:9], np.full(9, 1 / 3), rtol=1e-6)
    if size > 1:
        np.testing.assert_allclose(found["tiny"][0], 1e-20 / 3, rtol=1e-6)


def test_gradient_of_complex_leaves_is_that_of_jax(make_mesh):
    full = {"z": np.complex64([3 + 4j, 0, 12j, 1 - 1j])}
    found = outside(
        jax.grad(lambda t: jaxzero.global_norm(t, "data")),
        make_mesh(2),
        full,
        None,
        out_specs=P("data"),
    )
    wanted = np.conj(full["z"]) / oracle.global_norm(full)
    np.testing.assert_allclose(found["z"], wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16"])
def test_gradient_at_zero_is_zero(make_mesh, dtype):
    """Of all zeros, of a leaf of zeros and of a rank that holds padding only."""
    zeros = {"z": np.zeros(3), "w": np.zeros(5)}
    one = {"z": np.zeros(3), "w": np.array([0, 2.0, 0, 0, 0])}
    for full in (zeros, one):
        full = oracle.stored(full, dtype)
        mesh = make_mesh(8)
        found = outside(
            jax.grad(lambda t: jaxzero.global_norm(t, "data")),
            mesh,
            full,
            None,
            out_specs=P("data"),
        )
        expected = oracle.shards(tree_gradient(full), 8)
        oracle.assert_same(found, expected)


# Finiteness.


@TYPED
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("leaf", ["even", "ragged", "scalar", "kept"])
def test_a_bad_element_of_any_leaf_is_seen_by_all(make_mesh, bad, leaf, check_vma):
    full = oracle.integers(SHAPES, 0)
    full[leaf] = np.array(full[leaf])
    full[leaf].reshape(-1)[-1] = bad
    function = functools.partial(jaxzero.all_finite, axis_name="data")
    finite = outside(function, make_mesh(3), full, CUTS, check_vma=check_vma)
    assert (finite.dtype, finite.shape, bool(finite)) == (jnp.bool_, (), False)


@TYPED
@RANKS
def test_a_finite_tree_is_finite(make_mesh, ranks, check_vma):
    """The largest numbers of each dtype are; integers always."""
    full = {
        "h": np.full(5, 65504, np.float16),
        "f": np.full(5, 3e38, np.float32),
        "c": np.full(5, 3e38 + 3e38j, np.complex64),
        "i": np.arange(4),
        "kept": np.array(True),
    }
    cuts = dict.fromkeys(full) | {"kept": "whole"}
    function = functools.partial(jaxzero.all_finite, axis_name="data")
    assert bool(outside(function, make_mesh(ranks), full, cuts, check_vma=check_vma))


def test_finiteness_of_leaves_that_vary_over_other_axes(make_mesh):
    mesh = make_mesh((2, 4), ("model", "data"))
    w = np.float32([0, 1, np.nan, 3, 4, 5, 6, 7])
    mapped = jax.shard_map(
        lambda w, v: jaxzero.all_finite((w, v), "data")[None],
        mesh=mesh,
        in_specs=(P(("model", "data")), P("data")),
        out_specs=P("model"),
    )
    assert jax.jit(mapped)(w, np.ones(4)).tolist() == [False, True]


# What is refused.


def trace(tree: Any, mesh: Any, check_vma: bool = True, **options: Any) -> Any:
    mapped = jax.shard_map(
        lambda t: jaxzero.global_norm(t, "data", **options),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.eval_shape(mapped, tree)


@pytest.mark.parametrize(
    ("options", "check_vma", "error", "parts"),
    [
        (
            {"cuts": lambda path, shape: None},
            True,
            ValueError,
            [r"\['w'\]", "callable", "like=None", "eval_shape"],
        ),
        (
            {"like": {"w": jax.ShapeDtypeStruct((9,), "float32")}},
            True,
            ValueError,
            [r"\['w'\]", r"\(2,\)", r"\(3,\)", r"\(9,\)", "4 ranks", "eval_shape"],
        ),
        (
            {"like": {"w": jax.ShapeDtypeStruct((8,), "float32")}, "cuts": "whole"},
            False,
            ValueError,
            [r"\['w'\]", r"\(2,\)", r"\(8,\)", "whole", "cuts"],
        ),
        (
            {"like": {"v": jax.ShapeDtypeStruct((8,), "float32")}},
            True,
            ValueError,
            [r"\['v'\]", "structure", "jax.tree.map"],
        ),
        ({"cuts": {"v": None}}, True, ValueError, [r"\['v'\]", "prefix"]),
        ({"cuts": 1}, True, ValueError, [r"\['w'\]", "dimension 1"]),
        ({"cuts": "rows"}, True, ValueError, [r"\['w'\]", "'rows'", "flat"]),
    ],
)
def test_bad_input_is_named(make_mesh, options, check_vma, error, parts):
    with pytest.raises(error) as raised:
        trace({"w": np.ones(8, np.float32)}, make_mesh(4), check_vma, **options)
    for part in parts:
        assert raised.match(part)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_leaves_without_a_norm_are_refused(make_mesh, dtype):
    with pytest.raises(TypeError, match=rf"global_norm: leaf \['w'\] .*{dtype}.*Conv"):
        trace({"w": np.ones(8, dtype)}, make_mesh(4))


@pytest.mark.parametrize("function", [jaxzero.global_norm, jaxzero.all_finite])
def test_axis_must_be_bound(function):
    with pytest.raises(ValueError, match=rf"{function.__name__}: axis 'data' is not"):
        function({"w": np.ones(8)}, "data")


def test_a_shard_may_be_longer_than_32_bits_count(make_mesh) -> None:
    """Only traced: it would take 17 GB."""
    numel = 2 * ((1 << 32) + 5) - 1
    norm = jax.shard_map(
        lambda leaf: jaxzero.global_norm(
            leaf, "data", like=jax.ShapeDtypeStruct((numel,), "float32")
        ),
        mesh=make_mesh(2),
        in_specs=P("data"),
        out_specs=P(),
    )
    assert (
        jax.eval_shape(norm, jax.ShapeDtypeStruct((numel + 1,), "float32")).shape == ()
    )
