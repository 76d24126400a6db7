"""The leaves of a reduction: values, accumulators, and what the planner must know."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxzero._axis import Axis, check_not_auto_sharded, varying
from jaxzero._cut import Cut
from jaxzero._dtypes import (
    check_summable,
    component_dtype,
    is_supported,
    kind,
    like_kind,
)
from jaxzero._layout import Layout
from jaxzero._plan import LeafSpec
from jaxzero._policy import Policy
from jaxzero._tree import Leaf, PyTree, check_width, flatten, match


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaves:
    """What one call was given, leaf by leaf, checked.

    Attributes:
      specs: what the planner must know of each.
      values: the gradients.
      into: the accumulators, or None.
      rebuild: makes the caller's tree from a value for each leaf.
    """

    specs: list[LeafSpec]
    values: list[Any]
    into: list[Any] | None
    rebuild: Callable[[Sequence[Any]], PyTree]


def read_leaves(
    axis: Axis, layout: Layout, grads: PyTree, into: PyTree | None, policy: Policy
) -> Leaves:
    """Returns the leaves of a call of `shard_grads`.

    Raises:
      ValueError: for `grads` that are not of the layout, or an `into` of another
        structure or shape.
      TypeError: for dtypes that cannot be summed or stored.
      NotImplementedError: in a partly manual shard_map.
    """
    flat = flatten(grads, "grads")
    sums = None if into is None else match(into, flat, "into", "grads")
    layout.check(flat, "grads")
    return Leaves(
        specs=[
            _spec(axis, leaf, own.cut, policy, None if sums is None else sums.leaves[i])
            for i, (leaf, own) in enumerate(
                zip(flat.leaves, layout.of(flat, "grads"), strict=True)
            )
        ],
        values=[leaf.value for leaf in flat.leaves],
        into=None if sums is None else [leaf.value for leaf in sums.leaves],
        rebuild=flat.rebuild,
    )


def leaf_spec(
    leaf: Leaf,
    cut: Cut,
    policy: Policy,
    *,
    into_dtype: str | None = None,
    summed: bool = False,
    varying: tuple[str, ...] = (),
) -> LeafSpec:
    """Returns what the planner needs to know of a leaf.

    Raises:
      TypeError: for dtypes that cannot be summed or stored.
    """
    dtype = check_summable(leaf.dtype, leaf.path, policy.comm_dtype)
    shard_dtype = into_dtype or dtype
    if policy.shard_dtype is not None and into_dtype is None:
        shard_dtype = like_kind(dtype, policy.shard_dtype, leaf.path, "shard_dtype")
    return LeafSpec(
        path=leaf.path,
        shape=leaf.shape,
        dtype=dtype,
        shard_dtype=shard_dtype,
        cut=cut,
        summed=summed,
        varying=varying,
    )


def _spec(
    axis: Axis, leaf: Leaf, cut: Cut, policy: Policy, into: Leaf | None
) -> LeafSpec:
    check_not_auto_sharded(f"leaf {leaf.path}", leaf.value, "shard_grads")
    spec = leaf_spec(
        leaf,
        cut,
        policy,
        into_dtype=None if into is None else into.dtype,
        summed=axis.typed and axis.unvarying_axes(leaf.value) == axis.all_names,
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
            f"Start with the result of shard_grads(..., into=None), or give "
            f"the same layout to both."
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
