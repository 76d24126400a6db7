"""A batch on the mesh: examples over all devices, the rest everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._train.options import StepOptions
from jaxzero._tree import PyTree, path_name


def batch_spec(options: StepOptions) -> P:
    """Returns the spec of a leaf with examples."""
    return P(options.names + options.replicate)


def batch_specs(batch: PyTree, options: StepOptions) -> PyTree:
    """Returns the spec of each leaf."""
    return jax.tree.map(
        lambda leaf: batch_spec(options) if jnp.ndim(leaf) else P(), batch
    )


def batch_shardings(batch: PyTree, options: StepOptions, mesh: Mesh) -> PyTree:
    """Returns the sharding of each leaf.

    Raises:
      ValueError: naming a leaf that cannot be split over devices and microbatches.
    """
    parts = options.devices * options.accumulate

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        shape = jnp.shape(leaf)
        if not shape:
            return NamedSharding(mesh, P())
        if shape[0] % parts or not shape[0]:
            raise ValueError(
                f"zero3: batch leaf {path_name(path)} has shape {shape}; expected a "
                f"first dimension that divides by {parts} ({options.devices} devices x "
                f"{options.accumulate} microbatches). Give all examples along "
                f"dimension 0."
            )
        return NamedSharding(mesh, batch_spec(options))

    return jax.tree_util.tree_map_with_path(sharding, batch)
