"""What a transport is: one object that knows everything about itself."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import jax

from jaxzero._axis import Axis
from jaxzero._plan import GatherPlan, Limits, ReducePlan
from jaxzero._transports.alive import Alive

Arrays = Sequence[jax.Array]


class Reduced(NamedTuple):
    """What a reduction gives on one rank.

    Attributes:
      shards: the shards in plan order.
      measured: per bucket float32[2]: the norm of the bucket's shards on this rank,
        and 1 if all of them are finite, else 0. Empty unless asked for.
    """

    shards: list[jax.Array]
    measured: list[jax.Array]


class Transport(Protocol):
    """Carries out plans.

    Attributes:
      name: what `Policy.transport` calls it.
      on_gpu: whether it runs on NVIDIA GPUs, and nowhere else.
      limits: sizes measured for it, in force where a policy leaves them open.
      splits_calls: whether a reduction may be split into calls, because they run
        beside other work.
    """

    @property
    def name(self) -> str: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def splits_calls(self) -> bool: ...

    def reduce_scatter(
        self,
        plan: ReducePlan,
        axis: Axis,
        leaves: Arrays,
        into: Arrays | None,
        with_stats: bool,
    ) -> Reduced:
        """Carries out a reduction.

        Args:
          plan: the plan for these leaves.
          axis: the axis that the plan was made for.
          leaves: the leaves in plan order, as `prepare` returns them.
          into: accumulators in plan order, or None. An accumulator that is donated is
            updated in place.
          with_stats: whether to measure norm and finiteness.
        """

    def all_gather(self, plan: GatherPlan, axis: Axis, shards: Arrays) -> Arrays:
        """Carries out a gather.

        Args:
          plan: the plan for these shards.
          axis: the axis that the plan was made for.
          shards: the shards in plan order.

        Returns:
          The leaves in plan order, in true shape and leaf dtype.
        """

    def gathering(self, plan: GatherPlan) -> Iterator[Alive]:
        """Yields what is alive during a gather; the last is what stays."""

    def reducing(
        self, plan: ReducePlan, *, accumulates: bool, kept: bool
    ) -> Iterator[Alive]:
        """Yields what is alive during a reduction; the last is what stays.

        Args:
          plan: the plan.
          accumulates: whether shards are added in place to accumulators, which are
            not counted.
          kept: whether all gradients exist before the first is reduced, whatever the
            transport.
        """
