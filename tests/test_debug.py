"""JAXZERO_DEBUG=1 says which rank brought what is not finite into a sum."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero
from jaxzero import Policy
from jaxzero._collectives import debug as _debug

RANKS = 4
BAD = 2
TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])

Reports = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXZERO_DEBUG", "1")


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Reports:
    """Returns a function that takes what was logged since it was last called."""

    def take() -> list[str]:
        jax.effects_barrier()
        records = [r for r in caplog.records if r.name == "jaxzero"]
        caplog.clear()
        assert all(record.levelno == logging.ERROR for record in records)
        return [record.getMessage() for record in records]

    return take


def trees(bad: Sequence[int] = (BAD,)) -> list[Any]:
    """Trees of all ranks; those of the ranks `bad` have three bad elements."""

    def one(rank: int) -> Any:
        tree = {"b": np.ones(7, np.float32), "w": np.ones((8, 3), np.float32)}
        if rank in bad:
            tree["b"][1:3] = np.nan, -np.inf
            tree["w"][5, 0] = np.inf
        return tree

    return [one(rank) for rank in range(RANKS)]


def report(
    rank: int, leaves: str = "['b'] (float32): 2 of 7; ['w'] (float32): 1 of 24"
):
    return f"not finite before the sum on rank {rank} of 4 along 'data': {leaves}"


@TYPED
def test_one_record_names_the_rank_and_its_leaves(
    make_mesh, check_vma, reports
) -> None:
    run = PerRank(make_mesh(RANKS), check_vma=check_vma).run
    found = run(lambda g: jaxzero.shard_grads(g, "data"), trees())
    assert reports() == [report(BAD)]
    # The step went on, and the bad rank's values are in the sums of others.
    assert not np.isfinite(found[0]["b"]).all()


def test_every_offending_rank_has_a_record(make_mesh, reports) -> None:
    run = PerRank(make_mesh(RANKS)).run
    run(lambda g: jaxzero.shard_grads(g, "data"), trees(bad=(0, 3)))
    assert sorted(reports()) == [report(0), report(3)]


def test_finite_gradients_are_not_mentioned(make_mesh, reports) -> None:
    run = PerRank(make_mesh(RANKS)).run
    run(lambda g: jaxzero.shard_grads(g, "data"), trees(bad=()))
    assert reports() == []


@pytest.mark.parametrize(
    "options",
    [
        {"with_stats": True},
        {"policy": Policy(reduction="float32")},
        {"policy": Policy(bucket_bytes=64)},
        {"policy": Policy(direct_bytes=0)},
        {"policy": Policy(comm_dtype="bfloat16")},
        {"cuts": "whole"},
    ],
    ids=["stats", "float32", "buckets", "direct", "bfloat16", "whole"],
)
def test_a_flush_is_one_record_however_it_travels(make_mesh, options, reports) -> None:
    run = PerRank(make_mesh(RANKS)).run
    run(lambda g: jaxzero.shard_grads(g, "data", **options), trees())
    assert reports() == [report(BAD)]


def test_replicas_are_told_apart(make_mesh, reports) -> None:
    mesh = make_mesh((2, 2), ("copy", "data"))
    run = PerRank(mesh, ("copy", "data")).run
    run(lambda g: jaxzero.shard_grads(g, "data", replicate_axis="copy"), trees((1, 2)))
    found = [text.partition(": ")[0] for text in reports()]
    assert sorted(found) == [
        "not finite before the sum on rank 0 of 2 along 'data', 1 of 2 along 'copy'",
        "not finite before the sum on rank 1 of 2 along 'data', 0 of 2 along 'copy'",
    ]


def test_rank_follows_the_users_order_of_axes(make_mesh, reports) -> None:
    run = PerRank(make_mesh((2, 2), ("a", "b"))).run
    run(lambda g: jaxzero.shard_grads(g, ("b", "a")), trees(bad=(1,)))
    (text,) = reports()
    assert "rank 2 of 4 along 'b', 'a': " in text


@TYPED
def test_other_dtypes_and_empty_leaves(make_mesh, check_vma, reports, x64) -> None:
    nan, inf = np.nan, np.inf
    dtypes = ("float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
    bad = {name: jnp.array([1, nan, 1], name) for name in dtypes} | {
        "complex64": np.array([1, complex(nan, inf), complex(0, inf)], np.complex64),
        "complex128": np.array([1j, 1, complex(nan, 0)], np.complex128),
        "scalar": np.float32(nan),
        "empty": np.zeros((0, 3), np.float32),
        "int32": np.full(3, np.iinfo(np.int32).max),
        "bool": np.ones(3, bool),
        "none": None,
    }
    good = jax.tree.map(np.zeros_like, bad)
    run = PerRank(make_mesh(RANKS), check_vma=check_vma).run
    run(
        lambda g: jaxzero.shard_grads(g, "data", policy=Policy(comm_dtype="float32")),
        [bad if rank == BAD else good for rank in range(RANKS)],
    )
    (text,) = reports()
    counts = dict(re.findall(r"\['(\w+)'\] \(\w+\): (\d of \d)", text))
    assert counts == {
        **dict.fromkeys(dtypes, "1 of 3"),
        "complex64": "2 of 3",
        "complex128": "1 of 3",
        "scalar": "1 of 1",
    }


@pytest.mark.parametrize(
    "leaf",
    [np.zeros((0, 4), np.float32), np.ones(4, np.int32)],
    ids=["empty", "integers"],
)
def test_nothing_to_check(make_mesh, leaf, reports) -> None:
    run = PerRank(make_mesh(RANKS)).run
    policy = Policy(comm_dtype="float32")
    run(lambda g: jaxzero.shard_grads(g, "data", policy=policy), [{"a": leaf}] * RANKS)
    assert reports() == []


@TYPED
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "checkpoint"])
def test_backward_of_gather_params(make_mesh, check_vma, remat, reports) -> None:
    """The gradients of one rank overflow, the parameters themselves are finite."""
    like = {"w": jax.ShapeDtypeStruct((8, 3), np.float32)}
    shards = [{"w": np.ones((2, 3), np.float32)}] * RANKS
    factors = [np.float32(np.inf if rank == BAD else 1) for rank in range(RANKS)]

    def loss(shards: Any, factor: jax.Array) -> jax.Array:
        return jnp.sum(jaxzero.gather_params(shards, like, "data")["w"]) * factor

    function = jax.checkpoint(loss) if remat else loss
    run = PerRank(make_mesh(RANKS), check_vma=check_vma).run
    run(jax.grad(function), shards, factors)
    assert reports() == [report(BAD, "['w'] (float32): 24 of 24")]


@TYPED
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "checkpoint"])
def test_gradient_through_shard_grads(make_mesh, check_vma, remat, reports) -> None:
    def loss(grads: Any) -> jax.Array:
        return jnp.sum(jaxzero.shard_grads(grads, "data")["w"] ** 2)

    function = jax.checkpoint(loss) if remat else loss
    run = PerRank(make_mesh(RANKS), check_vma=check_vma).run
    run(jax.value_and_grad(function), trees())
    found = reports()
    assert set(found) == {report(BAD)}
    assert len(found) <= 1 + remat  # once more where it is computed once more


@TYPED
def test_gradient_of_the_mapped_program(make_mesh, check_vma, reports) -> None:
    """The check stays in the forward half when shard_map itself is split."""
    mesh = make_mesh(RANKS)
    mapped = jax.shard_map(
        lambda g: jaxzero.shard_grads(jax.tree.map(lambda x: x[0], g), "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    def loss(grads: Any) -> jax.Array:
        return jnp.sum(mapped(grads)["w"])

    jax.block_until_ready(jax.jit(jax.grad(loss))(PerRank(mesh).place(trees())))
    assert reports() == [report(BAD)]


@TYPED
def test_each_step_of_a_scan_reports(make_mesh, check_vma, reports) -> None:
    def accumulate(grads: Any) -> Any:
        scales = jnp.array([0, 1, jnp.inf], jnp.float32)

        def body(total: Any, scale: jax.Array) -> Any:
            step = {"a": scale * grads}
            return jaxzero.shard_grads(step, "data", into=total), None

        start = jaxzero.shard_grads({"a": grads}, "data")
        return lax.scan(body, start, scales)[0]

    ranks = [np.full(8, rank + 1, np.float32) for rank in range(RANKS)]
    PerRank(make_mesh(RANKS), check_vma=check_vma).run(accumulate, ranks)
    expected = [report(rank, "['a'] (float32): 8 of 8") for rank in range(RANKS)]
    assert sorted(reports()) == expected


@TYPED
def test_each_element_of_a_vmap_reports(make_mesh, check_vma, reports) -> None:
    data = [np.ones((3, 8), np.float32) for _ in range(RANKS)]
    data[BAD][1, 4] = np.nan
    run = PerRank(make_mesh(RANKS), check_vma=check_vma).run
    run(jax.vmap(lambda leaf: jaxzero.shard_grads({"a": leaf}, "data")), data)
    assert reports() == [report(BAD, "['a'] (float32): 1 of 8")]


def test_leaf_that_is_already_summed_is_reported_by_all(make_mesh, reports) -> None:
    mapped = jax.shard_map(
        lambda leaf: jaxzero.shard_grads({"a": leaf}, "data"),
        mesh=make_mesh(RANKS),
        in_specs=P(),
        out_specs=P("data"),
    )
    jax.block_until_ready(jax.jit(mapped)(np.full(8, np.nan, np.float32)))
    expected = [report(rank, "['a'] (float32): 8 of 8") for rank in range(RANKS)]
    assert sorted(reports()) == expected


def jaxpr(mesh: Any) -> str:
    mapped = jax.shard_map(
        lambda tree: jaxzero.shard_grads(tree, "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    return str(jax.make_jaxpr(mapped)({"a": np.ones(32, np.float32)}))


@pytest.mark.parametrize("value", [None, "", "0"], ids=["unset", "nothing", "zero"])
def test_off_leaves_the_program_as_it_is(mesh8, monkeypatch, value) -> None:
    assert "debug_callback" in jaxpr(mesh8)
    if value is None:
        monkeypatch.delenv("JAXZERO_DEBUG")
    else:
        monkeypatch.setenv("JAXZERO_DEBUG", value)
    found = jaxpr(mesh8)
    monkeypatch.setattr(
        "jaxzero._collectives.reduce.log_nonfinite", lambda *arguments: None
    )
    assert found == jaxpr(mesh8)
    assert "isfinite" not in found


def test_a_value_without_a_meaning_is_refused(mesh8, monkeypatch) -> None:
    monkeypatch.setenv("JAXZERO_DEBUG", "yes")
    with pytest.raises(ValueError, match="JAXZERO_DEBUG='yes'; expected 1"):
        jaxpr(mesh8)


def test_without_a_cpu_device_it_warns_and_goes_on(mesh8, monkeypatch, caplog) -> None:
    """JAX would raise in the middle of a step."""
    monkeypatch.setattr(_debug, "_has_cpu_device", lambda: False)
    assert "debug_callback" not in jaxpr(mesh8)
    (record,) = (r for r in caplog.records if r.name == "jaxzero")
    assert record.levelno == logging.WARNING
    assert "JAX_PLATFORMS=cuda,cpu" in record.getMessage()
