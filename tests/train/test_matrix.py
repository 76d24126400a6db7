"""zero3 with every option beside every other: pairwise, against float64 steps."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import training
from conftest import MakeMesh
from jax import lax
from pairwise import Row, assert_pairwise, ident, pairwise

import jaxzero
from jaxzero import LossScale, Policy

FACTORS: dict[str, list[Any]] = {
    "ranks": [1, 3, 4],
    "replicas": [None, 1, 2],
    "kind": ["auto", "explicit"],
    "model": ["plain", "layers", "stacked"],
    "mixed": [False, True],
    "accumulate": [1, 2],
    "sync": ["each", "last", "replicas_last"],
    "compute_dtype": [None, "bfloat16", "float16"],
    "comm_dtype": [None, "float32", "bfloat16", "float16"],
    "shard_dtype": [None, "float32", "bfloat16"],
    "reduction": ["native", "float32"],
    "scaled": ["mean", "sum", 3.0],
    "bucket_bytes": [None, 64],
    "direct_bytes": [None, 0],
    "min_shard_numel": [0, 10],
    "cuts": ["default", "flat", "last", "mixed"],
    "clip": [False, True],
    "loss_scale": [None, 64.0],
    "skip_nonfinite": [False, True],
    "has_aux": [False, True],
    "meets": [False, True],
    "turned": [False, True],
    "closure": [False, True],
}
BLOCK_CUTS: dict[str, Any] = {
    "default": None,
    "flat": "flat",
    "last": {"w": 1, "b": 0},
    "mixed": {"w": "flat", "b": "whole"},
}
TOP_CUTS: dict[str, Any] = {
    "default": dict.fromkeys(("in", "out", "bias")),
    "flat": dict.fromkeys(("in", "out", "bias"), "flat"),
    "last": {"in": 1, "out": 0, "bias": None},
    "mixed": {"in": "whole", "out": None, "bias": "whole"},
}
STEPS = 3
RATE = 0.03


def refusal(row: Row) -> str | None:
    """Returns words of the documented refusal of a row, if it is one."""
    if row["sync"] == "replicas_last" and row["replicas"] is None:
        return "needs replicate_axis"
    if row["sync"] == "last" and row["model"] != "plain":
        return "layer by layer"
    return None


def allowed(row: Row) -> list[Row]:
    """Returns rows that run, with all pairs of a row but the refused one."""
    if refusal(row) is None:
        return []
    if row["sync"] == "last":
        return [row | {"sync": "each"}, row | {"model": "plain"}]
    return [row | {"sync": "each"}, row | {"replicas": 2}]


PAIRS = pairwise(FACTORS)
ROWS = PAIRS + [other for row in PAIRS for other in allowed(row)]


def test_the_matrix_is_pairwise_and_small() -> None:
    assert len(ROWS) < 45
    assert_pairwise(ROWS, FACTORS)


def start(row: Row) -> Any:
    """Returns the first parameters."""
    init = training.init_stacked if row["model"] == "stacked" else training.init
    params = init(jax.random.key(1))
    if row["mixed"]:
        params["out"] = params["out"].astype("bfloat16")
    return params


def make(row: Row, factor: float, make_mesh: MakeMesh) -> jaxzero.Zero3:
    """Returns the run of a row, whose gradients are `factor` times the mean."""
    loss = training.loss_stacked if row["model"] == "stacked" else training.loss

    axes = (row["replicas"] or 1, row["ranks"])
    names = ("data", "replica") if row["replicas"] else "data"
    captured = jnp.arange(3.0)

    def chosen(params: Any, batch: Any) -> Any:
        x = batch["x"].T if row["turned"] else batch["x"]
        if row["turned"]:
            x = x * batch["ones"].sum()
        if row["closure"]:
            x = x * captured[1]
        value = loss(params, {"x": x, "y": batch["y"]})
        if row["meets"] and row["scaled"] == "mean":
            return lax.pmean(value, names)
        if row["meets"]:
            # What is equal on all devices may be a factor of what is not.
            total = lax.psum(jnp.sum(batch["y"] ** 2), names)
            return value * (total / lax.psum(jnp.sum(batch["y"] ** 2), names))
        return value

    def with_aux(params: Any, batch: Any) -> Any:
        return chosen(params, batch), {"y": jnp.mean(batch["y"])}

    scaled = row["scaled"]
    fields = ("compute_dtype", "comm_dtype", "shard_dtype", "reduction")
    fields += ("bucket_bytes", "direct_bytes")
    policy = Policy(
        op=scaled if isinstance(scaled, str) else "mean",
        divide_by=None if isinstance(scaled, str) else scaled,
        **{field: row[field] for field in fields},
    )
    block_cuts = BLOCK_CUTS[row["cuts"]]
    return jaxzero.zero3(
        with_aux if row["has_aux"] else chosen,
        # Linear in the gradients, so that rounding stays what it is.
        optax.sgd(RATE / factor, momentum=0.5),
        make_mesh(axes, ("replica", "data"), row["kind"]),
        policy=policy,
        min_shard_numel=row["min_shard_numel"],
        cuts=TOP_CUTS[row["cuts"]]
        | {
            "blocks": block_cuts
            if row["model"] == "stacked"
            else [block_cuts] * training.LAYERS
        },
        replicate_axis="replica" if row["replicas"] else None,
        layers="blocks/*" if row["model"] == "layers" else (),
        stacked="blocks" if row["model"] == "stacked" else (),
        accumulate=row["accumulate"],
        sync=row["sync"],
        clip_norm=factor / 2 if row["clip"] else None,
        loss_scale=row["loss_scale"]
        and LossScale(initial=row["loss_scale"], growth_interval=1),
        skip_nonfinite=row["skip_nonfinite"],
        has_aux=row["has_aux"],
        batch_dims={"x": 1, "y": 0, "ones": None} if row["turned"] else 0,
    )


def as_given(row: Row, batch: Any) -> Any:
    """Returns a batch as a row's loss takes it: turned, beside a leaf that is not."""
    if not row["turned"]:
        return batch
    return batch | {"x": batch["x"].T, "ones": np.float32([0.5, 0.25, 0.25])}


