"""Norm and finiteness, the same on every rank, against the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero
from jaxzero import Policy
from jaxzero._norms import stats as _stats

SHAPES = {"even": (8, 3), "ragged": (7,), "scalar": (), "cut": (3, 5), "kept": (6,)}
CUTS = {"even": None, "ragged": None, "scalar": None, "cut": 1, "kept": "whole"}


def measure(mesh: Any, grads: Any, check_vma: bool = True, **options: Any) -> Any:
    """Returns every rank's statistics."""
    options = {"cuts": CUTS} | options

    def step(g: Any) -> Any:
        return jaxzero.shard_grads(g, "data", with_stats=True, **options)[1]

    return PerRank(mesh, check_vma=check_vma).run(step, grads)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("bucket_bytes", [16, 100, None])
@pytest.mark.parametrize("direct_bytes", [0, None], ids=["direct", "packed"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_norm_counts_every_element_once(
    make_mesh, ranks, bucket_bytes, direct_bytes, check_vma
):
    """Split over buckets or not; padding never, whole leaves once."""
    grads = [oracle.integers(SHAPES, r) for r in range(ranks)]
    policy = Policy(bucket_bytes=bucket_bytes, direct_bytes=direct_bytes)
    found = measure(make_mesh(ranks), grads, check_vma, policy=policy)
    norm = oracle.global_norm(oracle.reduce(grads))
    for stats in found:
        assert (stats.norm.dtype, stats.norm.shape) == (np.float32, ())
        assert (stats.all_finite.dtype, stats.all_finite.shape) == (np.bool_, ())
        assert float(stats.norm) == pytest.approx(norm, rel=1e-6)
        assert float(stats.norm) == float(found[0].norm)
        assert bool(stats.all_finite)


def test_norm_is_that_of_the_result_with_into(make_mesh):
    grads = [oracle.integers(SHAPES, r) for r in range(4)]
    full = oracle.integers(SHAPES, 9)
    into = [oracle.shard(full, 4, r, CUTS) for r in range(4)]

    def step(g: Any, acc: Any) -> Any:
        return jaxzero.shard_grads(g, "data", into=acc, with_stats=True, cuts=CUTS)[1]

    norm = oracle.global_norm(oracle.reduce(grads, into=full))
    for stats in PerRank(make_mesh(4)).run(step, grads, into):
        assert float(stats.norm) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_norm_survives_squares_that_float32_does_not_hold(make_mesh, size):
    grads = [{"w": np.full(9, size, np.float32), "kept": np.float32([size])}] * 4
    for stats in measure(make_mesh(4), grads, cuts={"w": None, "kept": "whole"}):
        expected = np.sqrt(10.0) * float(np.float32(size))
        assert float(stats.norm) == pytest.approx(expected, rel=1e-6)
        assert bool(stats.all_finite)


def test_norm_is_of_the_stored_values(make_mesh):
    """1 + 2**-9 is stored as 1 in bfloat16."""
    grads = [np.full(4, 1 + 2.0**-9, np.float32)] * 2
    policy = Policy(shard_dtype="bfloat16")
    for stats in measure(make_mesh(2), grads, policy=policy, cuts=None):
        assert float(stats.norm) == pytest.approx(2.0, rel=1e-6)


def test_finiteness_is_of_the_stored_values(make_mesh):
    """A float32 sum of 70000 overflows the float16 shard, not the norm of others."""
    grads = [{"w": np.full(4, 70000.0, np.float32), "v": np.ones(3, np.float32)}] * 2
    policy = Policy(shard_dtype="float16")
    for stats in measure(make_mesh(2), grads, policy=policy, cuts=None):
        assert not bool(stats.all_finite)
        assert np.isinf(stats.norm)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("leaf", SHAPES)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_bad_element_of_any_leaf_is_seen_by_all(make_mesh, bad, leaf, rank):
    grads = [oracle.integers(SHAPES, r) for r in range(4)]
    grads[rank][leaf] = np.array(grads[rank][leaf])
    grads[rank][leaf].reshape(-1)[-1] = bad
    for stats in measure(make_mesh(4), grads):
        assert not bool(stats.all_finite)
        assert not np.isfinite(stats.norm)


@pytest.mark.parametrize("value", [1e-40, 2**-126, 1e-30, 3e38])
def test_extreme_norms_are_combined(value):
    """Also operation by operation, where XLA divides through the reciprocal."""
    norms = jnp.array([value, 0], jnp.float32)
    lost = 2.0**-126 if value < 2**-126 else 0  # XLA may flush subnormal numbers
    for combine in (_stats._stable_norm, jax.jit(_stats._stable_norm)):
        assert float(combine(norms)) == pytest.approx(value, rel=1e-6, abs=lost)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_complex_and_64_bit_leaves_count_in_the_norm(make_mesh, x64, check_vma):
    grads = [
        {"c": np.array([3 + 4j, 0, 12j]), "d": np.full(3, 2.0), "f": np.float32([1])}
    ] * 2
    for stats in measure(make_mesh(2), grads, check_vma, cuts=None):
        assert stats.norm.dtype == np.float32
        assert float(stats.norm) == pytest.approx(np.sqrt(25 + 144 + 12 + 1), rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_stats_leave_as_equal_on_all_ranks(make_mesh, replicas, kind):
    """`out_specs=P()` accepts them, also where leaves vary over another axis."""
    mesh = make_mesh((2, replicas, 2), ("data", "replica", "model"), kind)
    grads = [oracle.integers(SHAPES, r) for r in range(mesh.size)]
    ranks = PerRank(mesh, ("model", "data", "replica"))

    def step(stacked: Any) -> Any:
        tree = jax.tree.map(lambda leaf: leaf[0], stacked)
        stats = jaxzero.shard_grads(
            tree, "data", replicate_axis="replica", with_stats=True, cuts=CUTS
        )[1]
        return jax.tree.map(lambda leaf: leaf[None], stats)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(ranks.spec,), out_specs=P("model")
    )
    norms = np.asarray(jax.jit(mapped)(ranks.place(grads)).norm)
    half = mesh.size // 2
    for index in range(2):
        group = grads[index * half : (index + 1) * half]
        norm = oracle.global_norm(oracle.reduce(group))
        assert norms[index] == pytest.approx(norm, rel=1e-6)


def test_stats_are_constants_to_differentiation(make_mesh):
    """The documented limit: a penalty on the norm has no gradient."""
    grads = [np.arange(4, dtype=np.float32)] * 2

    def step(g: Any) -> Any:
        return jax.grad(
            lambda g: jaxzero.shard_grads(g, "data", with_stats=True)[1].norm
        )(g)

    for found in PerRank(make_mesh(2)).run(step, grads):
        np.testing.assert_array_equal(found, np.zeros(4))


def test_stats_work_under_vmap(make_mesh):
    grads = [np.float32(np.arange(24).reshape(3, 8) + r) for r in range(4)]

    def step(g: Any) -> Any:
        stats = jax.vmap(
            lambda leaf: jaxzero.shard_grads(leaf, "data", with_stats=True)[1]
        )(g)
        return stats.norm, jnp.logical_not(stats.all_finite)

    full = oracle.reduce(grads)
    for norms, bad in PerRank(make_mesh(4)).run(step, grads):
        np.testing.assert_allclose(norms, np.linalg.norm(full, axis=1), rtol=1e-6)
        assert not bad.any()
