"""The plan of random trees: every leaf travels once, in bounds, and is accounted for.

No device and no native module: shapes stand for arrays, so that leaves may be larger
than memory.
"""

import dataclasses
import hashlib
import math
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxzero
from jaxzero import Policy
from jaxzero._cut import cut_leaf
from jaxzero._dtypes import component_bytes, component_dtype, components
from jaxzero._plan import (
    Bucket,
    LeafSpec,
    Limits,
    Move,
    Plan,
    ReducePlan,
    plan_gather,
    plan_reduce,
)
from jaxzero._plan.planner import ALIGN_BYTES, float16_pre_scale
from jaxzero._transports import ANY, GPU

DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128")
WIRES = ("float32", "bfloat16", "float16", "float64")
COLLECTIVES = {"packed", "direct"}

examples = settings(max_examples=150, deadline=None, derandomize=True)


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


# Random plans.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is drawn for one plan."""

    leaves: tuple[LeafSpec, ...]
    group_size: int
    replicas: int
    policy: Policy
    limits: Limits
    accumulates: bool

    def plan(self) -> ReducePlan:
        return plan_reduce(
            self.leaves,
            self.group_size,
            self.policy,
            limits=self.limits,
            replicas=self.replicas,
            accumulates=self.accumulates,
        )

    def gather(self) -> Plan:
        return plan_gather(
            self.leaves, self.group_size, self.policy, limits=self.limits
        )


@st.composite
def leaf_specs(draw: Any, index: int, group_size: int, huge: bool) -> LeafSpec:
    dims = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    if huge and draw(st.booleans()):
        dims = (draw(st.sampled_from([2**33 - 1, 2**33, 2**33 + 8])), *dims[:1])
    dtype = draw(st.sampled_from(DTYPES))
    same_kind = [d for d in DTYPES if components(d) == components(dtype)]
    option = draw(st.sampled_from([None, None, "flat", "whole", *range(len(dims))]))
    path = f"[{index}]"
    return LeafSpec(
        path=path,
        shape=dims,
        dtype=dtype,
        shard_dtype=draw(st.sampled_from(same_kind)),
        cut=cut_leaf(option, path, dims, group_size),
        summed=draw(st.integers(0, 7)) == 0,
        varying=draw(st.sampled_from([(), (), ("model",)])),
    )


SIZES = st.integers(1, 200) | st.sampled_from([255, 256, 257, 4096, 1 << 20, 1 << 30])


@st.composite
def cases(draw: Any, may_be_huge: bool = True) -> Case:
    group_size = draw(st.integers(1, 8))
    count = draw(st.integers(0, 12))
    bucket_bytes = draw(st.none() | SIZES)
    # Leaves beyond 32-bit sizes only where they make few buckets.
    huge = may_be_huge and bucket_bytes == 1 << 30
    direct = st.none() | st.integers(0, 400) | st.just(1 << 40)
    return Case(
        leaves=tuple(draw(leaf_specs(i, group_size, huge)) for i in range(count)),
        group_size=group_size,
        replicas=draw(st.integers(1, 3)),
        policy=Policy(
            comm_dtype=draw(st.none() | st.sampled_from(WIRES)),
            bucket_bytes=bucket_bytes,
            direct_bytes=draw(direct),
            reduction=draw(st.sampled_from(["native", "float32"])),
            op=draw(st.sampled_from(["mean", "sum"])),
        ),
        limits=draw(st.sampled_from([ANY.limits, GPU.limits])),
        accumulates=draw(st.booleans()),
    )


BOTH = pytest.mark.parametrize(
    "planned", [Case.plan, Case.gather], ids=["reduce", "gather"]
)


