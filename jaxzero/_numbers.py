"""Numbers that users give, checked in one way."""

import math
from typing import Any


def whole_number(what: str, value: Any, of: str = "") -> int:
    """Returns a whole number.

    Args:
      what: what has this value, such as "zero3: accumulate".
      value: what was given.
      of: what is counted, such as "bytes".

    Raises:
      TypeError: for anything else; a bool is no number.
    """
    try:
        if _is_bool(value):
            raise TypeError
        number: int = value.__index__()
    except (AttributeError, TypeError) as error:
        counted = f" of {of}" if of else ""
        raise TypeError(
            f"{what}={value!r}; expected a whole number{counted}."
        ) from error
    return number


def finite_number(what: str, value: Any, expected: str, fix: str = "") -> float:
    """Returns a finite number that is known at trace time.

    Args:
      what: what has this value, such as "zero3: clip_norm".
      value: what was given.
      expected: the numbers that fit, such as "a finite number above 0".
      fix: what to do, a sentence.

    Raises:
      TypeError: for what is no number; neither a bool nor a string of digits is.
      ValueError: for an infinity or NaN.
    """
    fix = f" {fix}" if fix else ""
    try:
        if _is_bool(value):
            raise TypeError
        # Not float(value), which takes strings of digits too.
        number: float = value.__float__()
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{what}={value!r}; expected a number known at trace time: {expected}.{fix}"
        ) from error
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what}={value!r}; expected {expected}.{fix}")
    return number


def _is_bool(value: Any) -> bool:
    # NumPy's bool is none of Python's.
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
