"""Gradients whose mean is known, on devices, and accumulators for them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxzero._cli.bench.per_rank import AXIS, Arrays, Way, jitted
from jaxzero._cli.bench.trees import Shape, Tree

PERIOD = 7
"""No divisor of a shard's size, usually: so a shard in the wrong place is seen."""

Step = Callable[[Arrays, Arrays], Arrays]


def whole_numbers(leaf: int, rank: int, numel: int) -> npt.NDArray[np.float64]:
    """Returns what a rank's gradient of a leaf holds: -1, 0 and 1, in a pattern.

    Their sums are exact in 16 bits, in any order, on up to 256 ranks.
    """
    pattern = (np.arange(PERIOD) * (rank + 1) + leaf) % PERIOD % 3 - 1.0
    return np.tile(pattern, -(-numel // PERIOD))[:numel]


class Workload:
    """A full gradient tree on each device, and flat float32 accumulators, sharded.

    Attributes:
      tree: shapes by name.
      dtypes: of the gradients, by name.
      mesh: all devices along one axis.
      ranks: how many devices.
      grads: gradients [ranks, *shape] by name.
    """

    def __init__(
        self,
        tree: Tree,
        dtypes: Sequence[Any],
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        devices = jax.devices() if devices is None else devices
        self.tree = tree
        self.dtypes = {
            name: jnp.dtype(dtypes[i % len(dtypes)]) for i, name in enumerate(tree)
        }
        self.ranks = len(devices)
        self.mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self._spread = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self.grads = {
            name: self._grad(i, shape, self.dtypes[name])
            for i, (name, shape) in enumerate(tree.items())
        }
        self._sums: Arrays | None = None

    def _grad(self, leaf: int, shape: Shape, dtype: Any) -> jax.Array:
        def of_one_rank(index: Any) -> npt.NDArray[Any]:
            values = whole_numbers(leaf, index[0].start or 0, math.prod(shape))
            return values.astype(dtype).reshape(1, *shape)

        return jax.make_array_from_callback(
            (self.ranks, *shape), self._spread, of_one_rank
        )

    def sums(self) -> Arrays:
        """Returns fresh accumulators, flat."""

        def zeros() -> Arrays:
            return {
                name: jnp.zeros(-(-math.prod(shape) // self.ranks) * self.ranks)
                for name, shape in self.tree.items()
            }

        sums: Arrays = jax.jit(zeros, out_shardings=self._spread)()
        return sums

    def step(self, way: Way) -> Step:
        """Returns a jitted reduction that donates its accumulators."""
        step: Step = jitted(self.mesh, way, accumulates=True)
        return step

    def call(self, step: Step) -> Callable[[], Arrays]:
        """Returns a step to time; all steps of a workload share accumulators."""

        def call() -> Arrays:
            self._sums = step(
                self.grads, self.sums() if self._sums is None else self._sums
            )
            return self._sums

        return call
