"""Whole training steps between processes, against the same steps on one device."""

from typing import Any

import jax
import numpy as np
import pytest
import training
from multihost.spmd import Spmd, assert_alike

import jaxzero
from jaxzero import LossScale, Policy

optax = pytest.importorskip("optax")
pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS = 50
RUNS = [
    ("flat", "plain", 1),
    ("flat", "layers", 4),
    ("hybrid", "plain", 4),
    ("hybrid", "layers", 1),
    ("hybrid", "stacked", 4),
]
ON_CPU = {("hybrid", "stacked", 4)}
"""Processes on CPUs are slow; more is in tests/train, in one process."""

MODELS: dict[str, Any] = {
    "plain": (training.init, training.loss, {}),
    "layers": (training.init, training.loss, {"layers": "blocks/*"}),
    "stacked": (training.init_stacked, training.loss_stacked, {"stacked": "blocks"}),
}


@pytest.fixture(scope="module")
def expected(joined_or_gpu: None) -> Any:
    """The unsharded run, on a device of this process."""
    with jax.default_device(jax.local_devices()[0]):
        return training.unsharded(
            training.loss,
            optax.adamw(1e-2),
            training.init(jax.random.key(7)),
            training.batches(STEPS),
        )


@pytest.fixture(scope="module")
def joined_or_gpu(joined: None) -> None:
    """Joins the other ranks before the first use of a device."""


@pytest.mark.parametrize(("mesh", "model", "accumulate"), RUNS)
def test_training_equals_the_unsharded_run(
    expected: Any,
    mesh: str,
    model: str,
    accumulate: int,
    request: pytest.FixtureRequest,
) -> None:
    spmd: Spmd = request.getfixturevalue("hybrid" if mesh == "hybrid" else "spmd")
    is_cpu = jax.default_backend() == "cpu"
    if is_cpu and (mesh, model, accumulate) not in ON_CPU:
        pytest.skip("for GPUs")
    steps = 10 if is_cpu else STEPS
    init, loss, layering = MODELS[model]
    zero = jaxzero.zero3(
        loss,
        optax.adamw(1e-2),
        spmd.mesh,
        replicate_axis="replica" if mesh == "hybrid" else None,
        accumulate=accumulate,
        **layering,
    )
    state = zero.init(init, jax.random.key(7))
    curve, state = training.sharded(zero, state, training.batches(steps))
    np.testing.assert_allclose(curve, expected[0][:steps], rtol=1e-3)
    assert_alike(curve)


def test_float16_with_a_loss_scale(spmd: Spmd, expected: Any) -> None:
    if jax.default_backend() == "cpu":
        pytest.skip("for GPUs")
    zero = jaxzero.zero3(
        training.loss,
        optax.adamw(1e-2),
        spmd.mesh,
        policy=Policy(compute_dtype="float16", shard_dtype="float32"),
        loss_scale=LossScale(initial=2.0**10),
    )
    state = zero.init(training.init, jax.random.key(7))
    curve, state = training.sharded(zero, state, training.batches(8))
    np.testing.assert_allclose(curve, expected[0][:8], rtol=3e-2)
    assert int(state.step) == 8


def test_batches_of_what_each_process_has_read(spmd: Spmd, expected: Any) -> None:
    zero = jaxzero.zero3(training.loss, optax.adamw(1e-2), spmd.mesh)
    state = zero.init(training.init, jax.random.key(7))
    count, index = jax.process_count(), jax.process_index()
    curve = []
    for batch in training.batches(3):
        local = {k: np.split(v, count)[index] for k, v in batch.items()}
        own = jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(
                zero.batch_sharding, leaf
            ),
            local,
        )
        state, metrics = zero.step(state, own)
        curve.append((float(metrics.loss), float(metrics.grad_norm)))
    np.testing.assert_allclose(curve, expected[0][:3], rtol=1e-4)


@pytest.mark.usefixtures("several")
def test_processes_that_differ_are_told_so(spmd: Spmd) -> None:
    width = 5 + (jax.process_index() == 1)
    zero = jaxzero.zero3(training.loss, optax.sgd(0.1), spmd.mesh)
    with pytest.raises(ValueError, match="other parameter shapes"):
        zero.init({"w": np.ones((width, 3), np.float32)})
