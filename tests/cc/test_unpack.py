"""jaxzero_unpack: rows to shards."""

import dataclasses

import numpy as np
import pytest
from cc.calls import Slot

from cc import calls

NUMELS = (5, 1, 19, 700)


def shards(
    base: bool = False, accumulate: bool = False, numels: tuple[int, ...] = NUMELS
) -> tuple[list[Slot], int]:
    """Slots with gaps between them, and the length of the row."""
    slots = []
    offset = 0
    for i, numel in enumerate(numels):
        slots.append(
            Slot(
                operand=i,
                length=numel,
                chunk=numel,
                row_offset=offset,
                base=i if base else -1,
                accumulate=int(accumulate),
            )
        )
        offset += -(-numel // 8) * 8
    return slots, offset


def in_float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def compute_dtype(*dtypes: str) -> type[np.floating]:
    return np.float64 if {"float64", "complex128"} & {*dtypes} else np.float32


def expected_shard(
    rows: np.ndarray, slot: Slot, dtype: str, wide: type, divisor: float, base: object
) -> np.ndarray:
    """The answer in the compute dtype, operation by operation, rounded once more."""
    own = rows[:, slot.columns].astype(wide)
    total = own[0]
    for row in own[1:]:
        total = total + row
    value = total / wide(divisor)
    if base is not None:
        value = value + np.asarray(base, wide)
    return calls.nearest(value.astype(np.float64), calls.component(dtype))


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "accumulate"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", calls.REAL)
@pytest.mark.parametrize("wire", calls.REAL)
def test_every_pair_of_dtypes(
    wire: str, dtype: str, num_rows: int, accumulate: bool
) -> None:
    slots, row_numel = shards(base=accumulate, accumulate=accumulate)
    rows = calls.numbers(0, num_rows * row_numel, wire).reshape(num_rows, row_numel)
    bases = [calls.numbers(1 + i, n, dtype) for i, n in enumerate(NUMELS)]
    found, stats = calls.unpack(
        slots,
        rows,
        [dtype] * len(slots),
        bases if accumulate else (),
        num_rows=num_rows,
        divisor=3.0,
        with_stats=True,
    )
    wide = compute_dtype(wire, dtype)
    squares = 0.0
    for i, slot in enumerate(slots):
        base = bases[i] if accumulate else None
        expected = expected_shard(rows.astype(np.float64), slot, dtype, wide, 3.0, base)
        calls.assert_same(found[i], expected)
        squares += np.square(expected).sum()
    np.testing.assert_allclose(stats, [np.sqrt(squares), 1], rtol=2**-23)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("wire", [*calls.REAL, "complex64"])
def test_complex_shards_are_pairs_of_reals(wire: str, dtype: str) -> None:
    slots, row_numel = shards(base=True, accumulate=True, numels=(6, 2, 38))
    rows = calls.numbers(0, row_numel, wire)
    bases = [calls.numbers(1 + i, s.shard_numel, dtype) for i, s in enumerate(slots)]
    found, _ = calls.unpack(slots, rows, [dtype] * 3, bases, divisor=4.0)
    wide = compute_dtype(wire, dtype)
    for slot, shard, base in zip(slots, found, bases, strict=True):
        row = calls.components(rows)[None]
        expected = expected_shard(row, slot, dtype, wide, 4.0, calls.components(base))
        calls.assert_same(shard, expected)


@pytest.mark.parametrize(
    "divisor", [1.0, 4.0, 7.0, 0.5, 0.1, -2.0, 2.0**127, 2.0**-149]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_division_is_true_division(dtype: str, divisor: float) -> None:
    slots, row_numel = shards()
    rows = calls.numbers(3, row_numel, dtype)
    found, _ = calls.unpack(slots, rows, [dtype] * len(slots), divisor=divisor)
    for slot, shard in zip(slots, found, strict=True):
        with np.errstate(over="ignore"):
            expected = rows[slot.columns] / np.dtype(dtype).type(divisor)
        np.testing.assert_array_equal(shard, expected)


def test_rows_are_added_in_row_order() -> None:
    """In float32, 2**24 + 1 - 2**24 is 0, and 2**24 - 2**24 + 1 is 1."""
    slots = [Slot(length=2, chunk=2)]
    rows = np.array([[2**24, 2**24], [1, -(2**24)], [-(2**24), 1]], np.float32)
    (shard,), _ = calls.unpack(slots, rows, ["float32"], num_rows=3)
    np.testing.assert_array_equal(shard, [0, 1])


def test_16_bit_rows_are_added_in_float32() -> None:
    slots = [Slot(length=1, chunk=1)]
    rows = np.ones((300, 1), np.dtype("bfloat16"))
    (shard,), _ = calls.unpack(slots, rows, ["float32"], num_rows=300)
    assert shard[0] == 300


def test_a_negative_zero_survives() -> None:
    slots = [Slot(length=3, chunk=3)]
    rows = np.full(3, -0.0, np.float32)
    (shard,), _ = calls.unpack(slots, rows, ["bfloat16"], divisor=2.0)
    assert np.signbit(shard.astype(np.float32)).all()


def test_a_column_range_leaves_the_rest_of_its_base_alone() -> None:
    slot = Slot(length=10, chunk=10, begin=3, count=4, row_offset=8, base=0)
    rows = np.arange(16, dtype=np.float32)
    base = np.full(10, -1, np.float32)
    (copied,), stats = calls.unpack([slot], rows, ["float32"], [base], with_stats=True)
    np.testing.assert_array_equal(copied, [-1] * 3 + [8, 9, 10, 11] + [-1] * 3)
    written = np.sqrt(np.square([8.0, 9, 10, 11]).sum())
    np.testing.assert_allclose(stats, [written, 1], rtol=2**-23)
    added = dataclasses.replace(slot, accumulate=1)
    (shard,), _ = calls.unpack([added], rows, ["float32"], [base])
    np.testing.assert_array_equal(shard, [-1] * 3 + [7, 8, 9, 10] + [-1] * 3)


def test_a_base_that_is_only_shared_is_not_added() -> None:
    slots, row_numel = shards(base=True)
    rows = np.ones(row_numel, np.float32)
    bases = [np.full(n, np.nan, np.float32) for n in NUMELS]
    found, _ = calls.unpack(slots, rows, ["float32"] * len(slots), bases)
    for shard in found:
        np.testing.assert_array_equal(shard, 1)


def test_a_row_is_overwritten_in_place() -> None:
    rows = calls.numbers(0, 70_000, "float32")
    slot = Slot(length=rows.size, chunk=rows.size)
    (shard,), _ = calls.unpack([slot], rows, ["float32"], divisor=7.0, aliases={0: 0})
    np.testing.assert_array_equal(shard, rows / np.float32(7))


def test_an_undonated_base_that_is_not_shared_is_added() -> None:
    slots, row_numel = shards(base=True, accumulate=True)
    rows = np.ones(row_numel, np.float32)
    bases = [np.full(n, 2, np.float32) for n in NUMELS]
    found, _ = calls.unpack(slots, rows, ["float32"] * 4, bases, aliases={})
    for shard in found:
        np.testing.assert_array_equal(shard, 3)


# Statistics


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 2, 700])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_one_bad_value_is_seen(dtype: str, position: int, bad: float) -> None:
    slots, row_numel = shards()
    rows = np.ones(row_numel, np.float32)
    rows[position] = bad
    _, stats = calls.unpack(slots, rows, [dtype] * 4, with_stats=True)
    assert not np.isfinite(stats[0])
    assert stats[1] == 0


