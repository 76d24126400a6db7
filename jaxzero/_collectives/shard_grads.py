"""shard_grads: a full gradient per rank in, one shard per rank out."""

from typing import Literal, overload

from jaxzero._axis import AxisName
from jaxzero._collectives.leaves import read_leaves
from jaxzero._collectives.reduce import plan_reduction, reduce_leaves
from jaxzero._cut import CutTree
from jaxzero._layout import Layout
from jaxzero._make_layout import bind_layout
from jaxzero._norms.stats import Stats, of_all_ranks
from jaxzero._policy import Policy
from jaxzero._tree import PyTree


@overload
def shard_grads(
    grads: PyTree,
    axis_name: AxisName | Layout,
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
    axis_name: AxisName | Layout,
    *,
    into: PyTree | None = ...,
    policy: Policy = ...,
    cuts: CutTree = ...,
    replicate_axis: AxisName | None = ...,
    with_stats: Literal[True],
) -> tuple[PyTree, Stats]: ...


def shard_grads(
    grads: PyTree,
    axis_name: AxisName | Layout,
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
    [r * c, (r + 1) * c) of the flattened leaf, c = ceil(n / N), zero-padded.

    Under `check_vma=True` a gradient that does not vary over the axis, such as that
    of a replicated parameter, is already summed: it is only sliced and scaled.

    Args:
      grads: pytree of arrays, a full gradient on every rank: float32, bfloat16,
        float16, float64, complex64 or complex128. Narrower leaves need
        `policy.comm_dtype` and are converted to it. `None`, `float0` and
        `optax.MaskedNode` pass through.
      axis_name: mesh axis, or tuple of axes in rank order, to shard over; or a
        `Layout` of the parameters, which then says all about cuts and replicas.
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
    axis, layout = bind_layout(
        axis_name,
        grads,
        "shard_grads",
        what="grads",
        cuts=cuts,
        replicate_axis=replicate_axis,
    )
    leaves = read_leaves(axis, layout, grads, into, policy)
    reduction = plan_reduction(leaves.specs, axis, policy, accumulates=into is not None)
    shards, measured = reduce_leaves(reduction, leaves.values, leaves.into, with_stats)
    tree = leaves.rebuild(shards)
    return tree if measured is None else (tree, of_all_ranks(axis, measured))
