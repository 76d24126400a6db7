"""The environment of each rank: who it is, and its devices."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from jaxzero._rank_variables import (
    COORDINATOR,
    LOCAL_DEVICE_IDS,
    NUM_PROCESSES,
    PROCESS_ID,
)

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def rank_environment(
    rank: int, processes: int, coordinator: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of one rank, without what depends on the platform.

    Every rank hashes strings with another seed, so that code whose result depends on
    the order of a set fails here and not only on a cluster.
    """
    return {
        **inherited,
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(processes),
        PROCESS_ID: str(rank),
        "PYTHONHASHSEED": str(rank + 1),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def with_cpu_devices(environment: Mapping[str, str], count: int) -> dict[str, str]:
    """Returns the environment with `count` CPU devices and no others."""
    flags = re.sub(rf"{_DEVICE_COUNT_FLAG}=\d+", "", environment.get("XLA_FLAGS", ""))
    return {
        **environment,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags.strip()} {_DEVICE_COUNT_FLAG}={count}".strip(),
    }


def with_gpu(environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Returns the environment with one of `gpus` GPUs, shared if ranks outnumber them.

    NCCL refuses two ranks of one host on one GPU, so ranks that share one pretend to
    be on different hosts. NCCL then connects them through its network transport.
    """
    rank = int(environment[PROCESS_ID])
    result = {
        **environment,
        # Checks of gradients call Python back from a CPU device.
        "JAX_PLATFORMS": "cuda,cpu",
        LOCAL_DEVICE_IDS: str(rank % gpus),
    }
    if int(environment[NUM_PROCESSES]) > gpus:
        result["NCCL_HOSTID"] = f"host{rank}"
        result["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return result


def count_gpus() -> int:
    """Returns how many NVIDIA GPUs this process may use, without starting CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops reading the list at the first entry that is no device, such as -1.
        names = [name.strip() for name in visible.split(",")]
        return next(
            (i for i, name in enumerate(names) if name in ("", "-1")), len(names)
        )
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run(
        [tool, "--list-gpus"], capture_output=True, text=True, check=False
    )
    return (
        sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        if listed.returncode == 0
        else 0
    )
