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
class Bundle:
    """Parameters that are gathered and reduced in one call.

    Attributes:
      entries: number of each, and which layer of it; None for all of it.
    """

    entries: tuple[tuple[int, Any], ...]

    @classmethod
    def whole(cls, params: Sequence[int]) -> "Bundle":
        """Returns a bundle of parameters as they are."""
        return cls(tuple((i, None) for i in params))

    def __add__(self, other: "Bundle") -> "Bundle":
        return Bundle(self.entries + other.entries)

    @property
    def numbers(self) -> list[int]:
        """The parameters."""
        return [i for i, _ in self.entries]

    @property
    def layered(self) -> list[bool]:
        """Which of them stands for one layer."""
        return [layer is not None for _, layer in self.entries]


@dataclasses.dataclass(frozen=True)
class Pending:
    """Full gradients that wait to be reduced in the next turn.

    Attributes:
      bundle: the parameters that they belong to.
      grads: the gradients.
    """

    bundle: Bundle
    grads: list[Any]

    def __add__(self, other: "Pending") -> "Pending":
        return Pending(self.bundle + other.bundle, self.grads + other.grads)


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
        return [_part(self.shards[i], layer) for i, layer in bundle.entries]

    def gather(self, bundle: Bundle | None, local: Sequence[Any]) -> list[Any]:
        """Returns the full parameters of a bundle."""
        if bundle is None:
            return []
        return self.parameters.gather(bundle.numbers, local, bundle.layered)

    def start(self, numbers: Sequence[int]) -> None:
        """Starts sums that have not been started."""
        for i in numbers:
            if self.sums[i] is None:
                self.sums[i] = self.zeros(self.shards[i])

    def zeros(self, like: Any) -> jax.Array:
        """Returns zeros of a value's type."""
        return self.parameters.zeros(like)

    def put(self, numbers: Sequence[int], sums: Sequence[Any]) -> None:
        """Replaces sums."""
        for i, value in zip(numbers, sums, strict=True):
            self.sums[i] = value

    def with_sums(self, numbers: Sequence[int], sums: Sequence[Any]) -> "Turns":
        """Returns turns that add to these sums instead."""
        turns = Turns(self.parameters, self.shards, self.sums)
        turns.put(numbers, sums)
        return turns

    def reduce(self, pending: Pending | None) -> list[Any]:
        """Adds what is pending to the sums; returns what was written."""
        if pending is None or not pending.bundle.entries:
            return []
        bundle = pending.bundle
        numbers, layered = bundle.numbers, bundle.layered
        fresh = all(self.sums[i] is None for i in numbers) and not any(layered)
        into = None
        if not fresh or not self.parameters.one_dtype(numbers):
            self.start(numbers)
            into = [_part(self.sums[i], layer) for i, layer in bundle.entries]
        written = self.parameters.reduce(numbers, pending.grads, into, layered)
        for (i, layer), value in zip(bundle.entries, written, strict=True):
            self.sums[i] = (
                value
                if layer is None
                else lax.dynamic_update_index_in_dim(self.sums[i], value, layer, 0)
            )
        return written

    def forward(
        self,
        compute: Any,
        full: Sequence[Any],
        values: Sequence[Any],
        following: Bundle | None,
    ) -> tuple[Any, list[Any]]:
        """Computes a unit and gathers the one that follows.

        Args:
          compute: (parameters, values) -> anything.
          full: its parameters.
          values: its values.
          following: what to gather.

        Returns:
          What it computed, and the parameters of the following bundle.
        """
        local = self.local(following)
        if self.parameters.overlap:
            values, local = tied((list(values), local))
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


def take(stacked: Any, index: Any) -> Any:
    """Returns one entry along dimension 0."""
    return lax.dynamic_index_in_dim(stacked, index, keepdims=False)


def _part(shard: Any, layer: Any) -> Any:
    return shard if layer is None else take(shard, layer)
