"""`doctor` on the machine: its devices, and whether JAX sees all of them."""

import collections
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxzero._cli.doctor.fact import (
    CHECK_DEVICE,
    CHECK_PLATFORMS,
    INSTALL_PLUGIN,
    Fact,
    one_line,
)
from jaxzero._cli.doctor.install import package_version
from jaxzero._cli.doctor.limit import TimeLimit, TimeLimitError

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
HOPPER = 9.0
LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler"

CHECK_GPU = (
    "read what JAX printed about its CUDA plugin; see that nvidia-smi lists the GPU,"
    " that CUDA_VISIBLE_DEVICES does not hide it, and that jax, jaxlib and the plugin"
    " have one version"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that JAX sees here, and whether there is an NVIDIA GPU at all.

    Attributes:
      devices: none where JAX cannot list them.
      error: why JAX cannot list them.
      fix: what to do about that.
      has_gpu: whether this machine has an NVIDIA GPU, also if JAX does not see it.
    """

    devices: tuple[Any, ...]
    error: str | None = None
    fix: str | None = None
    has_gpu: bool

    @property
    def cuda_devices(self) -> tuple[Any, ...]:
        """The devices that the CUDA module serves."""
        return tuple(filter(_is_cuda, self.devices))


def find_machine(limit: TimeLimit) -> Machine:
    """Asks JAX for its devices; a driver that hangs cannot keep it waiting."""
    try:
        devices = limit.run(_local_devices)
    except TimeLimitError as caught:
        return _without_devices(str(caught), CHECK_DEVICE)
    except Exception as caught:
        return _without_devices(one_line(caught), CHECK_PLATFORMS)
    has_gpu = any(map(_is_cuda, devices)) or has_nvidia_driver()
    return Machine(devices=devices, has_gpu=has_gpu)


def _local_devices(enter_step: Callable[[str], None]) -> tuple[Any, ...]:
    enter_step("jax.local_devices()")
    return tuple(jax.local_devices())


def _without_devices(error: str, fix: str) -> Machine:
    return Machine(devices=(), error=error, fix=fix, has_gpu=has_nvidia_driver())


def _is_cuda(device: Any) -> bool:
    # AMD's GPUs have the same platform name.
    version = str(device.client.platform_version).lower()
    return device.platform == "gpu" and "rocm" not in version


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia").exists() or bool(shutil.which("nvidia-smi"))


def installed_plugins() -> list[str]:
    found = ((plugin, package_version(plugin)) for plugin in PLUGINS)
    return [f"{plugin} {version}" for plugin, version in found if version]


def plugin(machine: Machine) -> Iterator[Fact]:
    plugins = ", ".join(installed_plugins())
    # Devices are proof enough: the plugin may come without package metadata.
    is_missing = not plugins and machine.has_gpu and not machine.cuda_devices
    yield Fact(
        key="CUDA plugin",
        value=plugins or "not installed",
        fix=INSTALL_PLUGIN if is_missing else None,
    )


def devices(machine: Machine) -> Iterator[Fact]:
    if machine.error is not None:
        value = f"JAX cannot list them: {machine.error}"
        yield Fact(key="devices", value=value, fix=machine.fix)
        return
    platforms = sorted({device.platform for device in machine.devices})
    yield Fact(key="platform", value=", ".join(platforms))
    names = collections.Counter(map(_device_name, machine.devices))
    value = ", ".join(f"{count} x {name}" for name, count in names.items())
    fix = None
    if machine.has_gpu and not machine.cuda_devices:
        if jax.config.jax_platforms:
            value += " (JAX_PLATFORMS leaves out the NVIDIA GPU)"
        else:
            value += " (JAX does not see the NVIDIA GPU)"
            # Without a plugin that is its consequence, and no second problem.
            fix = CHECK_GPU if installed_plugins() else None
    yield Fact(key="devices", value=value, fix=fix)


def _device_name(device: Any) -> str:
    capability = getattr(device, "compute_capability", None)
    name = str(device.device_kind)
    return f"{name} (compute capability {capability})" if capability else name


def latency_hiding(machine: Machine) -> Iterator[Fact]:
    if not any(_is_before_hopper(device) for device in machine.cuda_devices):
        return
    value = (
        f"off by default on GPUs before Hopper; XLA_FLAGS={LATENCY_HIDING}=true also"
        " puts XLA's own collectives on the stream of jaxzero's"
    )
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, setting = flag.partition("=")
        if name == LATENCY_HIDING:
            is_on = setting.lower() in ("", "1", "true")
            value = "on (XLA_FLAGS)" if is_on else "off (XLA_FLAGS)"
    yield Fact(key="latency hiding scheduler", value=value)


def _is_before_hopper(device: Any) -> bool:
    return float(getattr(device, "compute_capability", HOPPER)) < HOPPER
