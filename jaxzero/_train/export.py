"""A train state in true shapes, as checkpoints hold it, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._cut import Shape
from jaxzero._loss_scale import LossScaleState
from jaxzero._train.layout import Layout, LeafLayout
from jaxzero._train.optimizer_layout import match_leaves
from jaxzero._train.state import TrainState
from jaxzero._tree import PyTree, path_name

Exported = dict[str, PyTree]


def template(state: TrainState, mesh: Mesh) -> Exported:
    """Returns shapes, dtypes and shardings of the exported state.

    Args:
      state: the state, or its shapes.
      mesh: its mesh.
    """
    layout = state.layout

    def abstract(owner: LeafLayout | None, value: Any) -> jax.ShapeDtypeStruct:
        shape = value.shape if owner is None else owner.shape
        spec = P() if owner is None else _even_spec(layout, shape)
        return jax.ShapeDtypeStruct(
            shape, value.dtype, sharding=NamedSharding(mesh, spec)
        )

    return _map_leaves(state, abstract)


def to_true(state: TrainState, mesh: Mesh) -> Exported:
    """Returns the state in true shapes; see `Zero3.export_state`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, template(state, mesh))

    def convert(owner: LeafLayout | None, value: Any) -> Any:
        return value if owner is None else owner.to_true(value)

    # Under jit nothing is aliased: the copy outlives the next step's donation.
    exported = jax.jit(
        lambda state: _map_leaves(state, convert), out_shardings=_auto(shardings)
    )(jax.device_put(state, _auto(jax.tree.map(lambda leaf: leaf.sharding, state))))
    moved: Exported = jax.device_put(exported, shardings)
    return moved


def _auto(shardings: PyTree) -> PyTree:
    """Returns the shardings on meshes whose axes are left to the compiler.

    Along an axis of explicit type, JAX cannot slice to sizes that do not divide.
    """
    return jax.tree.map(
        lambda sharding: NamedSharding(
            Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec
        ),
        shardings,
    )


def from_true(
    exported: Exported,
    layout: Layout,
    opt_shapes: PyTree,
    opt_specs: PyTree,
    mesh: Mesh,
) -> tuple[PyTree, PyTree]:
    """Returns global arrays of parameters and optimizer state from true shapes.

    Args:
      exported: what `to_true` returned, on any mesh.
      layout: the layout that is wanted.
      opt_shapes: the optimizer's state on one rank of this layout.
      opt_specs: specs of its leaves.
      mesh: the mesh that is wanted.

    Raises:
      ValueError: naming the first leaf that does not fit.
    """
    params = _leaves_like(exported, "params", layout.treedef)
    moments = _leaves_like(exported, "opt_state", jax.tree.structure(opt_shapes))
    owners = match_leaves(opt_shapes, layout.leaves, lambda leaf: leaf.shard_shape)
    specs = jax.tree.leaves(opt_specs, is_leaf=lambda leaf: isinstance(leaf, P))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(opt_shapes)]
    shapes = [
        value.shape if owner is None else owner.shape
        for owner, value in zip(owners, jax.tree.leaves(opt_shapes), strict=True)
    ]
    for leaf, value in zip(layout.leaves, params, strict=True):
        _check_shape(f"params{leaf.path}", value, leaf.shape)
    for path, value, shape in zip(paths, moments, shapes, strict=True):
        _check_shape(f"opt_state{path_name(path)}", value, shape)
    placed_params = [
        _placed(leaf, value, leaf.spec(layout.names), mesh)
        for leaf, value in zip(layout.leaves, params, strict=True)
    ]
    placed_moments = [
        _placed(owner, value, spec, mesh)
        for owner, value, spec in zip(owners, moments, specs, strict=True)
    ]
    return (
        layout.unflatten(placed_params),
        jax.tree.unflatten(jax.tree.structure(opt_shapes), placed_moments),
    )


def saved_loss_scale(saved: Any, first: LossScaleState | None) -> LossScaleState | None:
    """Returns the saved loss scale, or the first one if none was saved or is used."""
    if saved is None or first is None:
        return first
    # Checkpoint libraries may give a named tuple back as a dict or a list.
    parts = (
        [saved[name] for name in LossScaleState._fields]
        if isinstance(saved, dict)
        else list(saved)
    )
    scale, good_steps = parts
    return LossScaleState(
        jnp.asarray(scale, jnp.float32), jnp.asarray(good_steps, jnp.int32)
    )


def _map_leaves(state: TrainState, convert: Any) -> Exported:
    layout = state.layout
    owners = match_leaves(
        state.opt_state, layout.leaves, lambda leaf: leaf.global_shape
    )
    params = [
        convert(leaf, value)
        for leaf, value in zip(
            layout.leaves, jax.tree.leaves(state.params), strict=True
        )
    ]
    moments, structure = jax.tree.flatten(state.opt_state)
    exported: Exported = {
        "step": convert(None, state.step),
        "params": layout.unflatten(params),
        "opt_state": jax.tree.unflatten(
            structure,
            [convert(owner, m) for owner, m in zip(owners, moments, strict=True)],
        ),
    }
    if state.loss_scale is not None:
        exported["loss_scale"] = jax.tree.map(
            lambda value: convert(None, value), state.loss_scale
        )
    return exported


def _even_spec(layout: Layout, shape: Shape) -> P:
    """Returns a spec over the shard axes along the first dimension that divides."""
    names = layout.names if len(layout.names) > 1 else layout.names[0]
    for dim, size in enumerate(shape):
        if size and size % layout.group_size == 0:
            return P(*(None,) * dim, names)
    return P()


def _leaves_like(exported: Exported, part: str, treedef: Any) -> list[Any]:
    if part not in exported:
        raise ValueError(
            f"import_state: {part!r} is missing; found {sorted(exported)}. Give what "
            f"export_state returned."
        )
    leaves, found = jax.tree.flatten(exported[part])
    # Checkpoint libraries may give tuples back as lists: leaves in order suffice.
    if len(leaves) != treedef.num_leaves:
        raise ValueError(
            f"import_state: {part} has {len(leaves)} leaves; expected "
            f"{treedef.num_leaves}. Give the state of the same model and optimizer. "
            f"Found {found}, expected {treedef}."
        )
    return leaves


def _check_shape(path: str, value: Any, expected: Shape) -> None:
    if tuple(value.shape) != tuple(expected):
        raise ValueError(
            f"import_state: {path} has shape {tuple(value.shape)}; expected "
            f"{tuple(expected)}. Give the state of the same model and optimizer in "
            f"true shapes, as export_state returns it."
        )


def _placed(owner: LeafLayout | None, value: Any, spec: P, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    if owner is None:
        kept: jax.Array = jax.device_put(value, sharding)
        return kept
    if isinstance(value, jax.Array) and value.sharding.device_set == set(
        mesh.devices.flat
    ):
        auto = jax.device_put(value, _auto(value.sharding))
        padded = jax.jit(owner.to_global, out_shardings=_auto(sharding))(auto)
        placed: jax.Array = jax.device_put(padded, sharding)
        return placed
    host = owner.to_global(np.asarray(value), np)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
