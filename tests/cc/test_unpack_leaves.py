"""jaxzero_unpack_leaves: bucket to leaves, the inverse of pack."""

import dataclasses

import numpy as np
import pytest
from cc.calls import CASES, Slot

from cc import calls


def leaves_of(slots: tuple[Slot, ...], dtype: str) -> list[calls.Array]:
    return [calls.numbers(i, slot.leaf_numel, dtype) for i, slot in enumerate(slots)]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"split", "whole"}))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_leaves_come_back_without_their_padding(name: str, dtype: str) -> None:
    case = CASES[name]
    # An operand that no slot fills would stay as the allocator left it.
    slots = tuple(
        dataclasses.replace(slot, length=0, outer=1, chunk=0, begin=0)
        if slot.numel < slot.shard_numel
        else slot
        for slot in case.slots
    )
    leaves = leaves_of(slots, dtype)
    bucket = calls.packed(slots, leaves, case.group_size, case.row_numel)
    poisoned = np.where(bucket == 0, np.nan, bucket).astype(np.dtype(dtype))
    found, done = calls.unpack_leaves(slots, poisoned, [dtype] * len(slots))
    for leaf, expected in zip(found, leaves, strict=True):
        calls.assert_same(leaf, calls.components(expected))
    np.testing.assert_array_equal(done, [0])


@pytest.mark.parametrize("dtype", calls.ANY)
@pytest.mark.parametrize("wire", calls.REAL)
def test_every_pair_of_dtypes(wire: str, dtype: str) -> None:
    slots = tuple(
        dataclasses.replace(slot, inner=2 * slot.inner, row_offset=2 * slot.row_offset)
        for slot in CASES["dim"].slots
    )
    leaves = leaves_of(slots, wire)
    bucket = calls.packed(slots, leaves, 3, 192)
    rows = calls.from_components(bucket, wire)
    found, _ = calls.unpack_leaves(slots, rows, [dtype] * len(slots))
    for leaf, sent in zip(found, leaves, strict=True):
        expected = calls.nearest(calls.components(sent), calls.component(dtype))
        calls.assert_same(leaf, expected)


def test_a_column_range_leaves_the_rest_of_its_base_alone() -> None:
    slots = [
        dataclasses.replace(slot, base=i) for i, slot in enumerate(CASES["split"].slots)
    ]
    sent = [np.full(slot.leaf_numel, 2.0, np.float32) for slot in slots]
    bases = [np.full(slot.leaf_numel, 1.0, np.float32) for slot in slots]
    bucket = calls.packed(slots, sent, 4, 48).astype(np.float32)
    found, _ = calls.unpack_leaves(slots, bucket, ["float32"] * 3, bases)
    for slot, leaf in zip(slots, found, strict=True):
        # Which components the range covers, according to pack's own oracle.
        numbered = np.arange(1, slot.leaf_numel + 1, dtype=np.float64)
        alone = dataclasses.replace(slot, operand=0)
        covered = calls.packed([alone], [numbered], 4, 48)
        expected = np.ones(slot.leaf_numel)
        expected[covered[covered > 0].astype(int) - 1] = 2
        assert 0 < (expected == 2).sum() < expected.size
        np.testing.assert_array_equal(leaf, expected)


def test_two_column_ranges_make_a_leaf() -> None:
    whole = Slot(outer=3, length=5, inner=2, chunk=2)
    leaf = calls.numbers(0, whole.leaf_numel, "float32")
    first = dataclasses.replace(whole, count=5)
    second = dataclasses.replace(whole, begin=5, base=0)
    partial = np.full(whole.leaf_numel, np.nan, np.float32)
    for slot in (dataclasses.replace(first, base=0), second):
        bucket = calls.packed([slot], [leaf], 3, slot.numel).astype(np.float32)
        (partial,), _ = calls.unpack_leaves([slot], bucket, ["float32"], [partial])
    np.testing.assert_array_equal(partial, leaf)
