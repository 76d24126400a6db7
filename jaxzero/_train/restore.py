"""A train state from true shapes, as checkpoints hold it, on any mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import keystr

from jaxzero._loss_scale import LossScaleState
from jaxzero._train.export import Exported
from jaxzero._train.layout import Layout, LeafLayout
from jaxzero._train.optimizer_layout import match_leaves
from jaxzero._train.place import Place, param_places, place_leaves
from jaxzero._tree import PyTree


def saved_params(exported: Any) -> PyTree:
    """Returns the part of an exported state that holds the parameters.

    Raises:
      ValueError: if there is none.
    """
    if not isinstance(exported, dict) or "params" not in exported:
        found = list(exported) if isinstance(exported, dict) else type(exported)
        raise ValueError(
            f"import_state: found {found}; expected a dict with the part 'params'. "
            f"{_FIX}."
        )
    return exported["params"]


def from_true(
    exported: Exported,
    layout: Layout,
    opt_shapes: PyTree | None,
    loss_scale: LossScaleState | None,
    mesh: Mesh,
) -> Exported:
    """Returns the parts of a state as global arrays, of memory of their own.

    Args:
      exported: what `to_true` returned, on any mesh; a part without a loss scale has
        none.
      layout: the layout that is wanted.
      opt_shapes: the optimizer's state on one rank of this layout; None to leave that
        part out.
      loss_scale: the first loss scale, or None.
      mesh: the mesh that is wanted.

    Raises:
      ValueError: naming the first leaf that does not fit.
    """
    wanted: Exported = {
        "step": _places(jax.ShapeDtypeStruct((), jnp.int32), [None]),
        "params": layout.unflatten(param_places(layout)),
    }
    if opt_shapes is not None:
        owners = match_leaves(opt_shapes, layout.leaves, lambda leaf: leaf.shard_shape)
        wanted["opt_state"] = _places(opt_shapes, owners)
    if loss_scale is not None and exported.get("loss_scale") is not None:
        scale = jax.eval_shape(lambda: loss_scale)
        wanted["loss_scale"] = _places(scale, [None] * len(scale))
    found = {part: exported[part] for part in wanted if part in exported}
    values = _leaves_like(found, wanted)
    places, structure = jax.tree.flatten(wanted)
    placed: Exported = jax.tree.unflatten(
        structure, place_leaves(layout, places, values, mesh)
    )
    return placed


def _places(shapes: PyTree, owners: Sequence[LeafLayout | None]) -> PyTree:
    """Returns the places of leaves, of which some lie as a parameter does."""
    leaves, structure = jax.tree.flatten(shapes)
    return jax.tree.unflatten(
        structure,
        [
            Place(
                shape=leaf.shape if owner is None else owner.shape,
                dtype=leaf.dtype,
                owner=owner,
            )
            for leaf, owner in zip(leaves, owners, strict=True)
        ],
    )


_FIX = "Give the state of the same model and optimizer, as export_state returns it"


def _leaves_like(tree: PyTree, places: PyTree) -> list[Any]:
    """Returns the leaves of a tree in the order of the places that they go to."""
    # By name, because checkpoint libraries give named tuples and modules back as
    # dicts, whose order is that of their keys.
    found = {
        _names(keys): (keys, value)
        for keys, value in jax.tree_util.tree_leaves_with_path(tree)
    }
    values = []
    for keys, place in jax.tree_util.tree_leaves_with_path(places):
        if _names(keys) not in found:
            raise ValueError(
                f"import_state: there is no leaf {_path(keys)}; expected one of shape "
                f"{place.shape}. {_fix(keys)}."
            )
        _, value = found.pop(_names(keys))
        if np.shape(value) != tuple(place.shape):
            raise ValueError(
                f"import_state: leaf {_path(keys)} has shape {np.shape(value)}; "
                f"expected {place.shape}. {_fix(keys, ', in true shapes')}."
            )
        found_dtype = jnp.result_type(value)
        if not _holds(place.dtype, found_dtype):
            raise ValueError(
                f"import_state: leaf {_path(keys)} has dtype {found_dtype}; expected "
                f"{place.dtype}, which would drop what is no number of its kind. "
                f"{_fix(keys)}."
            )
        values.append(value)
    for keys, _ in found.values():
        raise ValueError(
            f"import_state: there is a leaf {_path(keys)}; expected none of that name. "
            f"{_fix(keys)}."
        )
    return values


def _fix(keys: Any, shapes: str = "") -> str:
    """Returns what to do about a leaf that does not fit."""
    if keys[0].key != "opt_state":
        return f"{_FIX}{shapes}"
    return f"{_FIX}{shapes}; or reset_optimizer=True to take the rest without it"


def _holds(wanted: Any, found: Any) -> bool:
    """Says whether a dtype has the imaginary parts and fractions of another."""
    if jnp.issubdtype(found, jnp.complexfloating):
        return jnp.issubdtype(wanted, jnp.complexfloating)
    return jnp.issubdtype(wanted, jnp.inexact) or not jnp.issubdtype(found, jnp.inexact)


def _names(keys: Any) -> tuple[str, ...]:
    return tuple(keystr((key,), simple=True) for key in keys)


def _path(keys: Any) -> str:
    return f"{keys[0].key}{keystr(keys[1:])}"
