"""make_plan: the plan of a tree, without a device."""

from jaxzero._collectives.leaves import leaf_spec
from jaxzero._cut import CutTree
from jaxzero._numbers import whole_number
from jaxzero._plan import ReducePlan, plan_reduce
from jaxzero._policy import Policy
from jaxzero._transports import transport_for_gpus
from jaxzero._tree import PyTree, broadcast_cuts, flatten


def make_plan(
    tree: PyTree,
    group_size: int,
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    cuts: CutTree = None,
) -> ReducePlan:
    """Returns the plan by which `shard_grads` reduces a tree.

    Needs no device and no mesh. `print(plan)` shows a table.

    Args:
      tree: gradients, or parameters, or their `jax.eval_shape`: a pytree of anything
        with a shape and a dtype.
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
    group_size = whole_number("group_size", group_size, "ranks")
    if group_size < 1:
        raise ValueError(f"group_size={group_size}; expected at least 1 rank.")
    flat = flatten(tree, "tree", shapes_suffice=True)
    options = broadcast_cuts(cuts, tree, flat)
    specs = [
        leaf_spec(leaf, option, group_size, policy)
        for leaf, option in zip(flat.leaves, options, strict=True)
    ]
    limits = transport_for_gpus(policy).limits
    return plan_reduce(specs, group_size, policy, limits=limits)
