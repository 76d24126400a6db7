"""Along which dimension each leaf of a batch holds its examples."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxzero._tree import PyTree, broadcast_prefix, path_name

BatchDim = int | Callable[[str, tuple[int, ...]], int | None] | None
BatchDims = Any
"""A pytree prefix of `BatchDim`s."""

_EXPECTED = (
    "expected the number of a dimension, None for a leaf that goes whole to every "
    "device, or a callable (path, shape) that returns one"
)


def dims_of(batch: PyTree, batch_dims: BatchDims) -> tuple[int | None, ...]:
    """Returns for each leaf, in tree order, the dimension of its examples.

    None is a leaf that goes whole to every device, as one without dimensions does.

    Args:
      batch: the batch, or its shapes.
      batch_dims: as for `zero3`.

    Raises:
      ValueError: for a dimension that a leaf does not have, or no pytree prefix.
      TypeError: for a dimension of another type.
    """
    options = broadcast_prefix(
        batch_dims,
        batch,
        "batch_dims",
        "Give one dimension for the whole batch, a tree of them with one for each "
        "leaf or subtree, or a callable (path, shape), which fits any batch.",
    )
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return tuple(
        _dim(option, path_name(path), jnp.shape(leaf))
        for option, (path, leaf) in zip(options, leaves, strict=True)
    )


def _dim(option: BatchDim, path: str, shape: tuple[int, ...]) -> int | None:
    if callable(option):
        option = option(path, shape)
    if option is None:
        return None
    if isinstance(option, bool) or not hasattr(option, "__index__"):
        raise TypeError(f"zero3: batch_dims of leaf {path} is {option!r}; {_EXPECTED}.")
    dim = option.__index__()
    if not shape:
        return None
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"zero3: batch_dims of leaf {path} is {dim}, but its shape {shape} has "
            f"{len(shape)} dimensions; expected a number from {-len(shape)} to "
            f"{len(shape) - 1}, or None for a leaf that goes whole to every device."
        )
    return dim % len(shape)


def count_examples(batch: PyTree, dims: tuple[int | None, ...]) -> int | None:
    """Returns how many examples a batch has; None if all leaves go whole.

    Raises:
      ValueError: naming a leaf with another number of examples than most.
    """
    found = [
        (path_name(path), leaf, dim, jnp.shape(leaf)[dim])
        for (path, leaf), dim in zip(
            jax.tree_util.tree_leaves_with_path(batch), dims, strict=True
        )
        if dim is not None
    ]
    if not found:
        return None
    common, _ = Counter(count for *_, count in found).most_common(1)[0]
    like = next(path for path, _, _, count in found if count == common)
    for path, leaf, dim, count in found:
        if count != common:
            raise ValueError(
                f"zero3: batch leaf {path} has shape {jnp.shape(leaf)}, with {count} "
                f"examples along dimension {dim}, but leaf {like} has {common}; "
                f"expected as many in each leaf that is split. For one that goes whole "
                f"to every device, such as class weights, or holds its examples along "
                f"another dimension, say so: zero3(..., batch_dims=lambda path, "
                f"shape: None if path == {path!r} else 0).{key_hint(leaf)}"
            )
    return common


def key_hint(leaf: Any) -> str:
    """Returns what to say of a leaf that may be a raw random key."""
    shape = jnp.shape(leaf)
    is_raw_key = len(shape) == 1 and shape[0] in (2, 4) and leaf.dtype == jnp.uint32
    return " A random key must come from jax.random.key." * is_raw_key
