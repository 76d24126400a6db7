"""Which dtypes travel and are stored, and the sentence for those that do not.

Every dtype that jaxzero moves is one or two real numbers, its components. The wire
and the arithmetic know components only: a complex leaf is twice as many reals.
"""

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 names with NumPy)
import numpy as np

COMM_DTYPES = ("float32", "bfloat16", "float16", "float64")
_COMPONENT_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_COMPLEX_OF_COMPONENT = {real: cplx for cplx, real in _COMPONENT_OF_COMPLEX.items()}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def dtype_name(dtype: Any) -> str:
    """Returns the NumPy name of a dtype given in any of the usual ways."""
    return str(np.dtype(dtype).name)


def component_dtype(name: str) -> str:
    """Returns the real dtype of one component of a supported dtype."""
    return _COMPONENT_OF_COMPLEX.get(name, name)


def components(name: str) -> int:
    """Returns how many reals one element holds: 2 for complex, else 1."""
    return 2 if name in _COMPONENT_OF_COMPLEX else 1


def component_bytes(name: str) -> int:
    """Returns the bytes of one component of a supported dtype."""
    return _ITEMSIZE[component_dtype(name)]


def is_supported(name: str) -> bool:
    """Says whether leaves of this dtype are packed and summed as they are."""
    return component_dtype(name) in _ITEMSIZE


def kind(name: str) -> str:
    """Returns what sort of numbers a dtype holds, in words."""
    if name.startswith("complex"):
        return "complex"
    if name.startswith(("float", "bfloat")):
        return "real floating"
    return "integer or boolean"


def like_kind(leaf: str, precision: str, path: str, option: str) -> str:
    """Returns `precision` in the kind (real or complex) of the leaf.

    Policy dtypes say how precise a component is; they never turn a complex leaf
    into a real one or back, because that would drop or invent imaginary parts.

    Args:
      leaf: dtype name of the leaf.
      precision: dtype name asked for, real or complex.
      path: key path of the leaf, for the message.
      option: name of the option that asks, for the message.

    Raises:
      TypeError: if the leaf is complex and no complex dtype has this precision.
    """
    real = component_dtype(precision)
    if components(leaf) == 1:
        return real
    if real not in _COMPLEX_OF_COMPONENT:
        raise TypeError(
            f"{option}={precision!r} cannot hold the complex leaf {path} of dtype "
            f"{leaf}: no complex dtype has {real} components. Use "
            f"{option}='complex64', or give the leaf as two real leaves."
        )
    return _COMPLEX_OF_COMPONENT[real]


def check_summable(name: str, path: str, comm_dtype: str | None) -> str:
    """Returns the dtype in which a leaf enters the reduction.

    Integers, booleans and 8-bit floats are never summed as they are, because their
    sums wrap or saturate unnoticed. With a `comm_dtype` they are first converted to
    it.

    Raises:
      TypeError: for such a leaf without a `comm_dtype`, and for any other dtype.
    """
    if is_supported(name):
        return name
    narrow = name.startswith(("int", "uint", "float8", "float4", "bool"))
    if narrow and comm_dtype is not None:
        return component_dtype(comm_dtype)
    if narrow:
        raise TypeError(
            f"leaf {path} has dtype {name}, whose sums would wrap or saturate "
            f"unnoticed; expected one of {', '.join(COMM_DTYPES)}, complex64 or "
            f"complex128. To convert it before the sum, set "
            f"Policy(comm_dtype='float32'), or leave it out of the gradients."
        )
    raise TypeError(
        f"leaf {path} has dtype {name}; expected one of {', '.join(COMM_DTYPES)}, "
        f"complex64 or complex128. Convert it, or leave it out of the gradients."
    )
