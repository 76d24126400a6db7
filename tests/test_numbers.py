"""What counts as a number, whoever asks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxzero._numbers import finite_number, whole_number

EXPECTED = "a finite number above 0"


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3), jnp.int32(3)])
def test_whole_numbers_of_any_library_are_taken(value: Any) -> None:
    found = whole_number("call: count", value)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.True_, np.ones(2, int)])
def test_what_is_no_whole_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"call: count=.*a whole number of bytes"):
        whole_number("call: count", value, "bytes")


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), jnp.float32(2)])
def test_numbers_of_any_library_are_taken(value: Any) -> None:
    found = finite_number("call: limit", value, EXPECTED)
    assert found == 2 and type(found) is float


@pytest.mark.parametrize("value", ["2", None, 2j, True, np.True_, [2.0], np.ones(2)])
def test_what_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"call: limit=.*above 0. Say so"):
        finite_number("call: limit", value, EXPECTED, "Say so.")


@pytest.mark.parametrize(
    "value",
    [np.inf, -np.inf, np.nan, np.float16(np.inf), pytest.param(10**400, id="10**400")],
)
def test_a_number_that_is_not_finite_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=f"call: limit=.*expected {EXPECTED}. Say so"):
        finite_number("call: limit", value, EXPECTED, "Say so.")


def test_a_traced_number_is_named() -> None:
    with pytest.raises(TypeError, match="known at trace time"):
        jax.jit(lambda x: finite_number("call: limit", x, EXPECTED))(1.0)
    with pytest.raises(TypeError, match="whole number"):
        jax.jit(lambda x: whole_number("call: count", x))(1)
