"""Reductions repeated inside one program, so that the host is not what is timed.

One call of a program with hundreds of arguments takes the host about as long as NVLink
needs for a hundred megabytes.
"""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxzero._cli.bench.per_rank import AXIS, Arrays, Way, jitted
from jaxzero._cli.bench.timing import Call, interleaved_medians
from jaxzero._cli.bench.workload import Workload

THREADS = 11


def repeated(way: Way, count: int) -> Way:
    """Returns a way that reduces `count` times, each time after the one before."""

    def several(grads: Arrays, into: Arrays | None) -> Arrays:
        def once(_: Any, last: Arrays) -> Arrays:
            # The barrier makes the gradients look new each time; otherwise XLA might
            # reduce them once, before the loop.
            own, last = lax.optimization_barrier((grads, last))
            return way(own, None if into is None else last)

        start = _zeros(way, grads) if into is None else into
        result: Arrays = lax.fori_loop(0, count, once, start)
        return result

    return several


def _zeros(way: Way, grads: Arrays) -> Arrays:
    shapes = jax.eval_shape(lambda own: way(own, None), grads)
    return jax.tree.map(
        lambda leaf: lax.pcast(jnp.zeros(leaf.shape, leaf.dtype), AXIS, to="varying"),
        shapes,
    )


def flat(grads: Arrays, into: Arrays | None) -> Arrays:
    """The limit: nothing but a reduce-scatter of [ranks, n] leaves."""
    return {name: lax.psum_scatter(leaf, AXIS) for name, leaf in grads.items()}


class Bench:
    """Times ways to reduce a tree; a way into "fresh" shards or "float32" sums.

    Attributes:
      work: the tree on all devices.
      nbytes: of one rank's gradients.
    """

    def __init__(self, tree: Mapping[str, Any], dtype: str, count: int) -> None:
        self.work = Workload(dict(tree), [dtype])
        self.nbytes = sum(g.nbytes for g in self.work.grads.values()) // self.work.ranks
        self._dtype = jnp.dtype(dtype)
        self._count = count

    def seconds(self, ways: Mapping[Any, tuple[str, Way]], repeats: int) -> Any:
        """Returns the median seconds of each way's reduction; they take turns.

        Args:
          ways: by any key; each with what it reduces into.
          repeats: timed runs of each.
        """
        programs = compiled(
            {key: self._program(into, way) for key, (into, way) in ways.items()}
        )
        calls: dict[Any, Call] = {
            key: self._call(into, programs[key], way is flat)
            for key, (into, way) in ways.items()
        }
        found = interleaved_medians(calls, repeats)
        return {key: value / self._count for key, value in found.items()}

    def _program(self, into: str, way: Way) -> tuple[Any, Sequence[Any]]:
        accumulates = into == "float32"
        jit = jitted(
            self.work.mesh, repeated(way, self._count), accumulates=accumulates
        )
        if way is flat:
            return jit, (self._flat_grads(),)
        return jit, (self.work.grads, *([self.work.sums()] if accumulates else []))

    def _call(self, into: str, program: Any, is_flat: bool) -> Call:
        if is_flat:
            grads = self._flat_grads()
            return lambda: program(grads)
        if into == "float32":
            return self.work.call(program)
        return lambda: program(self.work.grads)

    def _flat_grads(self) -> Arrays:
        ranks = self.work.ranks
        numel = -(-self.nbytes // self._dtype.itemsize // ranks // 64) * 64
        spread = NamedSharding(self.work.mesh, PartitionSpec(AXIS))
        make = jax.jit(
            lambda: {"flat": jnp.zeros((ranks, ranks, numel), self._dtype)},
            out_shardings=spread,
        )
        grads: Arrays = make()
        return grads


def compiled(programs: Mapping[Any, tuple[Any, Sequence[Any]]]) -> dict[Any, Any]:
    """Traces programs one after the other, and compiles them at the same time."""
    lowered = {key: jit.lower(*arguments) for key, (jit, arguments) in programs.items()}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        jobs: dict[Any, Callable[[], Any]] = {
            key: pool.submit(program.compile).result for key, program in lowered.items()
        }
        return {key: result() for key, result in jobs.items()}
