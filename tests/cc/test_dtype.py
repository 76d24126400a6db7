"""Conversions between element types, through the calls that use them."""

import itertools

import numpy as np
import pytest
from cc.calls import Slot

from cc import calls

INTEGER = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}


def convert(values: calls.Array, dtype: str) -> calls.Array:
    slot = Slot(length=values.size, chunk=values.size)
    return calls.pack([slot], [values], dtype, group_size=1)[0]


def patterns(dtype: str) -> calls.Array:
    """All values of a 16-bit dtype."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.dtype(dtype))


def finite_and_sorted(dtype: str) -> np.ndarray:
    """All finite values of a 16-bit dtype from zero on, in float64."""
    values = calls.wide(patterns(dtype)[: 1 << 15])
    return values[np.isfinite(values)]


def midpoints(dtype: str) -> np.ndarray:
    """What lies halfway between neighbours, the one above the largest included."""
    values = finite_and_sorted(dtype)
    values = np.append(values, 2 * values[-1] - values[-2])
    return (values[1:] + values[:-1]) / 2


@pytest.mark.parametrize("to", calls.REAL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern_is_converted(dtype: str, to: str) -> None:
    values = patterns(dtype)
    expected = calls.nearest(calls.wide(values), to)
    calls.assert_same(convert(values, to), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_equal_dtypes_keep_every_bit_of_a_nan(dtype: str) -> None:
    bits = np.dtype(dtype).itemsize * 8
    quiet = {"float16": 0x7E2A, "bfloat16": 0x7FEA, "float32": 0x7FC01234}
    pattern = quiet.get(dtype, 0x7FF8000012345678)
    integer = np.dtype(f"uint{bits}")
    values = np.full(5, pattern, integer).view(np.dtype(dtype))
    np.testing.assert_array_equal(convert(values, dtype).view(integer), pattern)


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_float32_rounds_to_nearest_even(to: str) -> None:
    halfway = midpoints(to).astype(np.float32)
    near = [np.nextafter(halfway, np.float32(s) * np.float32(np.inf)) for s in (1, -1)]
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    values = np.concatenate([halfway, *near, bits.view(np.float32)])
    values = np.concatenate([values, -values])
    expected = calls.nearest(calls.wide(values), to)
    calls.assert_same(convert(values, to), expected)


@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32"])
def test_float64_rounds_once(to: str) -> None:
    """A value just above a tie would become the tie if it passed through float32."""
    if to == "float32":
        some = midpoints("bfloat16").astype(np.float32)
        halfway = (some.astype(np.float64) + np.nextafter(some, np.float32(9))) / 2
    else:
        halfway = midpoints(to)
    near = [np.nextafter(halfway, s * np.inf) for s in (1, -1)]
    extreme = [0.0, 5e-324, 1e-60, 1e60, 1.7e308, np.inf, np.nan]
    rng = np.random.default_rng(1)
    spread = rng.standard_normal(1 << 16) * 2.0 ** rng.integers(-160, 140, 1 << 16)
    values = np.concatenate([halfway, *near, extreme, spread])
    values = np.concatenate([values, -values])
    calls.assert_same(convert(values, to), calls.nearest(values, to))


def test_the_oracle_agrees_with_numpy() -> None:
    values = np.random.default_rng(2).standard_normal(1 << 16) * 1e-4
    for dtype, scale in itertools.product(["float16", "float32"], [1.0, 1e-3]):
        scaled = values * scale
        expected = scaled.astype(dtype).astype(np.float64)
        np.testing.assert_array_equal(calls.nearest(scaled, dtype), expected)
