from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxzero._cli.arguments import UsageError
from jaxzero._cli.bench import devices as bench_devices
from jaxzero._cli.bench.devices import devices_here, find_devices
from jaxzero._cli.bench.options import parse_options, requests

GPUS = [
    SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=i // 2)
    for i in range(4)
]


@pytest.fixture(autouse=True)
def running() -> None:
    """From here on nothing can change how many devices this process has."""
    assert len(jax.devices()) >= 8


def test_cpu_devices_are_eight_or_as_many_as_asked_for() -> None:
    assert list(find_devices(None)) == jax.devices()[:8]
    assert list(find_devices(3)) == jax.devices()[:3]


def test_all_gpus_are_used_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: GPUS)
    assert list(find_devices(None)) == GPUS
    with pytest.raises(UsageError, match=r"4 x NVIDIA H200; set JAX_PLATFORMS=cpu"):
        find_devices(2)


@pytest.mark.parametrize(
    "error", [RuntimeError("Unable to initialize backend 'cuda'"), AssertionError()]
)
def test_no_devices_are_no_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    said = f"no devices: {type(error).__name__}.*; python -m jaxzero doctor says more"
    with pytest.raises(UsageError, match=said):
        find_devices(None)


@pytest.mark.parametrize(("starter", "count"), [(None, 2), ("slurm", 2), ("launch", 4)])
def test_processes_of_the_launcher_share_a_machine(
    monkeypatch: pytest.MonkeyPatch, starter: str | None, count: int
) -> None:
    monkeypatch.setattr(bench_devices, "started_by", lambda: starter)
    devices: Any = GPUS
    assert devices_here(devices) == count


@pytest.mark.parametrize(
    ("platform", "processes", "tree", "dtypes"),
    [
        ("gpu", 1, "gpt2", ("bfloat16",)),
        ("gpu", 4, "gpt2", ("bfloat16",)),
        ("cpu", 1, "gpt2-quarter", ("float32",)),
        ("cpu", 2, "layer", ("float32",)),
    ],
)
def test_the_machine_picks_tree_and_dtype(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    processes: int,
    tree: str,
    dtypes: tuple[str, ...],
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    devices: Any = [SimpleNamespace(platform=platform)]
    ((name, request),) = requests(parse_options([]), devices).items()
    assert (name, tuple(request.dtypes)) == (tree, dtypes)
    mixed = requests(parse_options(["--tree", "awkward"]), devices)["awkward"]
    assert mixed.dtypes == ("bfloat16", "float32")