def row_limit(plan: Plan, bucket: Bucket) -> int:
    """Returns the bytes that a row may have: an equal share, at least one unit."""
    return max(ALIGN_BYTES, plan.limits.bucket_bytes // bucket.send_rows)


def shard_bytes(plan: Plan, bucket: Bucket, leaf: int) -> int:
    numel = plan.leaves[leaf].shard_components
    return numel * component_bytes(bucket.comm_dtype)


@BOTH
@examples
@given(case=cases())
def test_every_component_of_every_shard_travels_once_and_in_order(planned, case):
    plan = planned(case)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for bucket in plan.buckets:
        for slot in bucket.slots:
            pieces.setdefault(slot.leaf, []).append((slot.begin, slot.count))
    for index, leaf in enumerate(plan.leaves):
        if plan.routes[index].move == Move.EMPTY:
            assert index not in pieces
            continue
        position = 0
        for begin, count in pieces[index]:
            assert begin == position
            assert count > 0
            position += count
        assert position == leaf.shard_components


@BOTH
@examples
@given(case=cases())
def test_slots_are_aligned_in_tree_order_and_do_not_overlap(planned, case):
    for bucket in planned(case).buckets:
        size = component_bytes(bucket.comm_dtype)
        end = 0
        for slot in bucket.slots:
            start = slot.row_offset * size
            assert start % ALIGN_BYTES == 0
            assert 0 <= start - end < ALIGN_BYTES, "no gap but the alignment"
            end = start + slot.count * size
        assert end <= bucket.row_bytes
        if bucket.kind == "packed":
            assert bucket.row_bytes - end < ALIGN_BYTES
            assert bucket.row_bytes % ALIGN_BYTES == 0
        else:
            assert bucket.row_bytes == end
        leaves = [slot.leaf for slot in bucket.slots]
        assert leaves == sorted(set(leaves))


@BOTH
@examples
@given(case=cases())
def test_send_buffer_is_within_bucket_bytes(planned, case):
    """But for one aligned unit per row, below which nothing can travel."""
    plan = planned(case)
    for bucket in plan.buckets:
        if bucket.kind == "packed":
            assert bucket.row_bytes <= row_limit(plan, bucket)
            least = ALIGN_BYTES * bucket.send_rows
            assert bucket.send_bytes <= max(plan.limits.bucket_bytes, least)
        else:
            assert bucket.send_bytes == 0


@BOTH
@examples
@given(case=cases())
def test_only_leaves_larger_than_a_bucket_are_split(planned, case):
    plan = planned(case)
    count = Counter(slot.leaf for bucket in plan.buckets for slot in bucket.slots)
    for bucket in plan.buckets:
        for slot in bucket.slots:
            split = count[slot.leaf] > 1
            limit = row_limit(plan, bucket) // ALIGN_BYTES * ALIGN_BYTES
            fits = shard_bytes(plan, bucket, slot.leaf) <= limit
            if bucket.kind == "packed":
                assert split == (slot.count < plan.leaves[slot.leaf].shard_components)
                assert not (split and fits)
            else:
                assert not split


@examples
@given(cases())
def test_leaves_share_a_bucket_only_if_they_agree(case):
    plan = case.plan()
    for bucket in plan.buckets:
        specs = [plan.leaves[slot.leaf] for slot in bucket.slots]
        assert {spec.whole for spec in specs} == {bucket.whole}
        assert {spec.varying for spec in specs} == {bucket.varying}
        if bucket.kind != "packed":
            assert len(specs) == 1
        wire = case.policy.comm_dtype
        if (
            bucket.kind != "local"
            and wire is None
            and case.policy.reduction != "float32"
        ):
            assert {component_dtype(s.dtype) for s in specs} == {bucket.comm_dtype}


@examples
@given(cases())
def test_buckets_are_filled_before_another_is_opened(case):
    """Two neighbours of one kind do not fit together, so no bucket is wasted."""
    plan = case.plan()
    last: dict[Any, Bucket] = {}
    for bucket in plan.buckets:
        if bucket.kind != "packed":
            continue
        key = (bucket.collective, bucket.comm_dtype, bucket.whole, bucket.varying)
        if key in last:
            before = last[key]
            limit = row_limit(plan, bucket) // ALIGN_BYTES * ALIGN_BYTES
            first = shard_bytes(plan, bucket, bucket.slots[0].leaf)
            if first <= limit:
                assert before.row_bytes + first > limit
            else:
                assert before.row_bytes == limit
        last[key] = bucket


@examples
@given(cases())
def test_collective_follows_layout_and_mesh(case):
    plan = case.plan()
    for bucket in plan.buckets:
        leaf = plan.leaves[bucket.slots[0].leaf]
        local = leaf.summed or case.group_size * case.replicas == 1
        assert (bucket.kind == "local") == local
        if local:
            expected = "none"
        elif leaf.whole or case.group_size == 1:
            expected = "all_reduce"
        else:
            expected = "reduce_scatter"
        assert bucket.collective == expected
        if bucket.kind in COLLECTIVES:
            scatters = expected == "reduce_scatter"
            assert bucket.send_rows == (case.group_size if scatters else 1)
            summed = scatters and case.policy.reduction == "float32"
            assert bucket.recv_rows == (case.group_size if summed else 1)


@examples
@given(cases())
def test_direct_leaf_is_large_even_contiguous_and_sent_as_it_is(case):
    plan = case.plan()
    received = 0
    for bucket in plan.buckets:
        if bucket.kind != "direct":
            continue
        (slot,) = bucket.slots
        leaf = plan.leaves[slot.leaf]
        assert bucket.send_rows * bucket.row_bytes >= plan.limits.direct_bytes
        assert component_dtype(leaf.dtype) == bucket.comm_dtype
        assert leaf.cut.even
        assert leaf.cut.outer == 1 or leaf.cut.ranks == 1
        assert bucket.pre_scale == 1.0
        if case.limits.widens_bfloat16:
            assert bucket.comm_dtype != "bfloat16"
        if bucket.in_place:
            assert not case.accumulates
            assert component_dtype(leaf.shard_dtype) == bucket.comm_dtype
            assert bucket.recv_rows == 1
        received += bucket.recv_bytes
    assert received <= plan.limits.bucket_bytes


@examples
@given(cases())
def test_only_float16_sums_are_scaled_before(case):
    for bucket in case.plan().buckets:
        count = case.group_size * case.replicas
        sums_on_the_wire = bucket.kind != "local" and bucket.recv_rows == 1
        if bucket.comm_dtype == "float16" and sums_on_the_wire:
            assert bucket.pre_scale == float16_pre_scale(count)
        else:
            assert bucket.pre_scale == 1.0


@BOTH
@examples
@given(case=cases())
def test_every_leaf_has_a_reason_that_agrees_with_how_it_travels(planned, case):
    plan = planned(case)
    kinds = {slot.leaf: b.kind for b in plan.buckets for slot in b.slots}
    assert len(plan.reasons) == len(plan.leaves)
    for index, reason in enumerate(plan.reasons):
        kind, _, why = reason.partition(": ")
        assert kind == kinds.get(index, "empty")
        assert why


@examples
@given(cases())
def test_route_says_what_the_buckets_of_a_leaf_do(case):
    moves = {
        ("reduce_scatter", False): Move.SCATTER,
        ("all_reduce", False): Move.WHOLE,
        ("none", True): Move.OWN,
        ("none", False): Move.ALONE,
    }
    plan = case.plan()
    for bucket in plan.buckets:
        for slot in bucket.slots:
            summed = bucket.collective == "none" and plan.leaves[slot.leaf].summed
            expected = moves[bucket.collective, summed]
            assert plan.routes[slot.leaf].move == expected
    for bucket in case.gather().buckets:
        for slot in bucket.slots:
            stays = case.group_size == 1 or case.leaves[slot.leaf].whole
            expected = Move.OWN if stays else Move.GATHER
            assert case.gather().routes[slot.leaf].move == expected
            assert bucket.collective == ("none" if stays else "all_gather")
            assert (bucket.recv_rows, bucket.pre_scale) == (1, 1.0)


# Bytes, against a brute-force count of what each component of each row holds.


def brute_force_bytes(plan: Plan) -> tuple[int, int]:
    """Returns the bytes on the wire and those of them that hold no leaf element."""
    total = padding = 0
    for bucket in plan.buckets:
        if bucket.collective == "none":
            continue
        size = component_bytes(bucket.comm_dtype)
        holds = np.zeros((bucket.send_rows, bucket.row_numel), bool)
        for slot in bucket.slots:
            leaf = plan.leaves[slot.leaf]
            cut = leaf.cut
            inner = cut.inner * components(leaf.dtype)
            e = np.arange(slot.begin, slot.begin + slot.count)
            for row in range(bucket.send_rows):
                position = row * cut.chunk + e % (cut.chunk * inner) // inner
                columns = slice(slot.row_offset, slot.row_offset + slot.count)
                holds[row, columns] = position < cut.length
        total += holds.size * size
        padding += int((~holds).sum()) * size
    return total, padding


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases(may_be_huge=False))
def test_wire_and_padding_bytes_are_those_of_brute_force(case):
    plan = case.plan()
    assert (plan.wire_bytes, plan.padding_bytes) == brute_force_bytes(plan)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases(may_be_huge=False))
