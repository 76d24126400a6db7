"""Keeps arrays without elements out of compiled steps."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxzero._axis import Axis, varying
from jaxzero._tree import PyTree


def empty_as_constants(axis: Axis, tree: PyTree) -> PyTree:
    """Returns a tree with constants in place of leaves without elements.

    As `own_or_empty` does for single leaves, and for its reason: XLA may crash on an
    empty argument of a shard_map whose uses are all folded away.
    """

    def constant(leaf: Any) -> Any:
        if jnp.size(leaf):
            return leaf
        return axis.lift(jnp.zeros(leaf.shape, leaf.dtype), varying(leaf))

    return jax.tree.map(constant, tree)
