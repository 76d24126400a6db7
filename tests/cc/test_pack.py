"""jaxzero_pack: leaves to bucket."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cc.calls import CASES, Slot
from jax.sharding import Mesh, PartitionSpec

from cc import calls


def leaves_of(case: calls.Case, dtypes: tuple[str, ...]) -> list[calls.Array]:
    return [
        calls.numbers(i, slot.leaf_numel, dtypes[i % len(dtypes)])
        for i, slot in enumerate(case.slots)
    ]


def pack(case: calls.Case, leaves: list[calls.Array], dtype: str) -> calls.Array:
    return calls.pack(case.slots, leaves, dtype, case.group_size, case.row_numel)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_cut_lands_in_its_row(name: str, dtype: str) -> None:
    case = CASES[name]
    leaves = leaves_of(case, ("float32", "bfloat16"))
    expected = calls.packed(case.slots, leaves, case.group_size, case.row_numel)
    assert not np.isnan(expected).any(), "the bucket starts as NaN, so none may stay"
    calls.assert_same(pack(case, leaves, dtype), calls.nearest(expected, dtype))


@pytest.mark.parametrize("dtype", calls.REAL)
@pytest.mark.parametrize("leaf_dtype", calls.REAL)
def test_every_pair_of_dtypes(leaf_dtype: str, dtype: str) -> None:
    case = CASES["dim"]
    leaves = leaves_of(case, (leaf_dtype,))
    expected = calls.packed(case.slots, leaves, case.group_size, case.row_numel)
    calls.assert_same(pack(case, leaves, dtype), calls.nearest(expected, dtype))


@pytest.mark.parametrize("dtype", calls.REAL)
@pytest.mark.parametrize("leaf_dtype", ["complex64", "complex128"])
def test_complex_leaves_are_pairs_of_reals(leaf_dtype: str, dtype: str) -> None:
    case = CASES["dim"]
    slots = tuple(
        dataclasses.replace(slot, inner=2 * slot.inner, row_offset=2 * slot.row_offset)
        for slot in case.slots
    )
    case = dataclasses.replace(case, row_numel=2 * case.row_numel, slots=slots)
    leaves = leaves_of(case, (leaf_dtype,))
    expected = calls.packed(case.slots, leaves, case.group_size, case.row_numel)
    calls.assert_same(pack(case, leaves, dtype), calls.nearest(expected, dtype))


@pytest.mark.parametrize(
    ("leaf_dtype", "dtype", "value"),
    [
        ("float16", "float16", 60000.0),
        ("float32", "float16", 240000.0),
        ("float32", "bfloat16", 3.0e38),
        ("float64", "float16", 240000.0),
    ],
)
def test_the_scale_comes_before_the_cast(
    leaf_dtype: str, dtype: str, value: float
) -> None:
    leaf = calls.from_components([value] * 9, leaf_dtype)
    (bucket,) = calls.pack(
        [Slot(length=9, chunk=9)], [leaf], dtype, group_size=1, pre_scale=0.25
    )
    calls.assert_same(bucket, calls.nearest(calls.components(leaf) * 0.25, dtype))


def test_padding_after_the_last_leaf_is_zero_on_every_rank() -> None:
    leaf = calls.from_components(np.ones(73), "float32")
    bucket = calls.pack([Slot(length=73, chunk=19)], [leaf], "float32", 4, 32)
    np.testing.assert_array_equal(bucket.sum(1), [19, 19, 19, 16])
    np.testing.assert_array_equal(bucket[:, 19:], 0)
    np.testing.assert_array_equal(bucket[3, 16:], 0)


def test_a_bucket_without_slots_is_zero() -> None:
    bucket = calls.pack([], [], "float32", 2, 8)
    np.testing.assert_array_equal(bucket, np.zeros((2, 8)))


def test_a_thousand_small_leaves_share_chunks() -> None:
    slots = [
        Slot(operand=i, length=100, chunk=34, row_offset=36 * i) for i in range(1000)
    ]
    leaves = [calls.numbers(i, 100, "float32") for i in range(1000)]
    expected = calls.packed(slots, leaves, 3, 36_000)
    bucket = calls.pack(slots, leaves, "float32", 3, 36_000)
    np.testing.assert_array_equal(bucket, expected)


def test_many_calls_at_once_do_not_wait_for_each_other(mesh8: Mesh) -> None:
    """Handlers share the pool with their own helpers; see cpu/parallel_for.h."""
    numel = 100_000
    attributes = {
        "slots": calls.table([Slot(length=numel, chunk=numel)]),
        "group_size": np.int64(1),
        "pre_scale": np.float64(1),
        "format": calls.FORMAT,
    }
    emit = jax.ffi.ffi_call(
        "jaxzero_pack", jax.ShapeDtypeStruct((1, numel), jnp.float32)
    )

    def step(x: jax.Array) -> list[jax.Array]:
        return [emit(x + np.float32(i), **attributes) for i in range(32)]

    spec = PartitionSpec("data")
    run = jax.jit(
        jax.shard_map(step, mesh=mesh8, in_specs=spec, out_specs=spec, check_vma=False)
    )
    for i, bucket in enumerate(run(jnp.arange(8 * numel, dtype=jnp.float32))):
        np.testing.assert_array_equal(bucket[:, -1], np.arange(1, 9) * numel - 1 + i)
