"""A train state in true shapes, as checkpoints hold it, and back."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._cut import Shape
from jaxzero._layout import Layout, LeafLayout
from jaxzero._train.optimizer_layout import match_leaves
from jaxzero._train.state import TrainState
from jaxzero._tree import PyTree

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
        spec = P() if owner is None else even_spec(layout, shape)
        return jax.ShapeDtypeStruct(
            shape, value.dtype, sharding=NamedSharding(mesh, spec)
        )

    return _map_leaves(state, abstract)


def to_true(state: TrainState, mesh: Mesh) -> Exported:
    """Returns the state in true shapes; see `Zero3.export_state`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, template(state, mesh))
    exported = _to_true(
        jax.device_put(
            state, auto_shardings(jax.tree.map(lambda leaf: leaf.sharding, state))
        ),
        mesh,
    )
    moved: Exported = jax.device_put(exported, shardings)
    return moved


# One function for all calls: jit finds by the layout what it has compiled. Nothing is
# aliased, so the copy outlives the next step's donation.
@functools.partial(jax.jit, static_argnums=1)
def _to_true(state: TrainState, mesh: Mesh) -> Exported:
    def convert(owner: LeafLayout | None, value: Any) -> Any:
        return value if owner is None else owner.to_true(value)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, template(state, mesh))
    exported: Exported = jax.lax.with_sharding_constraint(
        _map_leaves(state, convert), auto_shardings(shardings)
    )
    return exported


def auto_shardings(shardings: PyTree) -> PyTree:
    """Returns the shardings on meshes whose axes are left to the compiler.

    Along an axis of explicit type, JAX cannot slice to sizes that do not divide.
    """
    return jax.tree.map(
        lambda sharding: NamedSharding(
            Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec
        ),
        shardings,
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


def even_spec(layout: Layout, shape: Shape) -> P:
    """Returns a spec over the shard axes along the first dimension that divides."""
    names = layout.names if len(layout.names) > 1 else layout.names[0]
    for dim, size in enumerate(shape):
        if size and size % layout.group_size == 0:
            return P(*(None,) * dim, names)
    return P()
