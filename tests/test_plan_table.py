"""What `print(plan)` shows."""

import jax
import pytest

import jaxzero
from jaxzero import Policy
from jaxzero._plan import plan_reduce
from jaxzero._text import MAX_ROWS, format_bytes
from jaxzero._transports import ANY

TREE = {
    "embed": jax.ShapeDtypeStruct((1024, 64), "float32"),
    "norm": jax.ShapeDtypeStruct((65,), "float32"),
    "scale": jax.ShapeDtypeStruct((), "bfloat16"),
    "unused": jax.ShapeDtypeStruct((0, 8), "float32"),
}

TABLE = """\
Plan: 4 leaves over 8 ranks, 3 collectives, sum divided by 8
  wire per rank    256.5 KiB
  of it padding    250 B (0.10%)
  peak temporary   432 B (bucket_bytes 64.0 MiB, direct_bytes 256.0 KiB)

bucket  kind    collective      dtype     leaves       row       wire
     0  direct  reduce_scatter  float32        1  32.0 KiB  256.0 KiB
     1  packed  reduce_scatter  float32        1      48 B      384 B
     2  packed  reduce_scatter  bfloat16       1      16 B      128 B

leaf        shape    dtype     layout  shard   stored    travels
['embed']   1024x64  float32   rows    128x64  float32   direct: large, read in place
['norm']    65       float32   flat    9       float32   packed: below direct_bytes
['scale']   scalar   bfloat16  flat    1       bfloat16  packed: below direct_bytes
['unused']  0x8      float32   flat    0       float32   empty: nothing to send"""


def test_plan_prints_as_a_table():
    plan = jaxzero.make_plan(TREE, 8, Policy(transport="xla"))
    assert str(plan) == TABLE


def test_table_is_deterministic():
    """It is what two ranks would compare to find where their plans differ."""
    first, second = (str(jaxzero.make_plan(TREE, 8)) for _ in range(2))
    assert first == second


def test_replicas_are_named():
    leaves = jaxzero.make_plan(TREE, 4).leaves
    plan = plan_reduce(leaves, 4, Policy(), limits=ANY.limits, replicas=2)
    assert "over 4 ranks x 2 replicas, " in str(plan)
    assert "sum divided by 8" in str(plan)


def test_long_tables_are_cut_and_say_so():
    count = MAX_ROWS + 7
    plan = jaxzero.make_plan([jax.ShapeDtypeStruct((8,), "float32")] * count, 2)
    lines = str(plan).splitlines()
    assert lines[-1] == "... 7 more"
    assert sum(line.startswith("[") for line in lines) == MAX_ROWS


def test_table_of_full_length_is_not_cut():
    tree = [jax.ShapeDtypeStruct((8,), "float32")] * MAX_ROWS
    assert "more" not in str(jaxzero.make_plan(tree, 2))


@pytest.mark.parametrize("tree", [{}, {"e": jax.ShapeDtypeStruct((0,), "float32")}])
def test_plan_with_nothing_to_send_prints(tree):
    text = str(jaxzero.make_plan(tree, 8))
    assert "0 collectives" in text
    assert "of it padding    0 B (0.00%)" in text


def test_no_line_ends_in_spaces():
    for line in str(jaxzero.make_plan(TREE, 8)).splitlines():
        assert line == line.rstrip()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (64 << 20, "64.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_bytes_have_binary_units(count, text):
    assert format_bytes(count) == text
