"""One tree, reduced in every way that a platform has, and the limit of all of them."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxzero
from jaxzero._cli.bench import limits, rivals
from jaxzero._cli.bench.check import difference
from jaxzero._cli.bench.timing import interleaved_medians
from jaxzero._cli.bench.trees import Tree
from jaxzero._cli.bench.workload import Workload

LIMITS = {True: "as many bytes read and written", False: "one flat leaf"}
"""By whether there is one rank only, which communicates nothing."""


class WrongNumbersError(Exception):
    """The jaxzero that is to be measured does not return the mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to compare.

    Attributes:
      tree: shapes by name.
      dtypes: of the gradients; leaf i has dtype i modulo their number.
      policy: its `comm_dtype` is that of all ways, the rest is jaxzero's.
      devices: the ranks.
      repeats: timed runs of each way.
    """

    tree: Tree
    dtypes: Sequence[str]
    policy: jaxzero.Policy
    devices: Sequence[jax.Device]
    repeats: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """How long one way takes: `kind` is "jaxzero", "rival" or "limit"."""

    how: str
    kind: str
    ms: float
    ratio_to_jaxzero: float


def compare(request: Request) -> list[Timing]:
    """Checks jaxzero's result, then times all ways in turns.

    Raises:
      WrongNumbersError: before anything is timed.
    """
    devices = request.devices
    is_cpu = devices[0].platform == "cpu"
    workload = Workload(request.tree, request.dtypes, devices)
    steps = {
        how: workload.step(way)
        for how, way in rivals.ways(devices[0].platform, request.policy).items()
    }
    wrong = difference(workload, steps[rivals.JAXZERO])
    if wrong is not None:
        raise WrongNumbersError(wrong)
    limit = LIMITS[len(devices) == 1]
    calls: dict[str, Callable[[], Any]] = {
        how: workload.call(step) for how, step in steps.items()
    }
    calls[limit] = (
        limits.memory_call(_moved_bytes(workload), devices[0])
        if len(devices) == 1
        else limits.flat_call(wire_bytes(request), devices)
    )
    at_once = 1 if is_cpu else 10 if len(devices) == 1 else 2
    seconds = interleaved_medians(calls, request.repeats, at_once=at_once)
    kinds = {rivals.JAXZERO: "jaxzero", limit: "limit"}
    return [
        Timing(
            how=how,
            kind=kinds.get(how, "rival"),
            ms=value * 1e3,
            ratio_to_jaxzero=value / seconds[rivals.JAXZERO],
        )
        for how, value in seconds.items()
    ]


def wire_bytes(request: Request) -> dict[str, int]:
    """Returns the bytes of one rank's gradients on the wire, by dtype."""
    found: collections.Counter[str] = collections.Counter()
    for i, shape in enumerate(request.tree.values()):
        own = request.dtypes[i % len(request.dtypes)]
        dtype = jnp.dtype(request.policy.comm_dtype or own)
        found[dtype.name] += dtype.itemsize * math.prod(shape)
    return dict(found)


def _moved_bytes(workload: Workload) -> int:
    """Returns what one rank has to move: gradients in, accumulators in and out."""
    return sum(leaf.nbytes + 8 * leaf.size for leaf in workload.grads.values())
