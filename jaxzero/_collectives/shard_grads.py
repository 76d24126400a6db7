"""shard_grads: a full gradient per rank in, one shard per rank out."""

from typing import Any, Literal, overload

from jaxzero._axis import Axis, AxisName, bind_axis, check_not_auto_sharded, varying
from jaxzero._collectives.reduce import plan_reduction, reduce_leaves
from jaxzero._cut import CutTree
from jaxzero._dtypes import component_dtype, is_supported, kind
from jaxzero._norms.stats import Stats, of_all_ranks
from jaxzero._plan import LeafSpec
from jaxzero._policy import Policy
from jaxzero._tree import (
    Leaf,
    PyTree,
    broadcast_cuts,
    check_width,
    flatten,
    leaf_spec,
    match,
)


@overload
def shard_grads(
    grads: PyTree,
    axis_name: AxisName,
    *,
    into: PyTree | None = ...,
    policy: Policy = ...,
    cuts: CutTree = ...,
    replicate_axis: AxisName | None = ...,
    with_stats: Literal[False] = ...,
) -> PyTree: ...


@overload
def shard_grads(
    grads: PyTree,
    axis_name: AxisName,
    *,
    into: PyTree | None = ...,
    policy: Policy = ...,
    cuts: CutTree = ...,
    replicate_axis: AxisName | None = ...,
    with_stats: Literal[True],
) -> tuple[PyTree, Stats]: ...


def shard_grads(
    grads: PyTree,
    axis_name: AxisName,
    *,
    into: PyTree | None = None,
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    cuts: CutTree = None,
    replicate_axis: AxisName | None = None,
    with_stats: bool = False,
) -> PyTree | tuple[PyTree, Stats]:
    """Sums gradients over a mesh axis and returns this rank's shard of each.

    Runs inside `jax.shard_map` over the axis, under `jit`. Leaves are packed into
    buckets of one wire dtype, each moved by one reduce-scatter; scaling, casting,
    accumulating and the statistics happen in the one pass that writes the shards.

    A leaf of n elements over N ranks becomes, unless `cuts` says otherwise, rows
    [r * d0/N, (r + 1) * d0/N) where dimension 0 divides by N, else elements
    [r * c, (r + 1) * c) of the flattened leaf, c = ceil(n / N), zero-padded. Leaves of
    fewer than `policy.min_shard_numel` elements stay whole instead.

    Under `check_vma=True` a gradient that does not vary over the axis, such as that
    of a replicated parameter, is already summed: it is only sliced and scaled.

    Args:
      grads: pytree of arrays, a full gradient on every rank: float32, bfloat16,
        float16, float64, complex64 or complex128. Narrower leaves need
        `policy.comm_dtype` and are converted to it. `None`, `float0` and
        `optax.MaskedNode` pass through.
      axis_name: mesh axis, or tuple of axes in rank order, to shard over.
      into: shards of earlier microbatches, of the same structure. The result is
        `into` plus the reduced gradients, in the dtype of `into`. None starts anew.
        Donated accumulators are updated in place.
      policy: how leaves are summed, scaled, sent and stored.
      cuts: pytree prefix of None, `"flat"`, `"whole"` (kept on every rank and
        all-reduced), the number of a dimension (padded where N does not divide it),
        or a callable (path, shape) that returns one of these, such as
        `lambda path, shape: "whole" if "norm" in path else None`.
      replicate_axis: axis or axes along which shards are copies (hybrid sharding).
        Gradients are summed over it too, after the reduce-scatter.
      with_stats: also return the norm and finiteness of the result.

    Returns:
      Pytree of shards, in the dtype of `into`, else `policy.shard_dtype`, else of
      the leaf. With `with_stats`, a pair of it and `Stats`, equal on every rank,
      padding excluded, whole leaves counted once.

    Raises:
      ValueError: for an axis that is not bound, an `into` of another structure or
        shape, or a cut that does not fit.
      TypeError: for dtypes that cannot be summed or stored.
      NotImplementedError: in a partly manual shard_map, and for a transport that
        cannot run here.

    Example:
      >>> import jax, jax.numpy as jnp, jaxzero
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> step = jax.shard_map(
      ...     lambda g: jaxzero.shard_grads(g, "data"),
      ...     mesh=mesh, in_specs=P("data"), out_specs=P("data"),
      ... )
      >>> grads = {"w": jnp.arange(4.0)}
      >>> grads = jax.device_put(grads, jax.NamedSharding(mesh, P("data")))
      >>> print(jax.jit(step)(grads)["w"])
      [0. 1. 2. 3.]
    """
    axis = bind_axis(axis_name, replicate_axis, "shard_grads")
    flat = flatten(grads, "grads")
    sums = None if into is None else match(into, flat, "into", "grads")
    options = broadcast_cuts(cuts, grads, flat)
    specs = [
        _spec(axis, leaf, option, policy, None if sums is None else sums.leaves[i])
        for i, (leaf, option) in enumerate(zip(flat.leaves, options, strict=True))
    ]
    shards, measured = reduce_leaves(
        plan_reduction(specs, axis, policy, accumulates=into is not None),
        [leaf.value for leaf in flat.leaves],
        None if sums is None else [leaf.value for leaf in sums.leaves],
        with_stats,
    )
    tree = flat.rebuild(shards)
    return tree if measured is None else (tree, of_all_ranks(axis, measured))


