"""`python -m jaxzero demo` as a user starts it, with a model that takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

TINY = ("--blocks", "2", "--width", "64", "--length", "16", "--batch", "32")
BLOCK_NUMEL = 12 * 64 * 64 + 2 * 64
TINY_NUMEL = 256 * 64 + 2 * BLOCK_NUMEL + 64
FLOAT32_BYTES = 4
ADAM_COUNTS_BYTES = 8
QUICK = "--xla_backend_optimization_level=0"
"""Compiling takes most of the time; none of these tests is about fast programs."""


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxzero", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"XLA_FLAGS": QUICK} | environment,
    )


def demo_json(*arguments: str, **environment: str) -> dict[str, Any]:
    done = run_demo(*TINY, *arguments, "--json", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def eight_devices() -> dict[str, Any]:
    return demo_json("--steps", "2")


def test_float32_losses_fall_and_equal_those_of_an_unsharded_run() -> None:
    summary = demo_json("--steps", "30", "--comm-dtype", "float32", "--check")
    assert_within(summary["check"], steps=30, tolerance=1e-4)
    bits = summary["bits_per_byte"]
    assert 7.5 < bits["start"] < 8.5
    assert bits["end"] < bits["start"] - 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_computing_in_16_bits_stays_near_an_unsharded_run(dtype: str) -> None:
    summary = demo_json("--steps", "8", "--compute-dtype", dtype, "--layers", "--check")
    check = summary["check"]
    assert_within(check, steps=8, tolerance=check["tolerance"])
    # Less would mean that it was computed in float32.
    assert check["largest_relative_difference"] > 1e-6
    assert summary["skipped_steps"] == 0


def assert_within(check: dict[str, Any], steps: int, tolerance: float) -> None:
    assert check["passed"]
    assert check["steps"] == steps
    assert check["largest_relative_difference"] <= tolerance
    assert check["first_grad_norm_relative_difference"] <= tolerance


@pytest.mark.slow
def test_seed_decides_the_losses(eight_devices: dict[str, Any]) -> None:
    other = demo_json("--steps", "2", "--seed", "7")
    assert other["losses"] != eight_devices["losses"]


@pytest.mark.slow
def test_environment_changes_nothing(eight_devices: dict[str, Any]) -> None:
    again = demo_json(
        "--steps",
        "2",
        XLA_FLAGS=f"{QUICK} --xla_force_host_platform_device_count=3",
        JAX_PLATFORMS="cuda",
        JAX_ENABLE_X64="1",
    )
    assert again["losses"] == eight_devices["losses"]
    assert again["bytes_per_device"] == eight_devices["bytes_per_device"]


def test_state_takes_an_eighth_on_eight_devices(eight_devices: dict[str, Any]) -> None:
    assert eight_devices["parameters"] == TINY_NUMEL
    full = TINY_NUMEL * FLOAT32_BYTES
    assert eight_devices["bytes_per_device"]["unsharded"] == {
        "params": full,
        "grads": full,
        "optimizer": 2 * full + ADAM_COUNTS_BYTES,
    }
    assert eight_devices["bytes_per_device"]["sharded"] == {
        "params": full // 8,
        "grads": full // 8,
        "optimizer": 2 * full // 8 + ADAM_COUNTS_BYTES,
    }


@pytest.mark.slow
def test_layers_take_turns_and_need_less_memory(eight_devices: dict[str, Any]) -> None:
    in_turn = demo_json("--steps", "2", "--layers")
    np.testing.assert_allclose(in_turn["losses"], eight_devices["losses"], rtol=1e-4)
    saved = (
        eight_devices["bytes_per_device"]["temporary"]
        - in_turn["bytes_per_device"]["temporary"]
    )
    # Of one of the two blocks, its parameters or its gradients at the least.
    assert saved > BLOCK_NUMEL * FLOAT32_BYTES


@pytest.mark.slow
def test_replicas_hold_padded_shards_of_leaves_that_do_not_divide() -> None:
    summary = demo_json(
        *("--steps", "3", "--devices", "6", "--replicas", "2", "--batch", "24"),
        *("--comm-dtype", "float32", "--check"),
    )
    assert_within(summary["check"], steps=3, tolerance=1e-5)
    # Vectors of 64 elements and matrices of 4096 times 1, 3 or 4, over three shards.
    block_numel = sum(-(-n * 64 // 3) for n in (1, 1, 64, 192, 256, 256))
    shard_numel = 2 * block_numel + sum(-(-n * 64 // 3) for n in (1, 256))
    assert summary["bytes_per_device"]["sharded"]["params"] == (
        shard_numel * FLOAT32_BYTES
    )


@pytest.mark.slow
def test_one_device_needs_no_collective() -> None:
    summary = demo_json("--steps", "2", "--devices", "1", "--check")
    assert summary["check"]["largest_relative_difference"] < 1e-6
    sizes = summary["bytes_per_device"]
    assert sizes["sharded"] == sizes["unsharded"]


@pytest.mark.slow
def test_output_is_readable_without_a_terminal(tmp_path: Path) -> None:
    plot = tmp_path / "demo.png"
    done = run_demo(*TINY, "--steps", "25", "--check", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\r" not in done.stdout
    for text in ("Plan: ", "tokens/s", "bytes per device", "check ok", "bits per byte"):
        assert text in done.stdout
    steps = [line for line in done.stdout.splitlines() if line.startswith("sharded ")]
    assert len(steps) <= 12
    pixels = imread(plot)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1000
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 50


def test_wrong_value_is_one_line_and_exit_code_2() -> None:
    done = run_demo("--devices", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "--devices" in done.stderr and "'0'" in done.stderr
