from types import SimpleNamespace

import jax
import pytest

import jaxzero
from jaxzero._cli.bench.environment import environment


def test_versions_and_hardware() -> None:
    found = environment()
    assert list(found) == ["jaxzero", "python", "jax", "numpy", "device", "processor"]
    assert found["jaxzero"] == jaxzero.__version__
    assert found["device"] == f"{jax.device_count()} x cpu"
    assert " x " in found["processor"]


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_that_share_gpus_are_told(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [gpu, gpu])
    if is_shared:
        monkeypatch.setenv("NCCL_HOSTID", "host1")
    software = environment()
    assert {"nccl", "cuda", "driver"} < set(software)
    of = "ranks on shared" if is_shared else "x"
    assert software["device"] == f"2 {of} NVIDIA H200"
