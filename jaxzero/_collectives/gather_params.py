"""gather_params: shards in, full parameters out; its transpose is shard_grads."""

from jaxzero._axis import AxisName
from jaxzero._collectives.gather import gather_leaves, gather_plain, plan_gathering
from jaxzero._collectives.shards import read_shards
from jaxzero._cut import CutTree
from jaxzero._layout import Layout
from jaxzero._make_layout import bind_layout, check_alone
from jaxzero._policy import Policy
from jaxzero._tree import PyTree


def gather_params(
    shards: PyTree,
    like: PyTree | Layout,
    axis_name: AxisName | None = None,
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
        cannot be told from data. Or a `Layout` alone, which says all of this.
      axis_name: mesh axis, or tuple of axes in rank order.
      policy: `compute_dtype` is the dtype of the result (None: that of `like`) and
        of the wire; `comm_dtype` and `reduction` are for the backward pass.
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
    if isinstance(like, Layout):
        check_alone("gather_params", axis_name=axis_name)
        given: AxisName | Layout = like
        like = like.like
    elif axis_name is None:
        raise TypeError(
            "gather_params: axis_name is missing beside true shapes; expected a mesh "
            "axis, or a layout alone. Give make_layout(like, axis_name)."
        )
    else:
        given = axis_name
    axis, layout = bind_layout(
        given,
        like,
        "gather_params",
        what="like",
        cuts=cuts,
        replicate_axis=replicate_axis,
    )
    leaves = read_shards(axis, layout, shards, like, policy)
    gathering = plan_gathering(leaves.specs, axis, policy)
    return leaves.rebuild(
        gather_leaves(gathering, leaves.values),
        [gather_plain(axis, shard) for shard in leaves.plain],
    )
