"""Several processes: join the other ranks, whoever started them.

`python -m jaxzero launch -n 4 -- python train.py` runs a program as several ranks on
one machine; `srun` runs it as several ranks of a cluster. Either way the program calls
`initialize()` once, before its first use of a device.
"""

import os
import sys
import types
import typing

import jax

from jaxzero import _rank_variables as variables

_HOW_TO_START = (
    "Start it with `python -m jaxzero launch -n 4 -- COMMAND` on one machine, "
    "or with `srun COMMAND` on a cluster."
)


def started_by() -> typing.Literal["launch", "slurm"] | None:
    """Says who started this process as one of several ranks.

    Returns:
      `"launch"` for `python -m jaxzero launch`, `"slurm"` for `srun` with
      several tasks, None if it was started alone.
    """
    if variables.PROCESS_ID in os.environ:
        return "launch"
    if int(os.environ.get(variables.SLURM_STEP_NUM_TASKS, "1")) > 1:
        return "slurm"
    return None


def initialize() -> None:
    """Joins the other ranks: `jax.distributed.initialize`, told what it needs to know.

    From here on an uncaught exception ends this process at once. Without that it
    would first wait for the other ranks, which may wait for it.

    Raises:
      RuntimeError: if this process is not one of several ranks, or was given only
        some of the variables that say which.
    """
    starter = started_by()
    if starter is None:
        raise RuntimeError(f"this process was started alone. {_HOW_TO_START}")
    if starter == "slurm":
        jax.distributed.initialize()
    else:
        devices = os.environ.get(variables.LOCAL_DEVICE_IDS)
        coordinator = _variable(variables.COORDINATOR)
        jax.distributed.initialize(
            coordinator_address=coordinator,
            # All ranks are here; the default listens on all interfaces.
            coordinator_bind_address=coordinator,
            num_processes=int(_variable(variables.NUM_PROCESSES)),
            process_id=int(_variable(variables.PROCESS_ID)),
            local_device_ids=[int(d) for d in devices.split(",")] if devices else None,
            initialization_timeout=60,
            shutdown_timeout_seconds=60,
        )
    sys.excepthook = _report_and_exit


def exit_on_failure(status: int) -> None:
    """Ends this process at once if `status` is an error; does nothing if it is 0.

    For programs that catch their own exceptions, such as test runners: the usual
    exit waits for the other ranks.

    Args:
      status: the exit code that the program wants.
    """
    if status:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where nobody reads them any more
            os._exit(status)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise RuntimeError(
            f"{variables.PROCESS_ID} is set but {name} is not. {_HOW_TO_START}"
        )
    return value


def _report_and_exit(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, trace)
    exit_on_failure(1)
