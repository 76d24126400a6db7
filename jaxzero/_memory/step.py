"""The gathers and reductions of a ZeRO-3 step, as what is alive during each."""

import dataclasses
from collections.abc import Sequence

from jaxzero._cut import cut_leaf
from jaxzero._dtypes import check_summable, like_kind
from jaxzero._layout import Group, Layout, LeafLayout
from jaxzero._plan import LeafSpec, plan_gather, plan_reduce
from jaxzero._policy import Policy
from jaxzero._train.options import Sync
from jaxzero._transports.alive import Alive, array_bytes
from jaxzero._transports.transport import Transport

Leaves = Sequence[LeafLayout]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What decides the memory of a step.

    Attributes:
      layout: how the parameters lie.
      policy: dtypes and sizes.
      transport: what carries its gathers and reductions out.
      replicas: copies of each shard.
      accumulate: microbatches.
      sync: when gradients meet.
    """

    layout: Layout
    policy: Policy
    transport: Transport
    replicas: int
    accumulate: int
    sync: Sync

    @property
    def loops(self) -> bool:
        """Whether there are several microbatches, in a loop."""
        return self.accumulate > 1

    @property
    def keeps_full(self) -> bool:
        """Whether gradients of several microbatches are added in full size."""
        return self.loops and self.sync == "last"

    @property
    def overlaps(self) -> bool:
        """Whether collectives of a layer run beside the layer before or after it."""
        return self.policy.overlap and self.layout.group_size * self.summed_at_once > 1

    @property
    def summed_at_once(self) -> int:
        """Replicas over which a reduction in the backward pass sums."""
        return 1 if self.sync == "replicas_last" else self.replicas

    @property
    def resident(self) -> Leaves:
        """Leaves outside layers."""
        entries = self.layout.entries
        return [self.layout.leaves[e] for e in entries if not isinstance(e, Group)]

    def members(self, group: Group) -> Leaves:
        """Leaves of a group."""
        return self.layout.leaves[group.begin : group.end]

    @property
    def stacked_bytes(self) -> int:
        """Bytes of one rank's shards of stacked layers."""
        stacked = [group for group in self.layout.groups if group.stacked]
        return sum(shard_bytes(self.members(group)) for group in stacked)

    def compute_dtype(self, leaf: LeafLayout) -> str:
        """Dtype of a gathered parameter, and of its gradient."""
        dtype = check_summable(leaf.dtype, leaf.path, self.policy.comm_dtype)
        asked = self.policy.compute_dtype
        if asked is None:
            return dtype
        return like_kind(dtype, asked, leaf.path, "compute_dtype")

    def full_bytes(self, leaves: Leaves) -> int:
        """Bytes of the leaves in full size, in the dtype of computing."""
        return sum(array_bytes(leaf.shape, self.compute_dtype(leaf)) for leaf in leaves)

    def layer_bytes(self, leaves: Leaves) -> int:
        """Bytes of one layer of the leaves in full size, in the dtype of computing."""
        return sum(
            array_bytes(leaf.unit_shape, self.compute_dtype(leaf)) for leaf in leaves
        )

    def gathering(self, leaves: Leaves) -> list[Alive]:
        """Returns what is alive while leaves, or one layer of each, are gathered."""
        plan = plan_gather(
            list(map(self._spec, leaves)),
            self.layout.group_size,
            self.policy,
            limits=self.transport.limits,
        )
        return list(self.transport.gathering(plan))

    def reducing(
        self, leaves: Leaves, *, accumulates: bool, kept: bool = False
    ) -> list[Alive]:
        """Returns what is alive while their gradients, or of one layer, are reduced.

        Args:
          leaves: the leaves.
          accumulates: whether the shards are added to accumulators.
          kept: whether all gradients exist before the first is reduced.
        """
        specs = [self._spec(leaf) for leaf in leaves]
        if self.keeps_full:
            specs = [dataclasses.replace(s, dtype=s.shard_dtype) for s in specs]
        plan = plan_reduce(
            specs,
            self.layout.group_size,
            self.policy,
            limits=self.transport.limits,
            replicas=self.summed_at_once,
            accumulates=accumulates,
        )
        return list(
            self.transport.reducing(
                plan, accumulates=accumulates, kept=kept or self.keeps_full
            )
        )

    def reducing_over_replicas(self) -> list[Alive]:
        """Returns what is alive while all shards are summed over replicas."""
        specs = [
            LeafSpec(
                path=leaf.path,
                shape=leaf.shard_shape,
                dtype=leaf.stored,
                shard_dtype=leaf.stored,
                cut=cut_leaf("whole", leaf.path, leaf.shard_shape, self.replicas),
            )
            for leaf in self.layout.leaves
        ]
        plan = plan_reduce(
            specs,
            self.replicas,
            dataclasses.replace(self.policy, comm_dtype=None),
            limits=self.transport.limits,
        )
        return list(self.transport.reducing(plan, accumulates=False, kept=True))

    def _spec(self, leaf: LeafLayout) -> LeafSpec:
        return LeafSpec(
            path=leaf.path,
            shape=leaf.unit_shape,
            dtype=self.compute_dtype(leaf),
            shard_dtype=leaf.stored,
            cut=leaf.cut,
        )


def shard_bytes(leaves: Leaves) -> int:
    """Returns the bytes of one rank's shards, in the dtype in which they are stored."""
    return sum(array_bytes(leaf.shard_shape, leaf.stored) for leaf in leaves)
