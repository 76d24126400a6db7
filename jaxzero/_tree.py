"""Pytree in, pytree out: leaves with their key paths, and the way back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxzero._cut import CutOption, CutTree
from jaxzero._dtypes import dtype_name

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a pytree with its key path, as text and as keys."""

    path: str
    value: Any
    keys: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        """The array's dtype name."""
        return dtype_name(self.value.dtype)


@dataclasses.dataclass(frozen=True)
class Flat:
    """The arrays of a pytree, and how to put others in their place.

    `float0` leaves, the gradients of integers, carry nothing: they are set aside and
    put back as they are. `None` and `optax.MaskedNode` are no leaves to JAX.
    """

    leaves: tuple[Leaf, ...]
    rebuild: Callable[[Sequence[Any]], PyTree]
    treedef: Any


def flatten(tree: PyTree, what: str, *, shapes_suffice: bool = False) -> Flat:
    """Flattens a pytree of arrays.

    Args:
      tree: the pytree.
      what: its name in messages, such as "grads".
      shapes_suffice: whether a leaf may be a `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: for a leaf that is no array of numbers.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    values = []
    for path, value in with_paths:
        array = _as_array(value, path_name(path), what)
        if isinstance(array, jax.ShapeDtypeStruct) and not shapes_suffice:
            raise TypeError(
                f"{what} leaf {path_name(path)} is a ShapeDtypeStruct, a shape "
                f"without numbers; expected an array. Give the tree that it was made "
                f"from."
            )
        values.append(array)
    moved = [i for i, value in enumerate(values) if not _is_float0(value)]

    def rebuild(new: Sequence[Any]) -> PyTree:
        out = list(values)
        for index, value in zip(moved, new, strict=True):
            out[index] = value
        return jax.tree.unflatten(treedef, out)

    leaves = tuple(
        Leaf(path_name(with_paths[i][0]), values[i], tuple(with_paths[i][0]))
        for i in moved
    )
    return Flat(leaves, rebuild, treedef)


def path_name(path: Any) -> str:
    """Returns a key path as messages show it."""
    return keystr(path) or "(the tree itself)"


def _as_array(value: Any, path: str, what: str) -> Any:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if not _holds_numbers(value.dtype):
            raise TypeError(
                f"{what} leaf {path} has dtype {value.dtype}; expected an array of "
                f"numbers. Take it out of the tree, or if it is a random key, give "
                f"jax.random.key_data of it."
            )
        return value
    if isinstance(value, bool | int | float | complex):
        return np.asarray(value, jax.dtypes.canonicalize_dtype(type(value)))
    raise TypeError(
        f"{what} leaf {path} is of type {type(value).__name__}; expected an array. "
        f"Take it out of the tree (for example with equinox.partition or "
        f"optax.masked)."
    )


def _holds_numbers(dtype: Any) -> bool:
    # Objects, strings and dates, and the dtypes of JAX that NumPy does not have.
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return not extended and np.dtype(dtype).kind not in "OSUmM"


def _is_float0(value: Any) -> bool:
    return bool(value.dtype == jax.dtypes.float0)


def match(tree: PyTree, reference: Flat, what: str, reference_name: str) -> Flat:
    """Flattens `tree` and checks that it has the leaves of `reference`.

    Raises:
      ValueError: naming the first key path that only one of them has.
    """
    flat = flatten(tree, what)
    paths = [leaf.path for leaf in reference.leaves]
    check_structure(
        flat, reference.treedef, paths, what, reference_name, all_leaves=True
    )
    return flat


def check_structure(
    flat: Flat,
    treedef: Any,
    paths: Sequence[str],
    what: str,
    reference: str,
    *,
    all_leaves: bool = False,
) -> None:
    """Refuses a tree of another structure.

    Args:
      flat: the tree.
      treedef: the structure that it should have.
      paths: key paths of the leaves that it may have.
      what: its name in messages.
      reference: the name of what it should be like.
      all_leaves: whether none may be `float0`.

    Raises:
      ValueError: naming the first key path that only one of both has.
    """
    ours = [leaf.path for leaf in flat.leaves]
    missing = sorted(set(paths) - set(ours), key=paths.index)
    surplus = [path for path in ours if path not in set(paths)]
    same = flat.treedef == treedef and not surplus
    if same and not (missing and all_leaves):
        return
    if missing:
        found = f"{what} has no leaf {missing[0]}, which {reference} has"
    elif surplus:
        found = f"{what} has a leaf {surplus[0]}, which {reference} does not have"
    else:
        found = f"the containers differ: {flat.treedef} against {treedef}"
    raise ValueError(
        f"{what} must have the structure of {reference}, but {found}. Build it "
        f"with jax.tree.map over {reference}."
    )


def broadcast_cuts(cuts: CutTree, tree: PyTree, flat: Flat) -> list[CutOption]:
    """Spreads a pytree prefix of cut options over the leaves of a tree.

    Raises:
      ValueError: if `cuts` is no prefix of the tree.
    """
    return broadcast_prefix(
        cuts,
        tree,
        "cuts",
        "Give one cut (None, 'flat', 'whole', a dimension or a callable) for the whole "
        "tree, or a tree of cuts with one for each leaf or subtree.",
    )


def broadcast_prefix(prefix: PyTree, tree: PyTree, name: str, fix: str) -> list[Any]:
    """Spreads a pytree prefix over the leaves of a tree; None is a value in it.

    Args:
      prefix: the prefix.
      tree: the tree.
      name: what the prefix is called in messages.
      fix: what to do about one that does not fit.

    Raises:
      ValueError: if it is no prefix of the tree.
    """
    values: list[Any] = []

    def spread(value: Any, subtree: PyTree) -> None:
        values.extend(
            value for leaf in jax.tree.leaves(subtree) if not _is_passed_over(leaf)
        )

    try:
        jax.tree.map(spread, prefix, tree, is_leaf=_is_none)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{name} must be a pytree prefix of the tree, but "
            f"{_difference(prefix, tree, name) or error}. {fix}"
        ) from error
    return values


def _is_none(value: Any) -> bool:
    return value is None


def _difference(prefix: PyTree, tree: PyTree, name: str) -> str | None:
    """Returns where a prefix stops being one of the tree, if paths alone tell."""
    prefix_paths = _paths(prefix)
    leaf_paths = _paths(tree)
    for path in prefix_paths:
        if not any(leaf[: len(path)] == path for leaf in leaf_paths):
            return (
                f"{name} has an entry {path_name(path)}, which the tree does not have"
            )
    for leaf in leaf_paths:
        if not any(leaf[: len(path)] == path for path in prefix_paths):
            return f"{name} has no entry for the leaf {path_name(leaf)}"
    return None


def _paths(tree: PyTree) -> list[Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
    return [path for path, _ in flat]


def _is_passed_over(value: Any) -> bool:
    return hasattr(value, "dtype") and _is_float0(value)


def check_width(dtype: str | None, what: str) -> None:
    """Refuses a 64-bit dtype that JAX would silently narrow.

    Args:
      dtype: dtype name, or None.
      what: what has this dtype, for the message.

    Raises:
      TypeError: if JAX is in 32-bit mode.
    """
    if dtype in ("float64", "complex128") and not jax.config.read("jax_enable_x64"):
        raise TypeError(
            f"{what} is {dtype}, which JAX would narrow: it is in 32-bit mode and "
            f"expects at most float32 or complex64. Call "
            f"jax.config.update('jax_enable_x64', True) first, or ask for a 32-bit "
            f"dtype."
        )