def test_what_is_no_padding_is_every_element_once(case):
    """Each leaf gives all its elements to the wire, in the comm dtype."""
    plan = case.plan()
    sent = {}
    for bucket in plan.buckets:
        if bucket.collective != "none":
            for slot in bucket.slots:
                leaf = plan.leaves[slot.leaf]
                numel = math.prod(leaf.shape) * components(leaf.dtype)
                sent[slot.leaf] = numel * component_bytes(bucket.comm_dtype)
    assert plan.wire_bytes - plan.padding_bytes == sum(sent.values())


@examples
@given(cases())
def test_temporary_bytes_are_bounded_whatever_the_tree(case):
    """One send and one receive buffer, and what direct leaves receive."""
    plan = case.plan()
    packed = [b for b in plan.buckets if b.kind == "packed"]
    direct = [b for b in plan.buckets if b.kind == "direct"]
    send_and_recv = max((b.send_bytes + b.recv_bytes for b in packed), default=0)
    assert plan.peak_temp_bytes == send_and_recv + sum(b.recv_bytes for b in direct)
    bucket = max(plan.limits.bucket_bytes, ALIGN_BYTES * case.group_size)
    assert plan.peak_temp_bytes <= 3 * bucket


@pytest.mark.parametrize("transport", ["xla", "nccl"])
@pytest.mark.parametrize("count", [1, 32, 200])
def test_temporary_bytes_do_not_grow_with_the_tree(count, transport):
    """bfloat16 leaves through a float32 wire: both buffers are temporary."""
    tree = [shape(4 << 20, dtype="bfloat16")] * count
    bucket_bytes = 64 << 20
    policy = Policy(
        comm_dtype="float32", bucket_bytes=bucket_bytes, transport=transport
    )
    plan = jaxzero.make_plan(tree, 8, policy)
    assert plan.peak_temp_bytes <= 2 * bucket_bytes


