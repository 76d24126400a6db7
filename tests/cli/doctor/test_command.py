"""`python -m jaxzero doctor` as a user starts it, and its problems, made in-process."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import pytest

import jaxzero
from jaxzero import _ffi
from jaxzero._cli.doctor import command as doctor
from jaxzero._cli.doctor import fact as doctor_fact
from jaxzero._cli.doctor import install as doctor_install
from jaxzero._cli.doctor import libnccl as doctor_libnccl
from jaxzero._cli.doctor import machine as doctor_machine

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 11    /a b/nccl/lib/libnccl.so.2
7f0000001000-7f0000002000 rw-p 00001000 08:01 11    /a b/nccl/lib/libnccl.so.2
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000003000-7f0000004000 r-xp 00000000 08:01 12    /plugins/libnccl-net.so
7f0000004000-7f0000005000 r-xp 00000000 08:01 13    /other/libnccl.so.2.32.3
"""


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxzero", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    )


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "has_nvidia_driver", lambda: False)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, str]]:
    def run() -> tuple[int, str]:
        code = doctor.main([])
        return code, capsys.readouterr().out

    return run


def test_reports_each_thing_and_passes_on_cpus() -> None:
    done = run_doctor(
        XLA_FLAGS="--xla_force_host_platform_device_count=3", NCCL_DEBUG="WARN"
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "self-test: ok", done.stdout + done.stderr
    assert f"jaxzero: {jaxzero.__version__}" in lines
    assert f"jax: {jax.__version__}" in lines
    assert "platform: cpu" in lines
    assert any(line.startswith("devices: 3 x cpu") for line in lines)
    assert any(line.startswith("CPU module: ok, /") for line in lines)
    assert "XLA_FLAGS: --xla_force_host_platform_device_count=3" in lines
    assert "NCCL_DEBUG: WARN" in lines
    keys = {line.partition(":")[0] for line in lines}
    assert {"jaxlib", "Python", "NumPy", "CUDA module", "transport"} <= keys
    # A GPU without a CUDA module is a problem also when JAX is told to use the CPUs.
    assert done.returncode == int("\n  fix: " in done.stdout)


def test_json_is_one_object_with_the_same_facts() -> None:
    done = run_doctor("--json")
    summary = json.loads(done.stdout)
    assert summary["facts"]["self-test"] == "ok"
    assert summary["facts"]["jax"] == jax.__version__
    assert summary["ok"] == (summary["problems"] == []) == (done.returncode == 0)


def test_wrong_argument_is_one_line() -> None:
    done = run_doctor("--jsn")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_time_limit_is_at_most_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--timeout", "86401"])
    assert stopped.value.code == 2
    assert "from 1 to 86400, not '86401'" in capsys.readouterr().err


def test_variables_are_shown_before_devices_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(limit: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(doctor_machine, "find_machine", hang)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with pytest.raises(TimeoutError):
        doctor.main([])
    assert "\nNCCL_DEBUG: WARN\n" in capsys.readouterr().out


def test_reports_a_platform_that_does_not_start() -> None:
    done = run_doctor("--json", JAX_PLATFORMS="no_such_platform")
    assert done.returncode == 1
    problems = {p["key"]: p["fix"] for p in json.loads(done.stdout)["problems"]}
    assert "JAX_PLATFORMS" in problems["devices"]
    assert "JAX_PLATFORMS" in problems["self-test"]


def test_a_device_query_that_hangs_ends_within_the_limit() -> None:
    hanging = (
        "import time, jax\n"
        "from jaxzero._cli.doctor import command\n"
        "jax.local_devices = lambda: time.sleep(600)\n"
        "raise SystemExit(command.main(['--timeout', '1', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", hanging],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert "no end of jax.local_devices() within 1 s" in found["facts"]["devices"]
    fixes = {problem["key"]: problem["fix"] for problem in found["problems"]}
    assert fixes["devices"] == fixes["self-test"] == doctor_fact.CHECK_DEVICE
    assert "transport" in found["facts"]


@pytest.mark.usefixtures("cpu_only")
def test_check_that_cannot_be_made_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, report: Callable[[], tuple[int, str]]
) -> None:
    def fail() -> None:
        raise OSError("unreadable")

    monkeypatch.setattr(doctor_install, "transport", fail)
    code, text = report()
    assert code == 1
    assert "\ntransport: OSError: unreadable\n  fix: " in text
    assert text.endswith("self-test: ok\n")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_missing_cuda_module_is_a_problem_only_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(_ffi, "cuda_obstacle", lambda: "no CUDA module")
    [fact] = doctor_install.cuda_module(has_gpu=has_gpu)
    assert fact.value == "none: no CUDA module"
    assert fact.fix == (doctor_install.BUILD_CUDA if has_gpu else None)


def test_cuda_module_says_what_it_was_built_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("jaxzero._cuda")
    module.__file__ = "/somewhere/_cuda.so"
    module.__dict__.update(
        cuda_version=13010, nccl_header_version=23203, architectures="80-real 90-real"
    )
    monkeypatch.setitem(sys.modules, "jaxzero._cuda", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(_ffi, "cuda_obstacle", lambda: None)
    [fact] = doctor_install.cuda_module(has_gpu=True)
    assert fact.value == (
        "ok, /somewhere/_cuda.so, built with CUDA 13.1 and the headers of NCCL 2.32.3"
        " for architectures 80-real 90-real"
    )
    assert fact.fix is None


def test_missing_cpu_module_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxzero._cpu", None)
    [fact] = doctor_install.cpu_module()
    assert fact.value.startswith("ModuleNotFoundError")
    assert fact.fix == doctor_fact.REINSTALL


def test_gpu_that_jax_does_not_see_needs_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_machine, "installed_plugins", lambda: [])
    [fact] = doctor_machine.plugin(machine(has_gpu=True))
    assert fact.fix == doctor_fact.INSTALL_PLUGIN
    [fact] = doctor_machine.plugin(machine(has_gpu=False))
    assert fact.fix is None


def test_finds_every_copy_of_libnccl_and_warns_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = doctor_libnccl.mapped_libnccl(MAPS)
    assert copies == ["/a b/nccl/lib/libnccl.so.2", "/other/libnccl.so.2.32.3"]
    monkeypatch.setattr(doctor_libnccl, "loaded_version", lambda _: "2.32.3")
    for found, fix in (
        (copies, doctor_libnccl.ONE_LIBNCCL),
        (copies[:1], None),
        ([], doctor_fact.INSTALL_PLUGIN),
    ):
        monkeypatch.setattr(
            doctor_libnccl, "mapped_libnccl", lambda _, found=found: found
        )
        [fact] = doctor_libnccl.libnccl(2)
        assert fact.fix == fix
    [fact] = doctor_libnccl.libnccl(1)
    assert fact.fix is None
    assert list(doctor_libnccl.libnccl(0)) == []


def test_latency_hiding_is_noted_for_gpus_before_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(doctor_machine.latency_hiding(machine(gpu(9.0)))) == []
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    [fact] = doctor_machine.latency_hiding(machine(gpu(8.0)))
    assert fact.value.startswith("off by default")
    assert fact.fix is None
    monkeypatch.setenv("XLA_FLAGS", f"{doctor_machine.LATENCY_HIDING}=true")
    [fact] = doctor_machine.latency_hiding(machine(gpu(8.0)))
    assert fact.value == "on (XLA_FLAGS)"


def machine(*devices: Any, has_gpu: bool = True) -> doctor_machine.Machine:
    return doctor_machine.Machine(devices=devices, has_gpu=has_gpu)


def gpu(capability: float) -> SimpleNamespace:
    return SimpleNamespace(
        platform="gpu",
        device_kind="a GPU",
        compute_capability=str(capability),
        client=SimpleNamespace(platform_version="PJRT C API\ncuda 13000"),
    )
