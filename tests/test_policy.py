"""What a Policy takes, refuses, and says."""

import dataclasses
import fractions
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxzero import Policy


def message_of(error, **fields):
    """Returns what a Policy of these fields says."""
    with pytest.raises(error) as caught:
        Policy(**fields)
    return str(caught.value)


def test_equal_policies_are_one_cache_key():
    """Dtypes and numbers given in different ways make the same policy."""
    ours = Policy(comm_dtype="bfloat16", divide_by=8, bucket_bytes=1 << 20)
    theirs = Policy(
        comm_dtype=jnp.bfloat16,
        divide_by=np.float32(8),
        bucket_bytes=np.int64(1 << 20),
    )
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert repr(ours) == repr(theirs)


def test_policy_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().op = "sum"
    with pytest.raises(TypeError):
        Policy("sum")


def test_policy_survives_pickling_and_replacement():
    policy = Policy(comm_dtype="bfloat16", divide_by=3)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy, op="sum").comm_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("policy", "divisor"),
    [
        (Policy(), 8.0),
        (Policy(op="sum"), 1.0),
        (Policy(divide_by=300), 300.0),
        (Policy(op="sum", divide_by=300), 300.0),
        (Policy(divide_by=-0.5), -0.5),
    ],
    ids=["mean", "sum", "divide_by", "sum_divide_by", "negative"],
)
def test_there_is_one_divisor(policy, divisor):
    assert policy.divisor(8) == divisor


@pytest.mark.parametrize("field", ["comm_dtype", "shard_dtype", "compute_dtype"])
@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("float32", "float32"),
        (jnp.bfloat16, "bfloat16"),
        (np.dtype("float16"), "float16"),
        (float, "float64"),
        ("complex64", "float32"),
        ("complex128", "float64"),
        (None, None),
    ],
    ids=str,
)
def test_dtypes_are_kept_by_the_name_of_their_components(field, given, stored):
    assert getattr(Policy(**{field: given}), field) == stored


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("op", "'mean', 'sum'"),
        ("reduction", "'native', 'float32'"),
        ("transport", "'auto', 'nccl', 'xla'"),
    ],
)
@pytest.mark.parametrize("value", ["avg", None, 1, ["mean"]], ids=repr)
def test_unknown_word_lists_the_known(field, choices, value):
    message = message_of(ValueError, **{field: value})
    assert message == f"Policy {field}={value!r}; expected one of {choices}."


@pytest.mark.parametrize("field", ["comm_dtype", "shard_dtype", "compute_dtype"])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("int8", "='int8' cannot hold sums of gradients"),
        (jnp.float8_e4m3fn, "='float8_e4m3fn' cannot hold sums of gradients"),
        (bool, "='bool' cannot hold sums of gradients"),
        ("bf16", "='bf16' is no dtype"),
        (3.5, "=3.5 is no dtype"),
    ],
    ids=str,
)
def test_dtype_that_cannot_hold_sums(field, value, found):
    message = message_of(TypeError, **{field: value})
    assert f"Policy {field}{found}" in message
    assert "expected one of float32, bfloat16, float16, float64, complex64" in message


@pytest.mark.parametrize(
    ("field", "least", "value"),
    [("bucket_bytes", 1, 0), ("flush_bytes", 1, -1), ("direct_bytes", 0, -1)],
)
def test_size_below_the_least(field, least, value):
    message = message_of(ValueError, **{field: value})
    assert f"Policy {field}={value}; expected at least {least} (bytes)" in message
    assert "or None for the default" in message


@pytest.mark.parametrize("field", ["bucket_bytes", "direct_bytes", "flush_bytes"])
@pytest.mark.parametrize("value", [1.5, 1e6, True, "1 MiB"], ids=repr)
def test_size_that_is_no_whole_number(field, value):
    message = message_of(TypeError, **{field: value})
    assert message == f"Policy {field}={value!r}; expected a whole number of bytes."


def test_overlap_is_a_bool():
    assert message_of(TypeError, overlap=1) == (
        "Policy overlap=1; expected True or False."
    )


@pytest.mark.parametrize("value", [1, 1 << 40], ids=["byte", "tebibyte"])
def test_any_positive_size_is_taken(value):
    assert Policy(bucket_bytes=value, direct_bytes=value).bucket_bytes == value


@pytest.mark.parametrize("value", [0, 0.0, float("inf"), float("nan")], ids=repr)
def test_divisor_that_is_not_finite_or_zero(value):
    message = message_of(ValueError, divide_by=value)
    assert f"Policy divide_by={value!r}; expected a finite number" in message


@pytest.mark.parametrize("value", ["3", [1], 1j, None.__class__], ids=repr)
def test_divisor_that_is_no_number(value):
    message = message_of(TypeError, divide_by=value)
    assert f"Policy divide_by={value!r}; expected a number" in message


def test_divisor_may_be_any_real_number():
    for value in (3, np.int64(3), jnp.float32(3), fractions.Fraction(3)):
        assert Policy(divide_by=value).divide_by == 3.0


def test_traced_divisor_says_how_to_scale_instead():
    with pytest.raises(TypeError) as caught:
        jax.eval_shape(lambda d: Policy(divide_by=d), 2.0)
    assert "expected a number known at trace time" in str(caught.value)
    assert "use op='sum' and scale the shards" in str(caught.value)
