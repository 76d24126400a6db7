"""Norm and finiteness of a whole tree from the shards of every rank."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, AxisName, bind_axis
from jaxzero._cut import Cut, CutOption, CutTree, cut_leaf
from jaxzero._dtypes import kind
from jaxzero._layout import Layout, LeafLayout
from jaxzero._make_layout import bind_layout, check_alone
from jaxzero._norms.scaled_sum import norm_function, stack
from jaxzero._tree import (
    Leaf,
    PyTree,
    broadcast_cuts,
    check_width,
    flatten,
    match,
)


def global_norm(
    tree: PyTree,
    axis_name: AxisName | Layout,
    *,
    like: PyTree | None = None,
    cuts: CutTree = None,
) -> jax.Array:
    """Returns the L2 norm of a whole tree, of which every rank holds shards.

    Runs inside `jax.shard_map` over the axis, under `jit`. Squares are formed in
    float32 (float64 for 64-bit leaves) of numbers scaled to at most 1, so that they
    neither overflow nor vanish. A complex element counts as its absolute value.

    A leaf that is kept whole counts once. With `like` it is known by its cut, or by
    its true shape on a value typed as equal along the axis. Without `like` it is
    known by its type, or by "whole" in `cuts`; under `check_vma=False`, where types
    say nothing, only by the latter. Padding is left out with `like`; without it, it
    is taken to be zero, as jaxzero writes it.

    `jax.grad` gives each rank its shard of the gradient, which is zero for a norm of
    zero. Under `check_vma=False`, JAX differentiates the sum of the results of all
    ranks where `jax.grad` is called inside the `shard_map`: there, shards get the
    gradient times the number of ranks, as of any `lax.psum`, and each copy of a whole
    leaf its part of that. Outside it, or under `check_vma=True`, the gradient is that
    of the tree.

    Args:
      tree: pytree of this rank's shards, of any real or complex floating dtype.
      axis_name: mesh axis, or tuple of axes in rank order, that shards are spread
        over; or the `Layout` of the tree, which says all of `like` and `cuts`. The
        norm varies over further mesh axes if leaves do.
      like: pytree of the same structure with the true shapes, such as
        `jax.eval_shape(init, key)`. Callables in `cuts` need it.
      cuts: as given to `shard_grads`.

    Returns:
      float32 scalar, equal (and typed so) on every rank. Zero for an empty tree.

    Raises:
      ValueError: for an axis that is not bound, a cut that does not fit, a shard that
        does not have the shape which `like` gives it, or a missing `like`.
      TypeError: for leaves of integers or booleans.

    Example:
      >>> import jax, jax.numpy as jnp, jaxzero
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> norm = jax.shard_map(
      ...     lambda g: jaxzero.global_norm(g, "data"),
      ...     mesh=mesh, in_specs=P("data"), out_specs=P(),
      ... )
      >>> tree = {"w": jnp.array([3.0, 4.0])}
      >>> print(jax.jit(norm)(jaxzero.shard_params(tree, mesh, "data")))
      5.0
    """
    norm = tree_norm(tree, axis_name, like, cuts, "global_norm")
    return norm.astype(jnp.float32)


def all_finite(tree: PyTree, axis_name: AxisName) -> jax.Array:
    """Says whether no rank holds an infinity or NaN in any leaf.

    Runs inside `jax.shard_map` over the axis, under `jit`, and takes one collective
    of one number for the whole tree. Padding counts: it is zero, as jaxzero writes it.

    Args:
      tree: pytree of arrays; integers and booleans are always finite.
      axis_name: mesh axis or tuple of axes. The result varies over further mesh axes
        if leaves do.

    Returns:
      bool scalar, equal (and typed so) on every rank. True for an empty tree.

    Raises:
      ValueError: for an axis that is not bound.
      TypeError: for a leaf that is no array of numbers.

    Example:
      >>> import jax, jax.numpy as jnp, jaxzero
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> finite = jax.shard_map(
      ...     lambda g: jaxzero.all_finite(g, "data"),
      ...     mesh=mesh, in_specs=P("data"), out_specs=P(),
      ... )
      >>> tree = {"w": jnp.array([3.0, jnp.inf])}
      >>> print(jax.jit(finite)(jaxzero.shard_params(tree, mesh, "data")))
      False
    """
    axis = bind_axis(axis_name, None, "all_finite")
    bad = [
        jnp.any(~jnp.isfinite(leaf.value))
        for leaf in flatten(tree, "tree").leaves
        if 0 not in leaf.shape and kind(leaf.dtype) != "integer or boolean"
    ]
    if not bad:
        return jnp.ones((), jnp.bool_)
    mine = jnp.any(stack(axis, bad))
    ranks: jax.Array = lax.psum(mine.astype(jnp.int32), axis.names)
    return ranks == 0


def tree_norm(
    tree: PyTree,
    axis_name: AxisName | Layout,
    like: PyTree | None,
    cuts: CutTree,
    call: str,
) -> jax.Array:
    """Returns the norm in float32, or float64 if there are 64-bit leaves."""
    if isinstance(axis_name, Layout):
        check_alone(call, like=like)
        like = axis_name.like
    if not isinstance(axis_name, Layout) and like is None:
        axis = bind_axis(axis_name, None, call)
        flat = flatten(tree, "tree")
        options = broadcast_cuts(cuts, tree, flat)
        counted = [
            _counted_by_type(axis, leaf, option, call)
            for leaf, option in zip(flat.leaves, options, strict=True)
        ]
    else:
        axis, layout = bind_layout(
            axis_name,
            like,
            call,
            what="like",
            cuts=cuts,
        )
        # Copies along replicate axes have one norm, as others that vary further.
        axis = dataclasses.replace(axis, replicate=(), replicas=1)
        flat = match(tree, flatten(like, "like", shapes_suffice=True), "tree", "like")
        counted = [
            _counted(axis, leaf, own, call)
            for leaf, own in zip(flat.leaves, layout.of(flat, "tree"), strict=True)
        ]
    values, once = [], []
    for value, names in counted:
        if value.size:  # see jaxzero._empty
            values.append(_components(value))
            once.append(names)
    if not values:
        return jnp.zeros((), jnp.float32)
    in_64_bits = any(value.dtype == jnp.float64 for value in values)
    wide = jnp.float64 if in_64_bits else jnp.float32
    return norm_function(axis, once)([value.astype(wide) for value in values])


def _check_dtype(leaf: Leaf, call: str) -> None:
    if kind(leaf.dtype) == "integer or boolean":
        raise TypeError(
            f"{call}: leaf {leaf.path} has dtype {leaf.dtype}; expected a real or "
            f"complex floating dtype. Convert it, or leave it out of the tree."
        )
    check_width(leaf.dtype, f"leaf {leaf.path}")


def _counted_by_type(
    axis: Axis, leaf: Leaf, option: CutOption, call: str
) -> tuple[jax.Array, tuple[str, ...]]:
    """Returns a leaf of unknown true shape, and the axes along which it counts once."""
    _check_dtype(leaf, call)
    value = jnp.asarray(leaf.value)
    _check_decided(leaf, option, call)
    cut = cut_leaf(option, leaf.path, leaf.shape, axis.group_size)
    return value, axis.names if cut.whole else axis.unvarying_axes(value)


def _counted(
    axis: Axis, leaf: Leaf, own: LeafLayout, call: str
) -> tuple[jax.Array, tuple[str, ...]]:
    """Returns a leaf without padding, and the axes along which it counts once."""
    _check_dtype(leaf, call)
    value = jnp.asarray(leaf.value)
    cut = own.cut
    equal = all(name in axis.unvarying_axes(value) for name in axis.names)
    if equal and leaf.shape == own.shape:
        return value, axis.names
    if leaf.shape != cut.shard_shape:
        raise ValueError(
            f"{call}: leaf {leaf.path} has shape {leaf.shape}; expected "
            f"{cut.shard_shape}, the shard of a leaf of shape {own.shape} over "
            f"{cut.ranks} ranks ({cut.layout} layout). Give the true shapes as like "
            f"(jax.eval_shape of the init function), and the cuts that the shards were "
            f"made with; or the layout of both."
        )
    if cut.whole:
        return value, axis.names
    return _without_padding(axis, cut, value), ()


def _check_decided(leaf: Leaf, option: CutOption, call: str) -> None:
    """Refuses a leaf whose cut depends on a true shape that is not known."""
    if callable(option):
        raise ValueError(
            f"{call}: the cut of leaf {leaf.path} is a callable, which needs the true "
            f"shape; found like=None and the shape {leaf.shape} of a shard. Give the "
            f"true shapes: like=jax.eval_shape of the init function."
        )


def _without_padding(axis: Axis, cut: Cut, shard: jax.Array) -> jax.Array:
    """Returns the shard with zeros for whatever its padding holds."""
    if cut.even:
        return shard
    # All padding is in the last positions, fewer than there are ranks. Only those are
    # counted, because a shard may be longer than 32 bits count.
    most = min(cut.surplus, cut.chunk)
    padding = [
        min(max((rank + 1) * cut.chunk - cut.length, 0), cut.chunk)
        for rank in range(cut.ranks)
    ]
    mine = jnp.asarray(padding, jnp.int32)[axis.rank()]
    dim = cut.shard_dim
    tail = tuple(most if d == dim else n for d, n in enumerate(shard.shape))
    kept = lax.broadcasted_iota(jnp.int32, tail, dim) < most - mine
    before = [(cut.chunk - most if d == dim else 0, 0, 0) for d in range(shard.ndim)]
    kept = lax.pad(kept, jnp.bool_(True), before)
    return jnp.where(kept, shard, jnp.zeros_like(shard))


def _components(value: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(value):
        return jnp.stack([value.real, value.imag])
    return value
