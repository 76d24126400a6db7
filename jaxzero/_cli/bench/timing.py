"""Timing by medians of calls that take turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Call = Callable[[], Any]


def interleaved_medians(
    calls: Mapping[str, Call], repeats: int, *, warmups: int = 2, at_once: int = 1
) -> dict[str, float]:
    """Returns the median seconds of each call.

    The calls take turns, so that a slow moment of the machine hits all of them and
    their ratios hold. Each timed run follows an untimed one of the same call, so that
    none pays for the memory that the call before it gave back.

    Args:
      calls: what to time; each returns arrays that are waited for.
      repeats: timed runs of each.
      warmups: runs of each before the first timed one, which compile.
      at_once: calls in a run, so that the host is ahead of a GPU. On CPU devices it
        must be 1: XLA's CPU client may block with several in flight.
    """
    for call in calls.values():
        for _ in range(warmups):
            jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            jax.block_until_ready(call())
            start = time.perf_counter()
            for _ in range(at_once):
                result = call()
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / at_once)
    return {name: statistics.median(values) for name, values in times.items()}