# Sizes at a limit.


def kinds(plan: Plan) -> list[str]:
    return [bucket.kind for bucket in plan.buckets]


@pytest.mark.parametrize("surplus", [-1, 0, 1])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_leaf_around_bucket_bytes(rows, surplus):
    """64 bytes a row: one bucket at the limit and above, two just below it."""
    tree = [shape(rows * 16)]
    policy = Policy(
        bucket_bytes=rows * 64 + surplus, direct_bytes=1 << 40, transport="xla"
    )
    plan = jaxzero.make_plan(tree, rows, policy)
    if rows == 1:
        assert kinds(plan) == ["local"]
    elif surplus < 0:
        assert [b.row_bytes for b in plan.buckets] == [48, 16]
        assert [s.begin for b in plan.buckets for s in b.slots] == [0, 12]
    else:
        assert [b.row_bytes for b in plan.buckets] == [64]
    assert plan.wire_bytes == (0 if rows == 1 else rows * 64)
    assert plan.padding_bytes == 0


@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_two_leaves_around_bucket_bytes(surplus):
    """They share a bucket if both fit, else each has one; none is split."""
    policy = Policy(bucket_bytes=128 + surplus, transport="xla")
    plan = jaxzero.make_plan([shape(16), shape(16)], 2, policy)
    assert len(plan.buckets) == (2 if surplus < 0 else 1)
    assert all(slot.begin == 0 for b in plan.buckets for slot in b.slots)


