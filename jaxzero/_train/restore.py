"""A train state from true shapes, as checkpoints hold it, on any mesh."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from jaxzero._cut import Shape
from jaxzero._loss_scale import LossScaleState
from jaxzero._train.export import Exported, auto_shardings, even_spec
from jaxzero._train.layout import Layout, LeafLayout
from jaxzero._train.optimizer_layout import match_leaves
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
    opt_shapes: PyTree,
    opt_specs: PyTree,
    loss_scale: LossScaleState | None,
    mesh: Mesh,
) -> Exported:
    """Returns the parts of a state as global arrays, of memory of their own.

    Args:
      exported: what `to_true` returned, on any mesh; a part without a loss scale has
        none.
      layout: the layout that is wanted.
      opt_shapes: the optimizer's state on one rank of this layout.
      opt_specs: specs of its leaves.
      loss_scale: the first loss scale, or None.
      mesh: the mesh that is wanted.

    Raises:
      ValueError: naming the first leaf that does not fit.
    """
    wanted: Exported = {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "params": layout.unflatten(
            [jax.ShapeDtypeStruct(leaf.shape, leaf.stored) for leaf in layout.leaves]
        ),
        "opt_state": opt_shapes,
    }
    specs: Exported = {"step": P(), "params": layout.specs, "opt_state": opt_specs}
    moments = match_leaves(opt_shapes, layout.leaves, lambda leaf: leaf.shard_shape)
    owners: dict[str, Sequence[LeafLayout | None]] = {
        "step": [None],
        "params": layout.leaves,
        "opt_state": moments,
    }
    if loss_scale is not None and exported.get("loss_scale") is not None:
        wanted["loss_scale"] = jax.eval_shape(lambda: loss_scale)
        specs["loss_scale"] = jax.tree.map(lambda _: P(), loss_scale)
        owners["loss_scale"] = [None] * len(loss_scale)
    shapes, structure = jax.tree.flatten(wanted)
    flat_owners = [owner for part in sorted(owners) for owner in owners[part]]
    places = [
        _Place(
            shape=leaf.shape if owner is None else owner.shape,
            dtype=leaf.dtype,
            owner=owner,
            saved=P() if owner is None else even_spec(layout, owner.shape),
            spec=spec,
        )
        for leaf, owner, spec in zip(
            shapes,
            flat_owners,
            jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P)),
            strict=True,
        )
    ]
    found = {part: exported[part] for part in wanted if part in exported}
    values = _leaves_like(found, jax.tree.unflatten(structure, places))
    placed: Exported = jax.tree.unflatten(structure, _placed(places, values, mesh))
    return placed


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a leaf in true shape belongs.

    Attributes:
      shape: its true shape.
      dtype: the dtype that is wanted.
      owner: the parameter whose layout it takes; None if it stays as it is.
      saved: spec of the exported array.
      spec: spec of the global array.
    """

    shape: Shape
    dtype: Any
    owner: LeafLayout | None
    saved: P
    spec: P

    def convert(self, value: Any, xp: Any = jnp) -> Any:
        """Returns the value in the shape and dtype that are wanted."""
        if self.owner is not None:
            return self.owner.to_global(value, xp, self.dtype)
        return value if value.dtype == self.dtype else value.astype(self.dtype)


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
                f"{place.shape}. {_FIX}."
            )
        _, value = found.pop(_names(keys))
        if np.shape(value) != tuple(place.shape):
            raise ValueError(
                f"import_state: leaf {_path(keys)} has shape {np.shape(value)}; "
                f"expected {place.shape}. {_FIX}, in true shapes."
            )
        found_dtype = jnp.result_type(value)
        if not _holds(place.dtype, found_dtype):
            raise ValueError(
                f"import_state: leaf {_path(keys)} has dtype {found_dtype}; expected "
                f"{place.dtype}, which would drop what is no number of its kind. "
                f"{_FIX}."
            )
        values.append(value)
    for keys, _ in found.values():
        raise ValueError(
            f"import_state: there is a leaf {_path(keys)}; expected none of that name. "
            f"{_FIX}."
        )
    return values


def _holds(wanted: Any, found: Any) -> bool:
    """Says whether a dtype has the imaginary parts and fractions of another."""
    if jnp.issubdtype(found, jnp.complexfloating):
        return jnp.issubdtype(wanted, jnp.complexfloating)
    return jnp.issubdtype(wanted, jnp.inexact) or not jnp.issubdtype(found, jnp.inexact)


def _names(keys: Any) -> tuple[str, ...]:
    return tuple(keystr((key,), simple=True) for key in keys)


def _path(keys: Any) -> str:
    return f"{keys[0].key}{keystr(keys[1:])}"


def _placed(
    places: Sequence[_Place], values: Sequence[Any], mesh: Mesh
) -> list[jax.Array]:
    """Returns leaves in true shape as global arrays."""
    shardings = [NamedSharding(mesh, place.spec) for place in places]
    placed: dict[int, jax.Array] = {}
    arrays: dict[int, jax.Array] = {}
    for i, (place, value) in enumerate(zip(places, values, strict=True)):
        if isinstance(value, jax.Array):
            even = auto_shardings(NamedSharding(mesh, place.saved))
            arrays[i] = jax.device_put(value, even)
        else:
            host = place.convert(np.asarray(value), np)
            read: Callable[[Any], np.ndarray] = host.__getitem__
            placed[i] = jax.make_array_from_callback(host.shape, shardings[i], read)
    # One program for all, whose results are no aliases: the next step may donate them.
    converted = jax.jit(
        lambda arrays: {i: places[i].convert(value) for i, value in arrays.items()},
        out_shardings={i: auto_shardings(shardings[i]) for i in arrays},
    )(arrays)
    placed |= jax.device_put(converted, {i: shardings[i] for i in arrays})
    return [placed[i] for i in range(len(places))]
