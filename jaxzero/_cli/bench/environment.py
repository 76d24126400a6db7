"""Where a measurement was made."""

import os
import pathlib
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Returns versions and hardware."""
    devices = jax.devices()
    # JAX counts a shared GPU once for each rank.
    of = "ranks on shared" if gpus_are_shared() else "x"
    return {
        "jaxzero": version("jaxzero"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": version("numpy"),
        "device": f"{len(devices)} {of} {devices[0].device_kind}",
        "processor": _processor(),
        **(gpu_software() if devices[0].platform == "gpu" else {}),
    }


def gpu_software() -> dict[str, str]:
    """Returns versions of NCCL, CUDA's runtime and the driver, where they are known."""
    found = {}
    for name, package in (
        ("nccl", "nvidia-nccl-cu13"),
        ("cuda", "nvidia-cuda-runtime"),
    ):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "unknown"
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    driver = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found | {"driver": driver[0] if driver else "unknown"}


def gpus_are_shared() -> bool:
    """Says whether the launcher has put several ranks on one GPU.

    They then pretend to be different hosts, or NCCL would refuse.
    """
    return jax.devices()[0].platform == "gpu" and "NCCL_HOSTID" in os.environ


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [
        line.split(":", 1)[1].strip()
        for line in text.splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
