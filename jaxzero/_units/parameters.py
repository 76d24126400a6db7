"""How parameters are gathered, whole or one layer of them, and gradients reduced."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxzero._axis import Axis, AxisName
from jaxzero._collectives.gather_params import gather_params
from jaxzero._collectives.shard_grads import shard_grads
from jaxzero._cut import CutOption, Shape
from jaxzero._dtypes import component_dtype, like_kind
from jaxzero._layout import LeafLayout
from jaxzero._policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class _View:
    """Shape and cut that the shards of a parameter, or of its layer, belong to."""

    shape: Shape
    cut: CutOption
    true_shape: Shape


def _whole(leaf: LeafLayout) -> _View:
    shape: Shape = leaf.shape
    cut: CutOption = leaf.option
    if leaf.layers is not None and leaf.cut.layout != "whole":
        # Each layer is cut alike, so the parameter is cut along a later dimension.
        cut = 1 + (leaf.cut.dim or 0)
        if leaf.cut.dim is None:
            shape = (leaf.layers, math.prod(leaf.unit_shape))
    return _View(shape=shape, cut=cut, true_shape=leaf.shape)


def _layer(leaf: LeafLayout) -> _View:
    shape = leaf.shape[1:]
    cut = leaf.option if leaf.layers is not None else (leaf.cut.dim or 1) - 1
    return _View(shape=shape, cut=cut, true_shape=shape)


class Parameters:
    """A list of parameters over the ranks of an axis.

    Args:
      leaves: their layouts.
      axis: the axis.
      replicate_axis: axes that gradients are summed over too.
      policy: dtypes, sizes, and what gradients are divided by.
    """

    def __init__(
        self,
        leaves: Sequence[LeafLayout],
        axis: Axis,
        replicate_axis: AxisName | None,
        policy: Policy,
    ) -> None:
        self.leaves = leaves
        self.axis = axis
        self._replicate_axis = replicate_axis
        self._policy = policy

    @property
    def overlap(self) -> bool:
        """Whether collectives run beside other units; one rank alone only copies."""
        ranks = self.axis.group_size * self.axis.replicas
        return self._policy.overlap and ranks > 1

    def has_layers(self, number: int) -> bool:
        """Says whether entries along dimension 0 of a parameter have own shards."""
        leaf = self.leaves[number]
        return leaf.layers is not None or bool(leaf.cut.dim)

    def type_of(self, number: int, *, layer: bool = False) -> jax.ShapeDtypeStruct:
        """Returns the type of a gathered parameter, or of one layer of it."""
        leaf = self.leaves[number]
        dtype = leaf.dtype
        if self._policy.compute_dtype is not None:
            wanted = self._policy.compute_dtype
            dtype = like_kind(dtype, wanted, leaf.path, "compute_dtype")
        shape = leaf.shape[1:] if layer else leaf.shape
        return self.axis.result(shape, dtype, self.axis.all_names)

    def gather(
        self, numbers: Sequence[int], shards: Sequence[Any], layered: Sequence[bool]
    ) -> list[Any]:
        """Returns full parameters, or one layer of some, from their shards."""
        if not numbers:
            return []
        views = self._views(numbers, layered)
        full = gather_params(
            list(shards),
            [
                jax.ShapeDtypeStruct(view.shape, self.leaves[i].dtype)
                for i, view in zip(numbers, views, strict=True)
            ],
            self.axis.names,
            policy=self._policy,
            cuts=[view.cut for view in views],
            replicate_axis=self._replicate_axis,
        )
        return [
            leaf.reshape(view.true_shape)
            for leaf, view in zip(full, views, strict=True)
        ]

    def reduce(
        self,
        numbers: Sequence[int],
        grads: Sequence[Any],
        into: Sequence[Any] | None,
        layered: Sequence[bool],
    ) -> list[Any]:
        """Returns the shards of summed gradients, added to others."""
        if not numbers:
            return []
        views = self._views(numbers, layered)
        policy = self._policy
        if into is None:
            (stored,) = {component_dtype(self.leaves[i].stored) for i in numbers}
            policy = dataclasses.replace(policy, shard_dtype=stored)
        reduced: list[Any] = shard_grads(
            [g.reshape(view.shape) for g, view in zip(grads, views, strict=True)],
            self.axis.names,
            into=None if into is None else list(into),
            policy=policy,
            cuts=[view.cut for view in views],
            replicate_axis=self._replicate_axis,
        )
        return reduced

    def one_dtype(self, numbers: Sequence[int]) -> bool:
        """Says whether the shards of some parameters have one dtype."""
        return len({component_dtype(self.leaves[i].stored) for i in numbers}) == 1

    def zeros(self, like: Any) -> jax.Array:
        """Returns a sum of nothing, typed as a shard."""
        return self.axis.lift_to(jnp.zeros(like.shape, like.dtype), jax.typeof(like))

    def _views(self, numbers: Sequence[int], layered: Sequence[bool]) -> list[_View]:
        return [
            (_layer if layer else _whole)(self.leaves[i])
            for i, layer in zip(numbers, layered, strict=True)
        ]
