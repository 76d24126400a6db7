"""gather_params: shards in, full parameters out; its transpose is shard_grads."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, AxisName, bind_axis, check_not_auto_sharded, varying
from jaxzero._collectives.reduce import own_or_empty, plan_reduction, reduce_leaves
from jaxzero._cut import Cut, CutTree, cut_leaf
from jaxzero._dtypes import is_supported, kind, like_kind
from jaxzero._plan import LIMITS, LeafSpec, build_plan
from jaxzero._policy import Policy
from jaxzero._transports import TRANSPORTS, choose
from jaxzero._tree import (
    Leaf,
    PyTree,
    broadcast_cuts,
    check_width,
    flatten,
    match,
)

Arrays = Sequence[jax.Array]


def gather_params(
    shards: PyTree,
    like: PyTree,
    axis_name: AxisName,
    *,
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    cuts: CutTree = None,
    replicate_axis: AxisName | None = None,
) -> PyTree:
    """Gathers full parameters from the shards that the ranks of a mesh axis own.

    The exact inverse of the layout of `shard_grads` and `shard_params`. Its VJP is
    `shard_grads(op="sum")` with the same policy: differentiating a loss through it
    gives gradients that are already summed and sharded, in the dtype of the shards.

    Args:
      shards: pytree of this rank's shards.
      like: pytree of the same structure with the true shapes and dtypes, such as
        `jax.eval_shape(init, key)`. Never inferred from the shards, because padding
        cannot be told from data.
      axis_name: mesh axis, or tuple of axes in rank order.
      policy: `compute_dtype` is the dtype of the result (None: that of `like`) and
        of the wire; `min_shard_numel` must be that of `shard_params`; `comm_dtype`
        and `reduction` are for the backward pass.
      cuts: as given to `shard_grads` or `shard_params`.
      replicate_axis: axis or axes along which shards are copies; the backward pass
        sums over it too.

    Returns:
      Pytree of full parameters, the same on every rank, of integers and booleans in
      the dtype of `like`.

    Raises:
      ValueError: if the axis is not bound, or a shard does not have the shape that
        `like`, `cuts` and the axis give it.
      TypeError: for a complex leaf asked for in a dtype without a complex form, or
        shards of another kind of dtype than `like`.
      NotImplementedError: in a partly manual shard_map.

    Example:
      >>> import jax, jax.numpy as jnp, jaxzero
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> like = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
      >>> full = jax.shard_map(
      ...     lambda s: jaxzero.gather_params(s, like, "data"),
      ...     mesh=mesh, in_specs=P("data"), out_specs=P("data"),
      ... )
      >>> shards = jaxzero.shard_params({"w": jnp.ones((2, 3))}, mesh, "data")
      >>> jax.jit(full)(shards)["w"].shape
      (2, 3)
    """
    axis = bind_axis(axis_name, replicate_axis, "gather_params")
    flat_like = flatten(like, "like", shapes_suffice=True)
    flat = match(shards, flat_like, "shards", "like")
    options = broadcast_cuts(cuts, like, flat_like)
    summable: list[int] = []
    specs: list[LeafSpec] = []
    full: list[Any] = []
    for i, (shard, true, option) in enumerate(
        zip(flat.leaves, flat_like.leaves, options, strict=True)
    ):
        cut = cut_leaf(
            option, true.path, true.shape, axis.group_size, policy.min_shard_numel
        )
        _check_shape(shard, true, cut)
        _check_dtypes(shard, true)
        check_not_auto_sharded(f"leaf {shard.path}", shard.value, "gather_params")
        if is_supported(true.dtype) and is_supported(shard.dtype):
            summable.append(i)
            specs.append(_spec(axis, shard, true, cut, policy))
            full.append(None)
        else:
            full.append(_gather_plain(axis, shard.value, true, cut))
    values = [
        own_or_empty(axis, spec, flat.leaves[i].value, spec.cut.shard_shape)
        for i, spec in zip(summable, specs, strict=True)
    ]
    for i, leaf in zip(
        summable, _differentiable(axis, specs, values, policy)(values), strict=True
    ):
        full[i] = leaf
    return flat.rebuild(full)


def _check_shape(shard: Leaf, true: Leaf, cut: Cut) -> None:
    if shard.shape != cut.shard_shape:
        raise ValueError(
            f"shards leaf {shard.path} has shape {shard.shape}; expected "
            f"{cut.shard_shape}, the shard of a parameter of shape {true.shape} over "
            f"{cut.ranks} ranks ({cut.layout} layout). Give the true shapes as like "
            f"(jax.eval_shape of the init function), and the cuts and "
            f"Policy(min_shard_numel=...) of shard_params."
        )


def _check_dtypes(shard: Leaf, true: Leaf) -> None:
    if kind(shard.dtype) != kind(true.dtype):
        raise TypeError(
            f"shards leaf {shard.path} has dtype {shard.dtype}, but like says "
            f"{true.dtype}; expected {kind(true.dtype)} shards. Give the true dtypes "
            f"as like (jax.eval_shape of the init function)."
        )
    check_width(true.dtype, f"like leaf {true.path}")


def _spec(axis: Axis, shard: Leaf, true: Leaf, cut: Cut, policy: Policy) -> LeafSpec:
    dtype = true.dtype
    if policy.compute_dtype is not None:
        dtype = like_kind(dtype, policy.compute_dtype, true.path, "compute_dtype")
        check_width(dtype, f"the compute_dtype of leaf {true.path}")
    further: tuple[str, ...] = ()
    if axis.typed:
        further = tuple(sorted(varying(shard.value) - frozenset(axis.all_names)))
    return LeafSpec(
        path=true.path,
        shape=true.shape,
        dtype=dtype,
        shard_dtype=shard.dtype,
        cut=cut,
        reduced=cut.layout == "whole",
        varying=further,
    )


def _differentiable(
    axis: Axis, specs: Sequence[LeafSpec], shards: Arrays, policy: Policy
) -> Any:
    """Returns the gather, with the reduction of `shard_grads` as its transpose."""
    choice = choose(policy, axis.platform)
    forward_policy = dataclasses.replace(policy, comm_dtype=None, reduction="native")
    plans = {
        name: build_plan(
            specs, axis.group_size, forward_policy, limits=LIMITS[name], sums=False
        )
        for name in choice.names
    }
    types = [jax.typeof(shard) for shard in shards]

    def carry_out(name: str, shards: Arrays) -> list[jax.Array]:
        leaves = TRANSPORTS[name].all_gather(plans[name], axis, shards)
        # Every rank computes with the parameters on its own data, so they are typed
        # as varying even where they are whole; the transpose sums.
        return [
            axis.lift(leaf, axis.all_names + spec.varying)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]

    @jax.custom_vjp
    def run(shards: Arrays) -> list[jax.Array]:
        leaves: list[jax.Array] = choice.dispatch(carry_out, shards)
        return leaves

    def forward(shards: Arrays) -> tuple[list[jax.Array], None]:
        return run(shards), None

    def backward(_: None, cotangents: Arrays) -> tuple[list[jax.Array]]:
        reduction = plan_reduction(
            [dataclasses.replace(spec, reduced=False) for spec in specs],
            axis,
            dataclasses.replace(policy, op="sum", divide_by=None),
            accumulates=False,
        )
        sums, _stats = reduce_leaves(reduction, cotangents, None, False)
        return (
            [
                axis.lift_to(total, like)
                for total, like in zip(sums, types, strict=True)
            ],
        )

    run.defvjp(forward, backward)
    return run


def _gather_plain(axis: Axis, shard: jax.Array, true: Leaf, cut: Cut) -> jax.Array:
    """Gathers a leaf of a dtype that has no gradient, such as integers."""
    if 0 in true.shape:
        return jnp.zeros(true.shape, true.dtype)  # see own_or_empty
    shard = jnp.asarray(shard).astype(true.dtype)
    if cut.layout == "whole":
        return shard.reshape(true.shape)
    dim = cut.dim or 0
    padded = lax.all_gather(
        axis.lift(shard, axis.names), axis.names, axis=dim, tiled=True
    )
    return lax.slice_in_dim(padded, 0, cut.length, axis=dim).reshape(true.shape)
