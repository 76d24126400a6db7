"""Keeps arrays without elements out of compiled programs.

Every operation on an empty argument is folded away in the end, and XLA's Shardy passes
read out of bounds when an argument of a shard_map turns out to be unused: a crash,
sometimes, with JAX 0.11.2. An argument that the traced program never uses JAX itself
removes, so a constant in its place is safe.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxzero._axis import Axis, varying

PyTree = Any


def empty_as_constants(axis: Axis, tree: PyTree) -> PyTree:
    """Returns a tree with constants in place of arrays without elements."""

    def constant(leaf: Any) -> Any:
        if jnp.size(leaf):
            return leaf
        return axis.lift(jnp.zeros(leaf.shape, leaf.dtype), varying(leaf))

    return jax.tree.map(constant, tree)