def test_leaf_as_large_as_a_bucket_waits_for_an_empty_one():
    policy = Policy(bucket_bytes=128)
    plan = jaxzero.make_plan([shape(4), shape(32)], 2, policy)
    assert [[slot.leaf for slot in b.slots] for b in plan.buckets] == [[0], [1]]


@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_leaf_around_direct_bytes(surplus):
    """A leaf of exactly direct_bytes is direct."""
    policy = Policy(direct_bytes=64 + surplus, transport="xla")
    plan = jaxzero.make_plan([shape(16)], 2, policy)
    assert kinds(plan) == (["packed"] if surplus > 0 else ["direct"])


@pytest.mark.parametrize("bucket_bytes", [1, 15, 16, 31])
def test_row_is_never_below_one_aligned_unit(bucket_bytes):
    plan = jaxzero.make_plan([shape(40)], 2, Policy(bucket_bytes=bucket_bytes))
    assert {b.row_bytes for b in plan.buckets} == {16}
    assert len(plan.buckets) == 5


def test_leaf_far_above_the_bucket_shares_buckets_with_its_neighbours():
    """Its columns fill what the leaf before left, and leave room for the next."""
    policy = Policy(bucket_bytes=64)
    plan = jaxzero.make_plan([shape(4), shape(96), shape(4)], 2, policy)
    leaves = [[slot.leaf for slot in bucket.slots] for bucket in plan.buckets]
    assert leaves == [[0, 1], [1], [1], [1], [1], [1], [1, 2]]
    assert {b.row_bytes for b in plan.buckets} == {32}


def test_huge_leaf_has_64_bit_offsets():
    tree = {"w": shape(2**33 + 8, dtype="bfloat16"), "v": shape(3, 2**33)}
    plan = jaxzero.make_plan(tree, 8, Policy(bucket_bytes=1 << 30))
    assert plan.leaves[1].shard_components == 2**30 + 1
    assert plan.wire_bytes - plan.padding_bytes == 2 * (2**33 + 8) + 12 * 2**33
    assert max(b.send_bytes for b in plan.buckets) == 1 << 30
    # 16 GiB and 16 bytes of bfloat16, 96 GiB of float32.
    assert plan.num_collectives == 17 + 96


# Which leaves go direct, and why not.


@pytest.mark.parametrize(
    ("leaf", "cut", "policy", "reason"),
    [
        (shape(64), None, {}, "direct: large, read in place"),
        (shape(8), None, {}, "packed: below direct_bytes"),
        (shape(64, 2), 1, {}, "packed: cut on dimension 1"),
        (shape(2, 64), 1, {}, "packed: cut on dimension 1"),
        (shape(1, 64), 1, {}, "direct: large, read in place"),
        (shape(65), None, {}, "packed: 65 not divisible by 4"),
        (shape(64), "whole", {}, "direct: large, read in place"),
        (shape(64), None, {"comm_dtype": "bfloat16"}, "packed: comm dtype bfloat16"),
        (shape(64, dtype="bfloat16"), None, {}, "packed: bfloat16 sums are widened"),
        (shape(64, dtype="float16"), None, {}, "packed: scaled before a float16 sum"),
        (shape(64, dtype="complex64"), None, {}, "direct: large, read in place"),
        (shape(0, 64), None, {}, "empty: nothing to send"),
    ],
    ids=[
        *("large", "small", "dim1", "dim1_few_rows", "dim1_of_one_row", "uneven"),
        *("whole", "other_wire", "bf16", "f16", "complex", "empty"),
    ],
)
def test_reason(leaf, cut, policy, reason):
    plan = jaxzero.make_plan(
        [leaf], 4, Policy(direct_bytes=128, transport="xla", **policy), cuts=[cut]
    )
    assert plan.reasons[0].startswith(reason)


