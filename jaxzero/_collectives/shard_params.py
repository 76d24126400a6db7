"""shard_params, unshard_params: true shapes to global arrays of shards, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jaxzero._axis import AxisName, axis_names
from jaxzero._cut import Cut, CutTree, cut_stored_leaf
from jaxzero._layout import Layout, LeafLayout
from jaxzero._make_layout import build_layout, check_alone, check_sizes
from jaxzero._padding import padded, trimmed
from jaxzero._tree import Leaf, PyTree, broadcast_cuts, flatten, match


def shard_params(
    params: PyTree,
    mesh: Mesh,
    axis_name: AxisName | Layout,
    *,
    cuts: CutTree = None,
) -> PyTree:
    """Spreads parameters over a mesh axis, outside `jit`.

    Args:
      params: pytree of arrays in true shape, the same on every process.
      mesh: the mesh.
      axis_name: mesh axis, or tuple of axes in rank order, to shard over; or a
        `Layout` of the parameters. Along the mesh's other axes the shards are copies.
      cuts: as for `shard_grads`.

    Returns:
      Pytree of global arrays in the layout of `shard_grads`, in the dtypes of
      `params` (64-bit ones narrowed as JAX is set to). Seen from inside a `shard_map`
      with the arrays' own specs, each rank holds its shard. A flat leaf of n elements
      has global shape (N * ceil(n / N),). Only "whole" leaves are replicated, and
      scalars of integers or booleans without a cut, such as an optimizer's count of
      steps.

    Raises:
      ValueError: for an axis that the mesh does not have or that is named twice, a cut
        that does not fit, or a call under `jit`.
      TypeError: for a leaf that is no array.

    Example:
      >>> import jax, numpy as np, jaxzero
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> sharded = jaxzero.shard_params({"w": np.ones((2, 3))}, mesh, "data")
      >>> sharded["w"].sharding.shard_shape(sharded["w"].shape)
      (2, 3)
    """
    if isinstance(axis_name, Layout):
        check_alone("shard_params", cuts=cuts)
        check_sizes(axis_name, mesh.shape, "shard_params")
        layout = axis_name
    else:
        names, _ = axis_names(axis_name, None, "shard_params")
        _check_in_mesh(names, mesh)
        layout = build_layout(
            params,
            names,
            (),
            mesh.shape,
            what="params",
            cuts=cuts,
        )
    flat = flatten(params, "params")
    _check_concrete(flat.leaves, "shard_params")
    layout.check(flat, "params")
    return flat.rebuild(
        [
            _place(leaf, own, mesh)
            for leaf, own in zip(flat.leaves, layout.of(flat, "params"), strict=True)
        ]
    )


def _check_in_mesh(names: tuple[str, ...], mesh: Mesh) -> None:
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"shard_params: axis {name!r} is not in the mesh; expected one of its "
                f"axes {', '.join(map(repr, mesh.axis_names))}. Name one of them, or "
                f"make the mesh with that axis."
            )


def unshard_params(
    shards: PyTree,
    like: PyTree | Layout,
    *,
    cuts: CutTree = None,
) -> PyTree:
    """Returns parameters in true shape as NumPy arrays, outside `jit`.

    For checkpoints and export. With several processes all of them must call it, and
    all receive the full arrays.

    Args:
      shards: pytree of global arrays from `shard_params`, or from a train step that
        kept their layout.
      like: the `Layout`, or a pytree of the same structure with the true shapes.
      cuts: as given to `shard_params`.

    Returns:
      Pytree of NumPy arrays in the shapes of `like` and the dtypes of `shards`.

    Raises:
      ValueError: if the structures differ, a global array does not have the shape that
        its true shape and cut give it over the ranks of its sharding, or the call is
        under `jit`.

    Example:
      >>> import jax, numpy as np, jaxzero
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = {"w": np.arange(3.0, dtype=np.float32)}
      >>> sharded = jaxzero.shard_params(params, mesh, "data")
      >>> jaxzero.unshard_params(sharded, params)["w"]
      array([0., 1., 2.], dtype=float32)
    """
    layout = like if isinstance(like, Layout) else None
    if layout is not None:
        check_alone("unshard_params", cuts=cuts)
        like = layout.like
    flat_like = flatten(like, "like", shapes_suffice=True)
    flat = match(shards, flat_like, "shards", "like")
    _check_concrete(flat.leaves, "unshard_params")
    if layout is not None:
        found = [own.cut for own in layout.of(flat, "shards")]
    else:
        found = [
            cut_stored_leaf(
                option,
                true.path,
                true.shape,
                shard.dtype,
                _ranks(shard),
            )
            for shard, true, option in zip(
                flat.leaves,
                flat_like.leaves,
                broadcast_cuts(cuts, like, flat_like),
                strict=True,
            )
        ]
    return flat.rebuild(
        [
            _true_leaf(shard, true, cut)
            for shard, true, cut in zip(
                flat.leaves, flat_like.leaves, found, strict=True
            )
        ]
    )


def _check_concrete(leaves: Sequence[Leaf], call: str) -> None:
    for leaf in leaves:
        if isinstance(leaf.value, jax.core.Tracer):
            raise ValueError(
                f"{call}: leaf {leaf.path} is traced; expected an array with values. "
                f"Call it outside jit, grad, vmap and shard_map."
            )


def _place(leaf: Leaf, own: LeafLayout, mesh: Mesh) -> jax.Array:
    value = np.asarray(leaf.value)
    value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    shards = padded(own.cut, value, xp=np)
    sharding = NamedSharding(mesh, own.spec)
    read: Callable[[Any], np.ndarray] = lambda index: shards[index]  # noqa: E731
    return jax.make_array_from_callback(shards.shape, sharding, read)


def _true_leaf(shard: Leaf, true: Leaf, cut: Cut) -> np.ndarray:
    if 0 in true.shape and 0 in shard.shape:
        # XLA replicates an empty result, so its sharding does not tell the ranks.
        return np.zeros(true.shape, shard.value.dtype)
    if shard.shape != cut.global_shape:
        raise ValueError(
            f"shards leaf {shard.path} has global shape {shard.shape}; expected "
            f"{cut.global_shape}, a parameter of shape {true.shape} over N={cut.ranks} "
            f"ranks, as the array is sharded ({cut.layout} layout). Give the arrays "
            f"of shard_params (not copies on the host), the true shapes as like "
            f"and the same cuts; or the layout of both."
        )
    value: np.ndarray = trimmed(cut, _on_host(shard.value))
    return value.reshape(true.shape)


def _ranks(shard: Leaf) -> int:
    """Returns the number of ranks that the array is spread over."""
    sharding = getattr(shard.value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return 1
    ranks = 1
    for entry in sharding.spec:
        for name in (entry,) if isinstance(entry, str) else entry or ():
            ranks *= sharding.mesh.shape[name]
    return ranks


def _on_host(value: Any) -> np.ndarray:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)
