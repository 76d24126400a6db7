"""Tells processes apart that would run different programs, before they hang."""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def check_processes_agree(call: str, value: Any) -> None:
    """Compares a value between all processes of a run; returns at once in a single one.

    All processes must call it, in the same order.

    Args:
      call: name of the public function, for the message.
      value: anything whose `repr` is equal where it is.

    Raises:
      ValueError: on every process, if they differ.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(repr(value).encode()).digest()[:16]
    mine = np.frombuffer(digest, np.uint32)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    others = [
        rank for rank, row in enumerate(everyone) if not np.array_equal(row, mine)
    ]
    # Judged alike everywhere, so that all processes raise or none does.
    if any(not np.array_equal(row, everyone[0]) for row in everyone):
        raise ValueError(
            f"{call}: process {jax.process_index()} of {jax.process_count()} has other "
            f"parameter shapes, dtypes, cuts or policy than processes {others}; "
            f"expected the same on all, because they run one program together. Found "
            f"here: {value!r}. Build the model from one configuration."
        )
