"""The self-test of `python -m jaxzero doctor`: wrong results, errors and hangs."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import jaxzero
from jaxzero._cli.doctor.fact import Fact
from jaxzero._cli.doctor.limit import TimeLimit, TimeLimitError
from jaxzero._cli.doctor.machine import Machine
from jaxzero._cli.doctor.self_test import self_test

HANGING = """
import sys, time
import jax, numpy as np
import jaxzero
from jaxzero._cli.doctor import command as doctor

name, *arguments = sys.argv[1:]
right = getattr(jaxzero, name)

def wait(rank):
    if rank == 1:
        time.sleep(600)
    return rank

def hang(*arguments, **options):
    # One rank is late for the sum, in which the others wait.
    rank = jax.lax.axis_index("rank")
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.int32), rank)
    total = jax.lax.psum(late, "rank")
    tree = right(*arguments, **options)
    return jax.tree.map(lambda leaf: leaf + total.astype(leaf.dtype), tree)

setattr(jaxzero, name, hang)
raise SystemExit(doctor.main(arguments))
"""


def test_passes() -> None:
    assert self_test_here() == Fact(key="self-test", value="ok")


@pytest.mark.parametrize(
    ("function", "collective"),
    [("shard_grads", "reduce-scatter"), ("gather_params", "all-gather")],
)
def test_wrong_result_fails(
    monkeypatch: pytest.MonkeyPatch, function: str, collective: str
) -> None:
    right = getattr(jaxzero, function)

    def wrong(*arguments: Any, **options: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + 1, right(*arguments, **options))

    monkeypatch.setattr(jaxzero, function, wrong)
    fact = self_test_here()
    assert fact.value.startswith(f"{collective}: ")
    assert fact.value.endswith("elements differ in rows")
    assert fact.fix is not None


def test_error_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(jaxzero, "shard_grads", fail)
    fact = self_test_here()
    assert fact.value == "RuntimeError: first line second line"
    assert fact.fix is not None


@pytest.mark.parametrize(
    ("function", "step", "options"),
    [
        ("shard_grads", "reduce-scatter", []),
        ("gather_params", "all-gather", ["--json"]),
    ],
    ids=["reduce-scatter", "all-gather-json"],
)
def test_collective_that_hangs_ends_the_process_and_is_named(
    function: str, step: str, options: list[str]
) -> None:
    two_devices = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", HANGING, function, "--timeout", "4", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": two_devices},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    if options:
        problem = json.loads(done.stdout)["problems"][-1]
    else:
        [line, fix] = done.stdout.splitlines()[-2:]
        key, _, value = line.partition(": ")
        problem = {"key": key, "value": value, "fix": fix.removeprefix("  fix: ")}
    assert problem["key"] == "self-test"
    assert problem["value"] == f"no end of {step} over 2 devices within 4 s"
    assert "--timeout" in problem["fix"]


def test_hanging_nccl_has_a_fix_for_nccl() -> None:
    class Exceeded(TimeLimit):
        def run(self, work: Any) -> Any:
            raise TimeLimitError("no end")

    gpu = SimpleNamespace(
        platform="gpu", client=SimpleNamespace(platform_version="cuda 13000")
    )
    machine = Machine(devices=(gpu, gpu), error=None, has_gpu=True)
    [fact] = self_test(machine, Exceeded(1))
    assert fact.value == "no end"
    assert fact.fix is not None
    assert "NCCL_DEBUG=INFO" in fact.fix
    assert "transport='xla'" in fact.fix


def test_time_limit_passes_on_results_and_errors() -> None:
    limit = TimeLimit(60)
    assert limit.run(lambda enter_step: 3) == 3
    with pytest.raises(TimeoutError, match="that of the work"):
        limit.run(fail_by_itself)
    assert not limit.was_exceeded


def test_time_limit_names_the_last_step() -> None:
    end = threading.Event()

    def work(enter_step: Callable[[str], None]) -> None:
        enter_step("first")
        enter_step("second")
        end.wait()

    limit = TimeLimit(0.2)
    with pytest.raises(TimeLimitError, match=r"^no end of second within 0\.2 s$"):
        limit.run(work)
    assert limit.was_exceeded
    end.set()


def self_test_here() -> Fact:
    machine = Machine(devices=tuple(jax.devices()), error=None, has_gpu=False)
    [fact] = self_test(machine, TimeLimit(60))
    return fact


def fail_by_itself(enter_step: Callable[[str], None]) -> None:
    raise TimeoutError("that of the work")
