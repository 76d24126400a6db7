"""The devices that `bench` measures: those of all ranks, GPUs, or CPU devices."""

import contextlib
from collections.abc import Sequence

import jax

from jaxzero._cli.arguments import UsageError
from jaxzero._cli.doctor.fact import one_line
from jaxzero.distributed import initialize, started_by

CPU_DEVICES = 8


def find_devices(count: int | None) -> Sequence[jax.Device]:
    """Joins the other ranks if there are any; returns the devices of all.

    Args:
      count: CPU devices that were asked for.

    Raises:
      UsageError: if the machine has other devices.
    """
    if not started_by():
        return _devices_of_one_process(count)
    if count is not None:
        raise UsageError(
            "--devices is for one process; several have the devices that they were"
            " started with"
        )
    initialize()
    return _all_devices()


def devices_here(devices: Sequence[jax.Device]) -> int:
    """Returns how many of the ranks share this machine's memory."""
    if started_by() == "launch":
        return len(devices)
    return sum(device.process_index == jax.process_index() for device in devices)


def _devices_of_one_process(count: int | None) -> Sequence[jax.Device]:
    wanted = count or CPU_DEVICES
    # Refused if JAX already runs here; then it may have enough of them.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", wanted)
    devices = _all_devices()
    if devices[0].platform != "cpu":
        if count is not None:
            raise UsageError(
                f"--devices is the number of CPU devices, and here are {len(devices)} x"
                f" {devices[0].device_kind}; set JAX_PLATFORMS=cpu to measure on CPUs"
            )
        return devices
    if len(devices) < wanted:
        raise UsageError(
            f"JAX already runs here with {len(devices)} CPU devices; --devices {wanted}"
            " needs a fresh process"
        )
    return devices[:wanted]


def _all_devices() -> Sequence[jax.Device]:
    try:
        return jax.devices()
    except Exception as error:  # Of several types, also AssertionError.
        raise UsageError(
            f"JAX finds no devices: {one_line(error)}; python -m jaxzero doctor says"
            " more"
        ) from error