def test_direct_leaves_that_receive_rows_share_one_bucket_of_memory():
    """Beyond bucket_bytes of rows to sum, further leaves are packed."""
    policy = Policy(
        direct_bytes=64, bucket_bytes=512, transport="xla", reduction="float32"
    )
    plan = jaxzero.make_plan([shape(64)] * 4, 4, policy)
    assert Counter(kinds(plan))["direct"] == 2
    assert (
        plan.reasons[2:]
        == ("packed: rows received by direct leaves fill bucket_bytes",) * 2
    )


def test_direct_leaf_that_is_received_in_its_shard_needs_no_memory():
    policy = Policy(direct_bytes=64, bucket_bytes=128, transport="xla")
    plan = jaxzero.make_plan([shape(64)] * 10, 4, policy)
    assert kinds(plan) == ["direct"] * 10
    assert plan.peak_temp_bytes == 0


def test_accumulated_direct_leaf_is_not_received_in_its_shard():
    """The sum may not overwrite what it is added to."""
    leaf = LeafSpec(
        path="['w']",
        shape=(64,),
        dtype="float32",
        shard_dtype="float32",
        cut=cut_leaf(None, "['w']", (64,), 4),
    )
    limits = Limits(bucket_bytes=1 << 20, direct_bytes=0, widens_bfloat16=False)
    for accumulates in (False, True):
        plan = plan_reduce([leaf], 4, Policy(), limits=limits, accumulates=accumulates)
        (bucket,) = plan.buckets
        assert bucket.in_place == (not accumulates)
        assert bucket.recv_bytes == (64 if accumulates else 0)


def test_whole_leaves_keep_a_wide_wire_for_an_exact_sum():
    """An all-reduce sums on the wire, where a narrow dtype would round each time."""
    policy = Policy(reduction="float32", comm_dtype="bfloat16")
    plan = jaxzero.make_plan(
        {"a": shape(8), "b": shape(8)}, 4, policy, {"a": "whole", "b": "flat"}
    )
    wire = {b.collective: b.comm_dtype for b in plan.buckets}
    assert wire == {"all_reduce": "float32", "reduce_scatter": "bfloat16"}


# How many collectives.


def test_bucket_of_fifty_leaves_makes_two_collectives_of_a_hundred():
    """Ten floats of a leaf over two ranks: 20 bytes a row, 32 with alignment."""
    policy = Policy(bucket_bytes=50 * 2 * 32)
    plan = jaxzero.make_plan([shape(10)] * 100, 2, policy)
    assert plan.num_collectives == 2
    assert [len(b.slots) for b in plan.buckets] == [50, 50]


@pytest.mark.parametrize("transport", ["xla", "nccl"])
def test_a_thousand_small_leaves_make_one_collective(transport):
    plan = jaxzero.make_plan([shape(100)] * 1000, 8, Policy(transport=transport))
    assert plan.num_collectives == 1


def test_mixed_dtypes_make_one_collective_each():
    tree = {"w": shape(8, dtype="bfloat16"), "norm": shape(8), "v": shape(8)}
    assert jaxzero.make_plan(tree, 2).num_collectives == 2
    wide = jaxzero.make_plan(tree, 2, Policy(comm_dtype="float32"))
    assert wide.num_collectives == 1


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_large_bucket_sends_only_what_it_holds(size):
    plan = jaxzero.make_plan([shape(size)], 2, Policy(bucket_bytes=1 << 30))
    assert plan.wire_bytes == 2 * 16


@pytest.mark.parametrize(
    "tree",
    [[], {}, None, [shape(0, 8)], {"e": shape(3, 0), "f": shape(0)}],
    ids=["list", "dict", "none", "empty", "all_empty"],
)
def test_nothing_to_send_makes_no_collective(tree):
    plan = jaxzero.make_plan(tree, 2)
    assert plan.num_collectives == plan.wire_bytes == plan.padding_bytes == 0
    assert plan.peak_temp_bytes == 0
    assert not plan.buckets


