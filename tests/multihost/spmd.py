"""Functions over all devices of all processes, one rank per device."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Tree = Any


class Spmd:
    """Runs functions over a mesh of all devices of all processes.

    Attributes:
      mesh: the mesh, with one axis or several; ranks count along all of them.
      ranks: number of devices.
      spec: the spec that spreads a leading dimension over all of them.
    """

    def __init__(self, shape: Sequence[int], names: Sequence[str]) -> None:
        self.mesh = jax.make_mesh(
            tuple(shape),
            tuple(names),
            axis_types=(AxisType.Auto,) * len(names),
        )
        self.ranks = self.mesh.size
        self.spec = PartitionSpec(tuple(names))

    def place(self, tree_per_rank: Sequence[Tree]) -> Tree:
        """Returns global arrays whose leading index is the rank."""

        def place(*leaves: np.ndarray) -> jax.Array:
            stacked = np.stack(leaves)
            return jax.make_array_from_callback(
                stacked.shape,
                NamedSharding(self.mesh, self.spec),
                lambda index: stacked[index],
            )

        return jax.tree.map(place, *tree_per_rank)

    def jit(self, function: Callable[..., Tree], **options: Any) -> Any:
        """Returns `function`, from each rank's own trees to its own, jitted."""

        def one(*stacked: Tree) -> Tree:
            trees = jax.tree.map(lambda leaf: leaf[0], stacked)
            return jax.tree.map(lambda leaf: leaf[None], function(*trees))

        mapped = jax.shard_map(
            one, mesh=self.mesh, in_specs=self.spec, out_specs=self.spec, **options
        )
        return jax.jit(mapped)

    def run(
        self, function: Callable[..., Tree], *trees: Sequence[Tree], **options: Any
    ) -> dict[int, Tree]:
        """Runs a function on every rank and returns the results of the local ones.

        Args:
          function: takes and returns trees of one rank.
          *trees: for each argument, a tree per rank.
          **options: for `jax.shard_map`.
        """
        return self.local(
            self.jit(function, **options)(*(self.place(tree) for tree in trees))
        )

    def local(self, results: Tree) -> dict[int, Tree]:
        """Returns what this process's ranks hold of a jitted function's results."""
        leaves, treedef = jax.tree.flatten(results)
        # By device, not by index: XLA replicates an empty array instead of cutting it.
        rank_of = {device: r for r, device in enumerate(self.mesh.devices.flat)}
        per_rank: dict[int, list[np.ndarray]] = {}
        for leaf in leaves:
            for shard in leaf.addressable_shards:
                held = per_rank.setdefault(rank_of[shard.device], [])
                held.append(np.asarray(shard.data)[0])
        return {rank: treedef.unflatten(held) for rank, held in per_rank.items()}


def everyones(number: int) -> list[int]:
    """Returns the 64-bit numbers that the processes gave, in their order."""
    halves = np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)
    gathered = multihost_utils.process_allgather(halves).reshape(-1, 2)
    return [int(high) << 32 | int(low) for high, low in gathered]


def digest(value: object) -> int:
    """Returns a 64-bit digest of a value's text."""
    return int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:8])


def assert_alike(value: object) -> None:
    """Asserts that all processes have a value with the same text."""
    digests = everyones(digest(value))
    assert set(digests) == {digest(value)}, f"not on all processes: {value}"