def test_a_bad_value_in_a_gap_is_not_seen() -> None:
    slots, row_numel = shards()
    rows = np.full(row_numel, np.nan, np.float32)
    for slot in slots:
        rows[slot.columns] = 1
    _, stats = calls.unpack(slots, rows, ["float32"] * 4, with_stats=True)
    np.testing.assert_allclose(stats, [np.sqrt(sum(NUMELS)), 1], rtol=2**-23)


def test_overflow_of_the_stored_dtype_is_seen() -> None:
    rows = np.full(3, 1e6, np.float32)
    slot = Slot(length=3, chunk=3)
    _, stats = calls.unpack([slot], rows, ["float16"], with_stats=True)
    np.testing.assert_array_equal(stats, [np.inf, 0])


def test_squares_that_overflow_are_still_finite_values() -> None:
    slot = Slot(length=4, chunk=4)
    for rows in (np.full(4, 1e200), np.full(4, 3e38, np.float32)):
        dtype = rows.dtype.name
        _, stats = calls.unpack([slot], rows, [dtype], with_stats=True)
        np.testing.assert_array_equal(stats, [np.inf, 1])


def test_statistics_are_the_same_bits_every_time() -> None:
    numel = 400_003
    rows = calls.numbers(0, numel, "float32")
    slot = Slot(length=numel, chunk=numel)
    seen = {
        calls.unpack([slot], rows, ["float32"], with_stats=True)[1].tobytes()
        for _ in range(20)
    }
    assert len(seen) == 1
    norm = np.sqrt(np.square(rows.astype(np.float64)).sum())
    np.testing.assert_allclose(np.frombuffer(seen.pop(), np.float32)[0], norm, 2**-23)


def test_without_statistics_the_token_is_zero() -> None:
    slots, row_numel = shards()
    _, stats = calls.unpack(slots, np.ones(row_numel, np.float32), ["float32"] * 4)
    np.testing.assert_array_equal(stats, [0, 0])


def test_subnormal_numbers_are_kept_on_every_thread() -> None:
    """XLA's pool flushes them to zero, the calling thread may not."""
    numel = 500_000
    rows = np.full((2, numel), 3e-39, np.float32)
    slot = Slot(length=numel, chunk=numel)
    (shard,), _ = calls.unpack([slot], rows, ["float32"], num_rows=2, divisor=3.0)
    expected = in_float32(rows[0] + rows[1]) / np.float32(3)
    assert 0 < expected[0] < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(shard, expected)
