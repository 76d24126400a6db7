"""make_plan: the plan of a tree, without a device."""

from jaxzero._collectives.leaves import leaf_spec
from jaxzero._cut import CutTree
from jaxzero._layout import Layout
from jaxzero._make_layout import build_layout, check_alone
from jaxzero._numbers import whole_number
from jaxzero._plan import ReducePlan, plan_reduce
from jaxzero._policy import Policy
from jaxzero._transports import transport_for_gpus
from jaxzero._tree import PyTree, flatten


def make_plan(
    tree: PyTree | Layout,
    group_size: int | None = None,
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    cuts: CutTree = None,
) -> ReducePlan:
    """Returns the plan by which `shard_grads` reduces a tree.

    Needs no device and no mesh. `print(plan)` shows a table.

    Args:
      tree: gradients, or parameters, or their `jax.eval_shape`: a pytree of anything
        with a shape and a dtype. Or a `Layout` alone.
      group_size: number of ranks along the shard axis.
      policy: as for `shard_grads`. With `transport="auto"` the plan is that of
        `"nccl"`, the transport of NVIDIA GPUs.
      cuts: as for `shard_grads`.

    Returns:
      The `ReducePlan`, equal for equal shapes, dtypes and options.

    Raises:
      ValueError: for `group_size` below 1 or a cut that does not fit.
      TypeError: for a dtype that cannot be summed, or a `group_size` that is no whole
        number.

    Example:
      >>> import jax, jaxzero
      >>> tree = {"w": jax.ShapeDtypeStruct((8, 4), "float32")}
      >>> plan = jaxzero.make_plan(tree, 4)
      >>> plan.num_collectives, plan.wire_bytes, plan.leaves[0].cut.shard_shape
      (1, 128, (2, 4))
    """
    limits = transport_for_gpus(policy).limits
    if isinstance(tree, Layout):
        check_alone("make_plan", group_size=group_size, cuts=cuts)
        layout, tree = tree, tree.like
    else:
        ranks = whole_number("group_size", group_size, "ranks")
        if ranks < 1:
            raise ValueError(f"group_size={ranks}; expected at least 1 rank.")
        layout = build_layout(
            tree,
            ("data",),
            (),
            {"data": ranks},
            what="tree",
            cuts=cuts,
        )
    flat = flatten(tree, "tree", shapes_suffice=True)
    specs = [
        leaf_spec(leaf, own.cut, policy)
        for leaf, own in zip(flat.leaves, layout.of(flat, "tree"), strict=True)
    ]
    return plan_reduce(
        specs, layout.group_size, policy, limits=limits, replicas=layout.replicas
    )