@functools.cache
def batches(bad: int | None) -> list[Any]:
    """Returns batches, of which one gives gradients that are not finite."""
    data = training.batches(STEPS)
    if bad is not None:
        data[bad]["x"][-1, 0] = np.inf
    return data


@jax.jit
def wide_step(params: Any, trace: Any, batch: Any, factor: Any, limit: Any) -> Any:
    """One step on one device in float64."""
    stacked = isinstance(params["blocks"], dict)
    loss = training.loss_stacked if stacked else training.loss
    value, grads = jax.value_and_grad(loss)(params, batch)
    grads = jax.tree.map(lambda g: g * factor, grads)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    share = jnp.minimum(1.0, limit / norm)
    trace = jax.tree.map(lambda t, g: t / 2 + g * share, trace, grads)
    params = jax.tree.map(lambda p, t: p - RATE / factor * t, params, trace)
    return params, trace, value * factor, norm


def expected(params: Any, data: list[Any], bad: int | None, **scales: float) -> Any:
    """Returns losses, norms and the last parameters of steps in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(oracle.wide(p)), params)
        trace = jax.tree.map(jnp.zeros_like, params)
        curve = []
        for i, batch in enumerate(data):
            if i == bad:
                continue
            params, trace, *metrics = wide_step(params, trace, batch, **scales)
            curve.append([float(metric) for metric in metrics])
    return curve, jax.device_get(params)


def bound(row: Row) -> float:
    """Returns the relative error that the dtypes of a row allow."""
    names = [row[name] for name in ("compute_dtype", "comm_dtype", "shard_dtype")]
    names += ["bfloat16"] * row["mixed"]
    coarsest = max(oracle.EPSILON[name] for name in [*names, "float32"] if name)
    # Of some ten roundings per step, each of half an epsilon, on the way.
    return 6 * coarsest


@pytest.mark.parametrize("row", ROWS, ids=ident)
@jax.numpy_dtype_promotion("standard")  # optax mixes dtypes
def test_options_work_together(make_mesh: MakeMesh, row: Row) -> None:
    count = row["ranks"] * (row["replicas"] or 1) * row["accumulate"]
    divisor = {"mean": count, "sum": 1}.get(row["scaled"], row["scaled"])
    factor = count / divisor
    if words := refusal(row):
        with pytest.raises(ValueError, match=words):
            make(row, factor, make_mesh)
        return
    zero = make(row, factor, make_mesh)
    skips = row["skip_nonfinite"] or row["loss_scale"] is not None
    bad = 1 if skips else None
    data = batches(bad)
    params = start(row)
    state = zero.init(params)
    stored = jax.device_get(zero.export_state(state)["params"])
    limit = factor / 2 if row["clip"] else math.inf
    curve, want = expected(stored, data, bad, factor=factor, limit=limit)
    found, scale = [], row["loss_scale"]
    for i, batch in enumerate(data):
        state, metrics = jax.block_until_ready(zero.step(state, as_given(row, batch)))
        assert bool(metrics.skipped) == (i == bad)
        if scale is None:
            assert metrics.loss_scale is None
        else:
            assert float(metrics.loss_scale) == scale
            scale = scale / 2 if i == bad else scale * 2
        if row["has_aux"]:
            # Reduced as the loss is: 'sum' adds, a divisor divides the sum.
            aux = float(metrics.aux["y"])
            np.testing.assert_allclose(aux, factor * batch["y"].mean(), rtol=1e-5)
        if i != bad:
            found.append([float(metrics.loss), float(metrics.grad_norm)])
    assert int(state.step) == len(curve)
    rtol = bound(row)
    np.testing.assert_allclose(found, curve, rtol=rtol)
    last = jax.device_get(zero.export_state(state)["params"])
    for (path, leaf), other, first in zip(
        jax.tree_util.tree_leaves_with_path(last),
        jax.tree.leaves(want),
        jax.tree.leaves(stored),
        strict=True,
    ):
        moved = np.max(np.abs(other - oracle.wide(first)))
        np.testing.assert_allclose(
            oracle.wide(leaf),
            other,
            rtol=rtol,
            atol=rtol * (moved + np.max(np.abs(other))),
            err_msg=jax.tree_util.keystr(path),
        )
