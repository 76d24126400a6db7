"""Names, components, and which dtypes may be summed, stored or sent."""

import ml_dtypes
import numpy as np
import pytest

from jaxzero._dtypes import (
    COMM_DTYPES,
    check_summable,
    component_bytes,
    component_dtype,
    components,
    dtype_name,
    is_supported,
    kind,
    like_kind,
)

COMPLEX = ("complex64", "complex128")
NARROW = (
    *("bool", "int4", "int8", "int32", "int64", "uint8", "uint64"),
    *("float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float32", "float32"),
        (np.float16, "float16"),
        (np.dtype("complex64"), "complex64"),
        (ml_dtypes.bfloat16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        (np.zeros(1, ml_dtypes.float8_e5m2).dtype, "float8_e5m2"),
        (">f4", "float32"),
    ],
    ids=str,
)
def test_dtypes_are_given_in_any_of_the_usual_ways(given, name):
    assert dtype_name(given) == name


@pytest.mark.parametrize("name", COMM_DTYPES + COMPLEX)
def test_supported_dtype_agrees_with_numpy(name):
    dtype = np.dtype(name)
    assert is_supported(name)
    assert components(name) == (2 if dtype.kind == "c" else 1)
    assert component_bytes(name) * components(name) == dtype.itemsize
    assert np.dtype(component_dtype(name)) == np.zeros(1, dtype).real.dtype
    assert component_dtype(name) in COMM_DTYPES


@pytest.mark.parametrize("name", NARROW)
def test_narrow_dtype_is_not_supported(name):
    assert np.dtype(name).name == name
    assert not is_supported(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32", "real floating"),
        ("bfloat16", "real floating"),
        ("float8_e4m3fn", "real floating"),
        ("complex128", "complex"),
        ("int4", "integer or boolean"),
        ("uint8", "integer or boolean"),
        ("bool", "integer or boolean"),
    ],
)
def test_kind_says_what_numbers_a_dtype_holds(name, expected):
    assert kind(name) == expected


@pytest.mark.parametrize(
    ("leaf", "precision", "expected"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float64", "float64"),
        ("float32", "complex64", "float32"),
        ("complex64", "float32", "complex64"),
        ("complex64", "complex128", "complex128"),
        ("complex128", "float32", "complex64"),
    ],
)
def test_precision_never_changes_real_to_complex_or_back(leaf, precision, expected):
    assert like_kind(leaf, precision, "['w']", "shard_dtype") == expected


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("leaf", COMPLEX)
def test_complex_leaf_has_no_16_bit_form(leaf, precision):
    with pytest.raises(TypeError) as caught:
        like_kind(leaf, precision, "['w']", "compute_dtype")
    message = str(caught.value)
    assert f"compute_dtype={precision!r} cannot hold" in message
    assert f"complex leaf ['w'] of dtype {leaf}" in message
    assert "Use compute_dtype='complex64', or give the leaf as two real" in message


@pytest.mark.parametrize("comm_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", COMM_DTYPES + COMPLEX)
def test_supported_leaf_is_summed_as_it_is(name, comm_dtype):
    assert check_summable(name, "['w']", comm_dtype) == name


@pytest.mark.parametrize("name", NARROW)
def test_narrow_leaf_is_widened_to_the_comm_dtype(name):
    assert check_summable(name, "['w']", "bfloat16") == "bfloat16"
    assert check_summable(name, "['w']", "complex64") == "float32"


@pytest.mark.parametrize("name", NARROW)
def test_narrow_leaf_is_refused_without_a_comm_dtype(name):
    with pytest.raises(TypeError) as caught:
        check_summable(name, "['w']", None)
    message = str(caught.value)
    assert f"leaf ['w'] has dtype {name}" in message
    assert "expected one of float32, bfloat16, float16, float64, complex64" in message
    assert "Policy(comm_dtype='float32')" in message


@pytest.mark.parametrize("comm_dtype", [None, "float32"])
@pytest.mark.parametrize("name", ["datetime64[s]", "float6_e2m3fn", "longdouble"])
def test_other_dtype_is_refused(name, comm_dtype):
    with pytest.raises(TypeError, match=r"leaf \['w'\] has dtype .* Convert it, or"):
        check_summable(name, "['w']", comm_dtype)
