"""What happens when it is a layer's turn, in the forward and the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxzero._gathered import Recipe, Shards, gather
from jaxzero._tree import PyTree


class Turns:
    """What happens when it is a layer's turn, in forward and in backward.

    Barriers keep the compiler from gathering all layers at the start, and say what a
    collective may run beside: with overlap the layer whose turn it is, else nothing.
    """

    def __init__(self, fn: Callable[..., Any], recipe: Recipe, ranks: int) -> None:
        self._fn = fn
        self._recipe = recipe
        # One rank alone copies; beside a layer that takes its bandwidth away.
        self._overlap = recipe.policy.overlap and ranks > 1

    def gather(self, shards: PyTree) -> PyTree:
        """Returns the full parameters of one layer."""
        return gather(Shards(shards, self._recipe))

    def reduced(self, pending: PyTree, shards: PyTree) -> PyTree:
        """Returns the shards of the summed gradients that a turn left pending."""
        return self._reduce(pending, shards) if self._overlap else pending

    def last_forward(self, full: PyTree, carry: PyTree, consts: list[Any]) -> PyTree:
        """Applies a layer."""
        return self._fn(full, carry, *consts)

    def forward(
        self, full: PyTree, carry: PyTree, consts: list[Any], following: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Applies a layer and gathers the one that follows."""
        if self._overlap:
            carry, following = lax.optimization_barrier((carry, following))
            return self._fn(full, carry, *consts), self.gather(following)
        carry = self._fn(full, carry, *consts)
        carry, following = lax.optimization_barrier((carry, following))
        return carry, self.gather(following)

    def backward(
        self,
        full: PyTree,
        saved: PyTree,
        consts: list[Any],
        cotangent: PyTree,
        pending: PyTree | None,
        following: PyTree | None,
        shards: PyTree,
    ) -> tuple[PyTree, PyTree, list[Any], PyTree | None, PyTree | None]:
        """Differentiates a layer.

        Args:
          full: its parameters.
          saved: the carry that it was given.
          consts: what else it was given.
          cotangent: of its result.
          pending: gradients of the layer after it: with overlap full ones, which are
            to be reduced, else shards.
          following: shards of the layer before it, which are to be gathered.
          shards: those of any layer, for their types.

        Returns:
          Cotangent of its carry, its gradients as `pending` for the next turn, those
          of `consts`, the reduced gradients of the layer after it, and full parameters
          of the one before it.
        """
        barrier: Any = lax.optimization_barrier
        cotangent, saved = barrier((cotangent, saved))
        reduced = None if pending is None else self.reduced(pending, shards)
        # Runs the layer again, beside the reduction: it needs no cotangent.
        pull: Any = jax.vjp(
            lambda full, carry, consts: self._fn(full, carry, *consts),
            full,
            saved,
            consts,
        )[1]
        if self._overlap:
            # Two collectives never run at once, so the gather gets the other half.
            pull, cotangent, reduced, following = barrier(
                (pull, cotangent, reduced, following)
            )
            before = self._gather_if_any(following)
            grads, cotangent, of_consts = pull(cotangent)
            cotangent, grads, before = barrier((cotangent, grads, before))
        else:
            full_grads, cotangent, of_consts = pull(cotangent)
            # First, so that they never meet parameters of the layer before.
            grads = self._reduce(full_grads, shards)
            cotangent, grads, following = barrier((cotangent, grads, following))
            before = self._gather_if_any(following)
        return cotangent, grads, of_consts, reduced, before

    def _reduce(self, full_grads: PyTree, shards: PyTree) -> PyTree:
        # The gather itself has no use here, and XLA never sees it.
        pull: Any = jax.vjp(self.gather, shards)[1]
        (grads,) = pull(full_grads)
        return grads

    def _gather_if_any(self, shards: PyTree | None) -> PyTree | None:
        return None if shards is None else self.gather(shards)
