"""Tells processes apart that would run different programs, before they hang."""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxzero._tree import PyTree

_PROGRAM = "other parameter shapes, dtypes, cuts, policy or options"
_FIX = "Build the model from one configuration."


def check_processes_agree(
    call: str, value: Any, what: str = _PROGRAM, fix: str = _FIX
) -> None:
    """Compares a value between all processes of a run; returns at once in a single one.

    All processes must call it, in the same order.

    Args:
      call: name of the public function, for the message.
      value: anything whose `repr` is equal where it is.
      what: what a process has that others do not, for the message.
      fix: what to do.

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
            f"{call}: process {jax.process_index()} of {jax.process_count()} has "
            f"{what} than processes {others}; expected the same on all, because they "
            f"run one program together. Found here: {value!r}. {fix}"
        )


def is_spread(params: PyTree) -> bool:
    """Says whether this process cannot read all parameters: others hold the rest."""
    return any(
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        for leaf in jax.tree.leaves(params)
    )
