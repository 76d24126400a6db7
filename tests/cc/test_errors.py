"""What the native calls say of tables that contradict their buffers."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from cc.calls import Slot

from cc import calls

LEAF = Slot(length=7, chunk=4)
SHARD = Slot(length=4, chunk=4)
ONES = np.ones(7, np.float32)


def pack(slots: list[Slot], row_numel: int = 8, **options: Any) -> None:
    calls.pack(slots, [options.pop("leaf", ONES)], "float32", 2, row_numel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 6}, "slot 0: leaf has 7 components, expected 6"),
        ({"length": -1}, "slot 0: found size -1, expected none below zero"),
        ({"outer": 2**40, "inner": 2**40, "count": 0}, "slot 0: sizes exceed 64 bits"),
        ({"chunk": 3}, "slot 0: 2 ranks of chunk 3 cannot hold length 7"),
        ({"begin": 3, "count": 2}, r"slot 0: found components \[3, 3 \+ 2\)"),
        ({"begin": 5, "count": 0}, r"expected at most 4 of the shard"),
        ({"row_offset": -1}, "slot 0: starts at -1 in the row, expected 0 or more"),
        ({"row_offset": 5}, r"slot 0: ends at 5 \+ 4 in the row, expected at most 8"),
        ({"operand": 2}, "slot 0: found leaf number 2, expected one of 2"),
        ({"operand": -1}, "slot 0: found leaf number -1, expected one of 2"),
    ],
)
def test_a_slot_that_does_not_fit(change: dict[str, int], message: str) -> None:
    slot = dataclasses.replace(LEAF, **change)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message) as caught:
        pack([slot])
    assert "INVALID_ARGUMENT" in str(caught.value)


def test_slots_that_overlap() -> None:
    slots = [LEAF, dataclasses.replace(LEAF, row_offset=3)]
    message = "slot 1: starts at 3 in the row, expected 4 or more"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        pack(slots)


def test_a_leaf_of_integers() -> None:
    message = "slot 0: leaf: found XLA element type 4, expected F32, BF16"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        pack([LEAF], leaf=np.ones(7, np.int32))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"format": np.int64(0)}, "format: found 0, expected 1: another version"),
        ({"extra": np.int64(0)}, "Wrong number of attributes: expected 4 but got 5"),
    ],
)
def test_attributes_of_another_version(
    attributes: dict[str, np.int64], message: str
) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.call(
            "jaxzero_pack",
            [((1, 4), "float32")],
            [ONES],
            slots=calls.table([LEAF]),
            group_size=np.int64(1),
            pre_scale=np.float64(1),
            **attributes,
        )


def test_a_table_of_the_wrong_width() -> None:
    attributes = {"group_size": np.int64(1), "pre_scale": np.float64(1)}
    message = "slots: found 9 numbers, expected rows of 10"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.call(
            "jaxzero_pack",
            [((1, 4), "float32")],
            [ONES],
            slots=np.zeros(9, np.int64),
            **attributes,
        )


@pytest.mark.parametrize(
    ("num_rows", "message"),
    [
        (0, "rows: found 0 rows, expected at least 1"),
        (3, "rows: found 8 components, expected 3 equal rows"),
    ],
)
def test_rows_that_do_not_divide(num_rows: int, message: str) -> None:
    rows = np.ones(8, np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.unpack([SHARD], rows, ["float32"], num_rows=num_rows)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (np.ones(5), {}, "slot 0: base has 5 components, expected 4"),
        (np.ones(4), {}, "slot 0: base is float64, expected float32 as its result"),
        (
            np.ones(4, np.float32),
            {"count": 3},
            "slot 0: writes 3 of 4 components, expected a base that shares memory",
        ),
        (
            np.ones(4, np.float32),
            {"base": 1},
            "slot 0: found base number 1, expected one of 1",
        ),
        (
            np.ones(4, np.float32),
            {"base": -1},
            "slot 0: found base number -1, expected one of 1",
        ),
    ],
    ids=["size", "dtype", "unshared", "missing", "accumulate_without"],
)
def test_a_base_that_does_not_fit(
    base: np.ndarray, change: dict[str, int], message: str
) -> None:
    slot = dataclasses.replace(SHARD, base=0, accumulate=1)
    slot = dataclasses.replace(slot, **change)
    rows = np.ones(4, np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.unpack([slot], rows, ["float32"], [base], aliases={})


def test_rows_that_would_be_overwritten_before_they_are_read() -> None:
    slot = dataclasses.replace(SHARD, count=2, row_offset=2)
    message = "slot 0: shard 0 shares memory with the rows, expected one row of"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.unpack([slot], np.ones(4, np.float32), ["float32"], aliases={0: 0})


def test_a_missing_token() -> None:
    message = "stats: found 4 components of XLA element type 11, expected 2 of F32"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.call(
            "jaxzero_unpack",
            [((4,), "float32")],
            [np.ones(4, np.float32)],
            slots=calls.table([SHARD]),
            num_rows=np.int64(1),
            divisor=np.float64(1),
            with_stats=np.int64(0),
        )


@pytest.mark.parametrize("kind", ["pack", "unpack_leaves"])
def test_a_leaf_in_the_memory_of_the_bucket(kind: str) -> None:
    """Elements move, and some would be overwritten before they are read."""
    slot = Slot(outer=2, length=4, chunk=2)
    results: list[Any] = [((8,), "float32")]
    attributes: dict[str, Any] = {}
    if kind == "pack":
        attributes = {"pre_scale": np.float64(1)}
    else:
        results.append(((1,), "float32"))
    message = "slot 0: leaf 0 shares memory with the bucket, expected its own"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.call(
            f"jaxzero_{kind}",
            results,
            [np.arange(8, dtype=np.float32)],
            {0: 0},
            slots=calls.table([slot]),
            group_size=np.int64(2),
            **attributes,
        )


def test_a_base_in_the_memory_of_another_result() -> None:
    slots = [
        Slot(operand=0, length=4, chunk=4),
        Slot(operand=1, length=4, chunk=4, row_offset=4, base=0, accumulate=1),
    ]
    message = "slot 1: its base shares memory with the result of slot 0"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.unpack(
            slots,
            np.ones(8, np.float32),
            ["float32"] * 2,
            [np.ones(4, np.float32)],
            aliases={1: 0},
        )


def test_more_empty_rows_than_sizes_can_count() -> None:
    message = "rows: found 4611686018427387904 rows, expected at least 1 and at most"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        calls.unpack(
            [Slot(length=0, chunk=0)],
            np.ones(0, np.float32),
            ["float32"],
            num_rows=1 << 62,
        )
