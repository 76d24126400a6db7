"""The shards of a gather: values, and what the planner must know of their leaves."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxzero._axis import Axis, check_not_auto_sharded, varying
from jaxzero._cut import Cut
from jaxzero._dtypes import is_supported, kind, like_kind
from jaxzero._layout import Layout
from jaxzero._plan import LeafSpec
from jaxzero._policy import Policy
from jaxzero._tree import (
    Flat,
    Leaf,
    PyTree,
    check_width,
    flatten,
    match,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainShard:
    """A shard of a dtype that has no gradient, such as integers.

    Attributes:
      value: the shard.
      like: the parameter that it belongs to.
      cut: how that is cut.
    """

    value: Any
    like: Leaf
    cut: Cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """What one call was given, leaf by leaf, checked.

    Attributes:
      specs: what the planner must know of each leaf that buckets can hold.
      values: the shards of these leaves.
      dtypes: the dtypes of these leaves in the result.
      plain: the shards of the others.
      flat: the caller's tree.
      planned: whether a leaf of it is among `specs`.
    """

    specs: list[LeafSpec]
    values: list[Any]
    dtypes: list[str]
    plain: list[PlainShard]
    flat: Flat
    planned: list[bool]

    def rebuild(self, full: Sequence[Any], plain: Sequence[Any]) -> PyTree:
        """Returns the caller's tree from the full leaves of both kinds."""
        leaves = (leaf.astype(d) for leaf, d in zip(full, self.dtypes, strict=True))
        others = iter(plain)
        return self.flat.rebuild(
            [next(leaves if planned else others) for planned in self.planned]
        )


def read_shards(
    axis: Axis, layout: Layout, shards: PyTree, like: PyTree, policy: Policy
) -> Shards:
    """Returns the shards of a call of `gather_params`.

    Raises:
      ValueError: for a shard that does not have the shape that its true shape and cut
        give it.
      TypeError: for shards of another kind of dtype than `like`.
      NotImplementedError: in a partly manual shard_map.
    """
    flat_like = flatten(like, "like", shapes_suffice=True)
    flat = match(shards, flat_like, "shards", "like")
    read = Shards(specs=[], values=[], dtypes=[], plain=[], flat=flat, planned=[])
    for shard, true, own in zip(
        flat.leaves, flat_like.leaves, layout.of(flat, "shards"), strict=True
    ):
        cut = own.cut
        _check_shape(shard, true, cut)
        _check_dtypes(shard, true)
        check_not_auto_sharded(f"leaf {shard.path}", shard.value, "gather_params")
        planned = kind(true.dtype) != "integer or boolean"
        read.planned.append(planned)
        if planned:
            read.specs.append(_spec(axis, shard, true, cut, policy))
            read.values.append(shard.value)
            as_stored = policy.compute_dtype is None
            read.dtypes.append(true.dtype if as_stored else read.specs[-1].dtype)
        else:
            read.plain.append(PlainShard(value=shard.value, like=true, cut=cut))
    return read


def _check_shape(shard: Leaf, true: Leaf, cut: Cut) -> None:
    if shard.shape != cut.shard_shape:
        raise ValueError(
            f"shards leaf {shard.path} has shape {shard.shape}; expected "
            f"{cut.shard_shape}, the shard of a parameter of shape {true.shape} over "
            f"{cut.ranks} ranks ({cut.layout} layout). Give the true shapes as like "
            f"(jax.eval_shape of the init function), and the cuts of "
            f"shard_params; or the layout of both."
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
    dtype = _summed(true.dtype)
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
        shard_dtype=_summed(shard.dtype),
        cut=cut,
        varying=further,
    )


def _summed(dtype: str) -> str:
    """Returns the dtype in which a leaf travels, and its gradients are added.

    Sums of 8-bit floats would saturate or become NaN unnoticed, so that they travel in
    float32; the result, and the gradient at last, are rounded to their own dtype.
    """
    return dtype if is_supported(dtype) else "float32"
