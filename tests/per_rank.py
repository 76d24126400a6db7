"""Functions of one rank, run on all ranks of a mesh of this process.

Trees of NumPy arrays go in, one per rank, and come out again, one per rank, so that
a test compares them with the oracle and never sees a sharding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any


class PerRank:
    """Runs functions on every rank of a mesh.

    Attributes:
      mesh: the mesh.
      names: its axes in rank order, the last one counting fastest.
      check_vma: as for `jax.shard_map`.
    """

    def __init__(
        self,
        mesh: Mesh,
        names: Sequence[str] | None = None,
        *,
        check_vma: bool = True,
    ) -> None:
        self.mesh = mesh
        self.names = tuple(names or mesh.axis_names)
        self.check_vma = check_vma
        self.spec = PartitionSpec(self.names)

    def place(self, tree_per_rank: Sequence[Tree]) -> Tree:
        """Returns global arrays whose leading index is the rank."""
        sharding = NamedSharding(self.mesh, self.spec)
        return jax.tree.map(
            lambda *leaves: jax.device_put(np.stack(leaves), sharding), *tree_per_rank
        )

    def jit(self, function: Callable[..., Tree], **options: Any) -> Any:
        """Returns the function, from global arrays to global arrays, jitted."""

        def one(*stacked: Tree) -> Tree:
            trees = jax.tree.map(lambda leaf: leaf[0], stacked)
            return jax.tree.map(lambda leaf: leaf[None], function(*trees))

        mapped = jax.shard_map(
            one,
            mesh=self.mesh,
            in_specs=self.spec,
            out_specs=self.spec,
            check_vma=self.check_vma,
        )
        return jax.jit(mapped, **options)

    def run(self, function: Callable[..., Tree], *trees: Sequence[Tree]) -> list[Tree]:
        """Returns every rank's result, in rank order.

        Args:
          function: takes and returns trees of one rank.
          *trees: for each argument, a tree per rank.
        """
        return self.split(self.jit(function)(*map(self.place, trees)))

    def split(self, stacked: Tree) -> list[Tree]:
        """Returns global arrays whose leading index is the rank as trees per rank."""
        host = jax.tree.map(np.asarray, stacked)
        return [
            jax.tree.map(lambda leaf, rank=rank: leaf[rank], host)
            for rank in range(self.mesh.size)
        ]
