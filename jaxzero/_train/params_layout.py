"""The layout of trained parameters, with the dtypes in which they are stored."""

import dataclasses

import jax
import numpy as np

from jaxzero._dtypes import check_summable, dtype_name, like_kind
from jaxzero._layout import Layout, LeafLayout
from jaxzero._policy import Policy
from jaxzero._tree import PyTree, check_width, flatten


def params_layout(layout: Layout, like: PyTree, policy: Policy) -> Layout:
    """Returns the layout with the dtypes in which parameters are stored.

    Args:
      layout: how the parameters are spread.
      like: the parameters, or their shapes and dtypes.
      policy: `shard_dtype` is the dtype of the shards.

    Raises:
      ValueError: for parameters that are not those of the layout.
      TypeError: for a leaf that is no array of floating-point numbers.
    """
    flat = flatten(like, "params", shapes_suffice=True)
    if len(flat.leaves) != len(jax.tree.leaves(like)):
        raise TypeError("params hold float0 leaves, which are no parameters.")
    layout.check(flat, "params")
    return dataclasses.replace(
        layout, leaves=tuple(_stored(leaf, policy) for leaf in layout.leaves)
    )


def _stored(leaf: LeafLayout, policy: Policy) -> LeafLayout:
    if np.dtype(leaf.dtype).kind in "biu":
        raise TypeError(
            f"params leaf {leaf.path} has dtype {leaf.dtype}, which has no gradient; "
            f"expected floating-point numbers. Take it out of params (for example "
            f"with equinox.partition) and close over it."
        )
    # NumPy's arrays are float64 unless asked; JAX takes them as float32.
    given = dtype_name(jax.dtypes.canonicalize_dtype(leaf.dtype))
    dtype = check_summable(given, leaf.path, policy.comm_dtype)
    stored = dtype
    if policy.shard_dtype is not None:
        stored = like_kind(dtype, policy.shard_dtype, leaf.path, "shard_dtype")
    check_width(stored, f"the shard of leaf {leaf.path}")
    return dataclasses.replace(leaf, dtype=given, stored=stored)