def test_large_leaves_leave_no_empty_bucket_behind():
    policy = Policy(direct_bytes=0, transport="xla")
    plan = jaxzero.make_plan([shape(64), shape(64)], 2, policy)
    assert kinds(plan) == ["direct", "direct"]


def test_one_rank_sends_nothing():
    plan = jaxzero.make_plan([shape(5), shape()], 1)
    assert kinds(plan) == ["local", "local"]
    assert plan.wire_bytes == plan.num_collectives == 0


# The divisor.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 17, 64, 256, 1024, 4096])
def test_float16_scale_loses_neither_large_nor_small_values(count):
    scale = float16_pre_scale(count)
    assert math.frexp(scale)[0] == 0.5, "a power of two"
    assert 1 / count / 2 < scale <= 1 or count > 16
    if count <= 16:
        assert 60000 * count * scale <= np.finfo(np.float16).max
    # The smallest normal number times the scale is still a float16.
    assert np.float16(2.0**-14 * scale) > 0


@pytest.mark.parametrize("replicas", [1, 3])
def test_mean_divides_by_all_ranks(replicas):
    leaf = jaxzero.make_plan([shape(8)], 4).leaves
    plan = plan_reduce(leaf, 4, Policy(), limits=ANY.limits, replicas=replicas)
    assert plan.divisor == 4.0 * replicas


# The same plan everywhere.


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_equal_input_gives_an_equal_plan(case):
    first, second = case.plan(), case.plan()
    assert first == second
    assert hash(first) == hash(second)
    assert first.fingerprint == second.fingerprint


def test_fingerprint_tells_plans_apart():
    tree = {"w": shape(64), "b": shape(5)}
    plans = [
        jaxzero.make_plan(tree, 4),
        jaxzero.make_plan(tree, 2),
        jaxzero.make_plan({"w": shape(64), "c": shape(5)}, 4),
        jaxzero.make_plan(tree, 4, Policy(comm_dtype="bfloat16")),
        jaxzero.make_plan(tree, 4, Policy(shard_dtype="bfloat16")),
        jaxzero.make_plan(tree, 4, Policy(op="sum")),
        jaxzero.make_plan(tree, 4, Policy(bucket_bytes=64)),
        jaxzero.make_plan(tree, 4, cuts="flat"),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


PROGRAM = """
import jax, jaxzero
names = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
dtypes = ("float32", "bfloat16", "float16", "complex64", "float64")
tree = {n: {d: jax.ShapeDtypeStruct((i + 3, 5), d) for d in dtypes}
        for i, n in enumerate(names)}
cuts = {n: "whole" if n == "zeta" else None for n in names}
plan = jaxzero.make_plan(tree, 4, jaxzero.Policy(bucket_bytes=128), cuts)
print(plan.fingerprint, hash("alpha"))
"""


def test_processes_of_different_hash_seeds_agree():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.split()
        for seed in ("0", "1", "12345")
    ]
    fingerprints, hashes = zip(*outputs, strict=True)
    assert len(set(hashes)) == 3, "the seeds took effect"
    assert len(set(fingerprints)) == 1
    assert len(fingerprints[0]) == len(hashlib.sha256(b"").hexdigest()[:16])


# Speed.


@pytest.mark.parametrize("bucket_bytes", [None, 1 << 16], ids=["default", "64KiB"])
def test_planning_3000_leaves_is_fast(bucket_bytes):
    """Planning is part of every trace. Best of three, as the machine may be busy."""
    policy = Policy(bucket_bytes=bucket_bytes)
    tree = {
        f"layer{i}": {"w": shape(512, 33), "b": shape(511), "s": shape()}
        for i in range(1000)
    }
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan = jaxzero.make_plan(tree, 8, policy)
        seconds.append(time.perf_counter() - start)
    assert len(plan.leaves) == 3000
    assert min(seconds) < 0.5