def _spec(
    axis: Axis, leaf: Leaf, option: Any, policy: Policy, into: Leaf | None
) -> LeafSpec:
    check_not_auto_sharded(f"leaf {leaf.path}", leaf.value, "shard_grads")
    spec = leaf_spec(
        leaf,
        option,
        axis.group_size,
        policy,
        into_dtype=None if into is None else into.dtype,
        reduced=axis.typed and axis.unvarying_axes(leaf.value) == axis.all_names,
        varying=_further_axes(axis, leaf, into),
    )
    check_width(spec.dtype, f"leaf {leaf.path}")
    check_width(spec.shard_dtype, f"the shard of leaf {leaf.path}")
    check_width(policy.comm_dtype, f"the comm_dtype of leaf {leaf.path}")
    if into is not None:
        check_not_auto_sharded(f"into leaf {into.path}", into.value, "shard_grads")
        _check_into(spec, into, policy)
    return spec


def _further_axes(axis: Axis, leaf: Leaf, into: Leaf | None) -> tuple[str, ...]:
    """Returns the axes beyond the shard axes that the shard will vary over."""
    if not axis.typed:
        return ()
    names = varying(leaf.value) - frozenset(axis.all_names)
    if into is not None:
        names |= varying(into.value) - frozenset(axis.names)
    return tuple(sorted(names))


def _check_into(spec: LeafSpec, into: Leaf, policy: Policy) -> None:
    expected = spec.cut.shard_shape
    if into.shape != expected:
        raise ValueError(
            f"into leaf {into.path} has shape {into.shape}; expected {expected}, the "
            f"shard of a gradient of shape {spec.shape} ({spec.cut.layout} layout). "
            f"Start with the result of shard_grads(..., into=None), or use the same "
            f"cuts, axis and Policy(min_shard_numel=...) for both."
        )
    if not is_supported(into.dtype) or kind(into.dtype) != kind(spec.dtype):
        raise TypeError(
            f"into leaf {into.path} has dtype {into.dtype}, which cannot accumulate a "
            f"gradient of dtype {spec.dtype}; expected {kind(spec.dtype)} shards. "
            f"Start with the result of shard_grads(..., into=None), whose dtype "
            f"Policy(shard_dtype=...) sets."
        )
    asked = policy.shard_dtype
    if asked is not None and asked != component_dtype(into.dtype):
        raise TypeError(
            f"into leaf {into.path} has dtype {into.dtype}, but Policy "
            f"shard_dtype={asked!r}; the result takes the dtype of into, so make them "
            f"agree or leave shard_dtype out."
        )
