"""Units in turn, forward and backward, each with its parameters there.

Barriers keep the compiler from gathering all units at the start, and say what a
collective may run beside: with overlap the unit whose turn it is, else nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._units.parameters import Parameters


@dataclasses.dataclass(frozen=True)
class Pending:
    """Gradients that wait for the next turn.

    Attributes:
      bundle: the parameters that they belong to.
      grads: full gradients with overlap, else none that are left to reduce.
    """

    bundle: "Bundle"
    grads: list[Any]


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Parameters that are gathered and reduced in one call.

    Attributes:
      params: their numbers.
      layer: which layer of each; None for whole parameters.
    """

    params: tuple[int, ...]
    layer: Any = None


class Turns:
    """Gathers and reduces bundles beside what computes.

    Args:
      parameters: how.
      shards: per parameter, this rank's shard.
      sums: per parameter, the gradients so far; None where there are none.
    """

    def __init__(
        self, parameters: Parameters, shards: Sequence[Any], sums: Sequence[Any]
    ) -> None:
        self.parameters = parameters
        self.shards = shards
        self.sums = list(sums)

    def local(self, bundle: Bundle | None) -> list[Any]:
        """Returns this rank's part of a bundle."""
        if bundle is None:
            return []
        found = [self.shards[i] for i in bundle.params]
        if bundle.layer is None:
            return found
        return [_take(shard, bundle.layer) for shard in found]

    def gather(self, bundle: Bundle | None, local: Sequence[Any]) -> list[Any]:
        """Returns the full parameters of a bundle."""
        if bundle is None:
            return []
        return self.parameters.gather(
            bundle.params, local, layer=bundle.layer is not None
        )

    def reduce(self, pending: Pending | None) -> list[Any]:
        """Adds what is pending to the sums; returns what was written."""
        if pending is None or not pending.bundle.params:
            return []
        numbers, layer = pending.bundle.params, pending.bundle.layer
        into = [self.sums[i] for i in numbers]
        if layer is None and all(value is None for value in into):
            if self.parameters.one_dtype(numbers):
                return self._write(
                    numbers, self.parameters.reduce(numbers, pending.grads, None)
                )
        into = [
            self.parameters.zeros(self.shards[i]) if value is None else value
            for i, value in zip(numbers, into, strict=True)
        ]
        if layer is None:
            return self._write(
                numbers, self.parameters.reduce(numbers, pending.grads, into)
            )
        written = self.parameters.reduce(
            numbers,
            pending.grads,
            [_take(total, layer) for total in into],
            layer=True,
        )
        return self._write(
            numbers,
            [
                lax.dynamic_update_index_in_dim(total, value, layer, 0)
                for total, value in zip(into, written, strict=True)
            ],
        )

    def _write(self, numbers: Sequence[int], sums: list[Any]) -> list[Any]:
        for i, value in zip(numbers, sums, strict=True):
            self.sums[i] = value
        return sums

    def forward(
        self,
        compute: Any,
        full: Sequence[Any],
        values: Sequence[Any],
        after: Sequence[Any],
        following: Bundle | None,
    ) -> tuple[Any, list[Any]]:
        """Computes a unit and gathers the one that follows.

        Args:
          compute: (parameters, values) -> anything.
          full: its parameters.
          values: its values.
          after: what exists when its turn begins.
          following: what to gather.

        Returns:
          What it computed, and the parameters of the following bundle.
        """
        local = self.local(following)
        if self.parameters.overlap:
            values, _, local = tied((list(values), list(after), local))
            return compute(full, values), self.gather(following, local)
        result = compute(full, values)
        result, local = tied((result, local))
        return result, self.gather(following, local)

    def backward(
        self,
        pull: Any,
        full: Sequence[Any],
        saved: Sequence[Any],
        cotangents: Sequence[Any],
        bundle: Bundle,
        pending: Pending | None,
        following: Bundle | None,
    ) -> tuple[list[Any], Pending, list[Any]]:
        """Differentiates a unit.

        Args:
          pull: (parameters, saved, cotangents) -> cotangents of both.
          full: its parameters.
          saved: what was kept of its forward pass.
          cotangents: of its results.
          bundle: its parameters' numbers.
          pending: gradients of the turn before, which are reduced now.
          following: what the next turn needs gathered.

        Returns:
          Cotangents of its values, its gradients, and parameters of `following`.
        """
        local = self.local(following)
        if self.parameters.overlap:
            grads = [] if pending is None else pending.grads
            cotangents, saved, grads = tied((cotangents, saved, grads))
            if pending is not None:
                pending = Pending(pending.bundle, grads)
            reduced = self.reduce(pending)
            # Two collectives never run at once; what is reduced makes room first.
            cotangents, local, _ = tied((cotangents, local, reduced[-1:]), only=1)
            before = self.gather(following, local)
            own, values = pull(full, saved, cotangents)
            values, own, before = tied((values, own, before))
            return values, Pending(bundle, own), before
        cotangents, saved = tied((cotangents, saved))
        own, values = pull(full, saved, cotangents)
        # First, so that they never meet parameters of the unit before.
        reduced = self.reduce(Pending(bundle, own))
        values, local, _ = tied((values, local, reduced[-1:]))
        before = self.gather(following, local)
        return values, Pending(Bundle(()), []), before


def tied(trees: tuple[Any, ...], only: int | None = None) -> tuple[Any, ...]:
    """Returns trees of arrays, none of which exists before all do.

    Args:
      trees: the trees.
      only: number of the one tree that shall wait; the others are given back as they
        are.
    """
    leaves, structure = jax.tree.flatten(trees)
    places = [i for i, leaf in enumerate(leaves) if _is_numbers(leaf)]
    if not places:
        return trees
    waited = lax.optimization_barrier([leaves[i] for i in places])
    out = list(leaves)
    for i, value in zip(places, waited, strict=True):
        out[i] = value
    tied_trees: tuple[Any, ...] = jax.tree.unflatten(structure, out)
    if only is None:
        return tied_trees
    return tuple(
        one if i == only else tree
        for i, (one, tree) in enumerate(zip(tied_trees, trees, strict=True))
    )


def _is_numbers(leaf: Any) -> bool:
    dtype = jax.typeof(leaf).dtype
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)


def _take(stacked: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(stacked, index, keepdims=False)
