"""Every layout against NumPy: which elements a rank owns, and where padding is."""

import itertools
import math

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxzero._cut import cut_leaf

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
RANKS = st.integers(1, 8)


@st.composite
def cuts(draw):
    """Draws a shape, a cut that fits it, and a number of ranks."""
    shape = draw(SHAPES)
    options = [None, "flat", "whole", *range(-len(shape), len(shape))]
    return shape, draw(st.sampled_from(options)), draw(RANKS)


def shard_by_block(leaf: np.ndarray, cut, rank: int) -> np.ndarray:
    """Reads a shard off the (outer, length, inner) block that the plan describes."""
    block = leaf.reshape(cut.outer, cut.length, cut.inner)
    own = block[:, rank * cut.chunk : (rank + 1) * cut.chunk]
    padded = np.zeros((cut.outer, cut.chunk, cut.inner), leaf.dtype)
    padded[:, : own.shape[1]] = own
    return padded.reshape(cut.shard_shape)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cuts())
def test_block_view_gives_the_shards_of_the_oracle(case):
    shape, option, ranks = case
    leaf = np.arange(1, math.prod(shape) + 1, dtype=np.int64).reshape(shape)
    cut = cut_leaf(option, "['w']", shape, ranks)
    assert cut.ranks == (1 if option == "whole" else ranks)
    for rank in range(cut.ranks):
        np.testing.assert_array_equal(
            shard_by_block(leaf, cut, rank),
            oracle.shard_leaf(leaf, ranks, rank, option),
        )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cuts())
def test_sizes_agree_with_each_other(case):
    shape, option, ranks = case
    cut = cut_leaf(option, "['w']", shape, ranks)
    assert cut.outer * cut.length * cut.inner == math.prod(shape)
    assert cut.shard_numel == math.prod(cut.shard_shape)
    assert cut.even == (cut.shard_numel * cut.ranks == math.prod(shape)) or 0 in shape
    assert math.prod(cut.global_shape) == cut.shard_numel * cut.ranks
    if option == "whole":
        assert cut.global_shape == shape
    # No rank pads more than a chunk, except where there are more ranks than positions.
    assert 0 <= cut.chunk * cut.ranks - cut.length < max(cut.ranks, 1)


@pytest.mark.parametrize(
    ("shape", "ranks", "layout", "shard", "reason"),
    [
        ((8, 3), 4, "rows", (2, 3), "dim 0 (8) divisible by 4"),
        ((7, 4), 4, "flat", (7,), "dim 0 (7) not divisible by 4"),
        ((73,), 4, "flat", (19,), "dim 0 (73) not divisible by 4"),
        ((), 4, "flat", (1,), "scalar"),
        ((8, 0), 4, "flat", (0,), "empty"),
        ((0, 8), 4, "flat", (0,), "empty"),
        ((5, 2), 1, "rows", (5, 2), "dim 0 (5) divisible by 1"),
    ],
)
def test_default_is_rows_where_they_divide(shape, ranks, layout, shard, reason):
    cut = cut_leaf(None, "['w']", shape, ranks)
    assert (cut.layout, cut.shard_shape, cut.reason) == (layout, shard, reason)


@pytest.mark.parametrize(
    ("option", "shape", "least", "layout"),
    [
        (None, (8, 3), 24, "rows"),
        (None, (8, 3), 25, "whole"),
        (None, (), 1, "flat"),
        (None, (), 2, "whole"),
        (None, (0, 3), 0, "flat"),
        (None, (0, 3), 1, "whole"),
        ("flat", (8, 3), 25, "flat"),
        (1, (8, 3), 25, "dim=1"),
        (lambda path, shape: None, (8, 3), 25, "whole"),
    ],
)
def test_small_leaves_stay_whole_unless_asked_for(option, shape, least, layout):
    cut = cut_leaf(option, "['w']", shape, 4, least)
    assert cut.layout == layout
    small = cut.reason == f"fewer than min_shard_numel={least} elements"
    assert small == (layout == "whole")


@pytest.mark.parametrize(
    ("option", "layout", "shard"),
    [
        ("flat", "flat", (12,)),
        ("whole", "whole", (6, 8)),
        (0, "dim=0", (2, 8)),
        (1, "dim=1", (6, 2)),
        (-1, "dim=1", (6, 2)),
        (np.int64(1), "dim=1", (6, 2)),
    ],
    ids=str,
)
def test_asked_for(option, layout, shard):
    cut = cut_leaf(option, "['w']", (6, 8), 4)
    assert (cut.layout, cut.shard_shape, cut.reason) == (layout, shard, "asked for")


def test_dimension_0_that_divides_is_rows():
    assert cut_leaf(0, "['w']", (8, 3), 4).layout == "rows"


def test_callable_is_given_path_and_shape():
    seen = []

    def choose(path, shape):
        seen.append((path, shape))
        return 1

    cut = cut_leaf(choose, "['w']", (6, 8), 4)
    assert seen == [("['w']", (6, 8))]
    assert (cut.layout, cut.reason) == ("dim=1", "chosen by the callable")


def test_callable_may_leave_it_to_the_default():
    cut = cut_leaf(lambda path, shape: None, "['w']", (8, 3), 4)
    assert (cut.layout, cut.reason) == ("rows", "dim 0 (8) divisible by 4")


def test_cut_depends_on_nothing_else():
    """Equal arguments give equal, hashable cuts."""
    arguments = itertools.product([None, "flat", "whole", 0], [(8, 3), (5,)], [1, 3, 4])
    for option, shape, ranks in arguments:
        first = cut_leaf(option, "['a']", shape, ranks)
        second = cut_leaf(option, "['b']", shape, ranks)
        assert first == second and hash(first) == hash(second)


def test_huge_leaf_is_cut_without_overflow():
    cut = cut_leaf(None, "['w']", (2**33 + 8, 2), 8)
    assert cut.shard_shape == (2**30 + 1, 2)
    assert cut.shard_numel == 2**31 + 2


@pytest.mark.parametrize(
    ("option", "shape", "error", "message"),
    [
        (2, (8, 3), ValueError, "is dimension 2, but its shape (8, 3) has 2 dim"),
        (-3, (8, 3), ValueError, "expected a number from -2 to 1, or 'flat' or"),
        (0, (), ValueError, "expected 'flat' or 'whole'"),
        ("rows", (8, 3), ValueError, "is 'rows'; expected None, 'flat', 'whole'"),
        (1.0, (8, 3), TypeError, "is 1.0; expected None, 'flat', 'whole'"),
        (False, (8, 3), TypeError, "is False; expected None, 'flat', 'whole'"),
        ([0], (8, 3), TypeError, "is [0]; expected None, 'flat', 'whole'"),
        (lambda path, shape: "row", (8,), ValueError, "is 'row'; expected None"),
    ],
    ids=["above", "below", "scalar", "word", "float", "bool", "list", "callable"],
)
def test_cut_that_does_not_fit(option, shape, error, message):
    with pytest.raises(error) as caught:
        cut_leaf(option, "['net']['w']", shape, 4)
    assert "leaf ['net']['w']" in str(caught.value)
    assert message in str(caught.value)
