"""Layout: how a tree of parameters lies over a mesh axis, leaf by leaf.

Static and hashable, so that it can travel inside a train state as tree structure.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxzero._collectives.shard_params import partition_spec
from jaxzero._cut import Cut, CutOption, Shape
from jaxzero._tree import PyTree, path_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafLayout:
    """One parameter.

    Attributes:
      keys: key path in the tree of parameters.
      shape: true shape.
      dtype: true dtype.
      stored: dtype of its shards.
      option: the cut option that gives this cut, whatever the path and policy.
      cut: its cut; for a stacked leaf, that of each layer.
      layers: number of layers stacked along dimension 0; None if it is not stacked.
    """

    keys: tuple[Any, ...]
    shape: Shape
    dtype: str
    stored: str
    option: CutOption
    cut: Cut
    layers: int | None = None

    @property
    def path(self) -> str:
        """Key path as messages show it."""
        return path_name(self.keys)

    @property
    def unit_shape(self) -> Shape:
        """Shape of what is cut: the leaf, or one layer of it."""
        return self.shape if self.layers is None else self.shape[1:]

    @property
    def global_shape(self) -> Shape:
        """Shape of all shards laid side by side."""
        return self._stack(self.cut.global_shape)

    @property
    def shard_shape(self) -> Shape:
        """Shape of what one rank holds."""
        return self._stack(self.cut.shard_shape)

    def spec(self, names: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec of the global array."""
        spec = partition_spec(self.cut, names)
        return spec if self.layers is None else PartitionSpec(None, *spec)

    def to_global(self, leaf: Any, xp: Any = jnp, dtype: Any = None) -> Any:
        """Returns the leaf padded and reshaped to the global shape.

        Args:
          leaf: the leaf, or a moment of it, in true shape.
          xp: NumPy or jax.numpy.
          dtype: dtype of the result; if None, that of the shards.
        """
        leaf = leaf.astype(self.stored if dtype is None else dtype)
        if self.cut.layout == "whole":
            return leaf
        stack = self._stack(())
        if self.cut.dim is None:
            leaf = leaf.reshape(*stack, self.cut.length)
        surplus = self.cut.chunk * self.cut.ranks - self.cut.length
        if not surplus:
            return leaf
        pad = [(0, 0)] * leaf.ndim
        pad[len(stack) + (self.cut.dim or 0)] = (0, surplus)
        return xp.pad(leaf, pad)

    def to_true(self, array: Any) -> Any:
        """Returns the global array in true shape, without padding."""
        if self.cut.layout == "whole":
            return array
        dim = len(self._stack(())) + (self.cut.dim or 0)
        index = tuple(
            slice(0, self.cut.length) if d == dim else slice(None)
            for d in range(array.ndim)
        )
        return array[index].reshape(self.shape)

    def _stack(self, shape: Shape) -> Shape:
        return shape if self.layers is None else (self.layers, *shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A subtree that the loss function gathers itself, by `gathered`.

    Attributes:
      treedef: its structure.
      begin: its first leaf.
      end: one past its last leaf.
      stacked: whether it holds several layers, stacked along dimension 0.
    """

    treedef: Any
    begin: int
    end: int
    stacked: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A tree of parameters over the ranks of an axis.

    Attributes:
      names: mesh axes that shards are spread over.
      group_size: ranks along them.
      treedef: structure of the parameters.
      leaves: the parameters, in tree order.
      top: structure of the parameters with groups for leaves.
      entries: leaves of `top`: the number of a parameter, or a group of them.
    """

    names: tuple[str, ...]
    group_size: int
    treedef: Any
    leaves: tuple[LeafLayout, ...]
    top: Any
    entries: tuple[int | Group, ...]

    def __hash__(self) -> int:
        # Once: a state is looked up by it in every step.
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.names, self.group_size, self.treedef, self.leaves))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in tree order."""
        return tuple(entry for entry in self.entries if isinstance(entry, Group))

    @property
    def specs(self) -> PyTree:
        """Specs of the global arrays, in the user's structure."""
        return self.unflatten([leaf.spec(self.names) for leaf in self.leaves])

    def abstract(self, mesh: Mesh) -> PyTree:
        """Returns shapes, dtypes and shardings of the global arrays."""
        return self.unflatten(
            [
                jax.ShapeDtypeStruct(
                    leaf.global_shape,
                    leaf.stored,
                    sharding=NamedSharding(mesh, leaf.spec(self.names)),
                )
                for leaf in self.leaves
            ]
        )

    @property
    def fingerprint(self) -> str:
        """A short hash of paths, shapes, dtypes and cuts; equal where they are."""
        # Without structures: modules in them show functions by their address.
        groups = [(group.begin, group.end, group.stacked) for group in self.groups]
        text = repr((self.names, self.group_size, self.leaves, groups))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def resident(self, values: Sequence[Any]) -> PyTree:
        """Returns the values of leaves outside groups, in the user's structure."""
        return jax.tree.unflatten(
            self.top,
            [None if isinstance(e, Group) else values[e] for e in self.entries],
        )

    def grouped(self, values: Sequence[Any]) -> list[PyTree]:
        """Returns the values of each group's leaves, in its structure."""
        return [
            jax.tree.unflatten(group.treedef, values[group.begin : group.end])
            for group in self.groups
        ]

    def merge(self, resident: PyTree, groups: Sequence[Any]) -> PyTree:
        """Returns the user's tree from its resident leaves and a node per group."""
        leaves = iter(jax.tree.leaves(resident))
        nodes = iter(groups)
        return jax.tree.unflatten(
            self.top,
            [next(nodes if isinstance(e, Group) else leaves) for e in self.entries],
        )

    def flatten(self, resident: PyTree, groups: Sequence[PyTree]) -> list[Any]:
        """Returns all values in tree order from what `resident`, `grouped` return."""
        leaves = iter(jax.tree.leaves(resident))
        nodes = iter(groups)
        return [
            value
            for entry in self.entries
            for value in (
                jax.tree.leaves(next(nodes))
                if isinstance(entry, Group)
                else [next(leaves)]
            )
        ]

    def unflatten(self, values: Sequence[Any]) -> PyTree:
        """Returns a tree in the user's structure."""
        return jax.tree.unflatten(self.treedef, values)

    def place(self, leaf: LeafLayout, value: Any, mesh: Mesh) -> jax.Array:
        """Returns a parameter with values as a global array."""
        padded = leaf.to_global(np.asarray(value), np)
        read: Callable[[Any], np.ndarray] = lambda index: padded[index]  # noqa: E731
        sharding = NamedSharding(mesh, leaf.spec(self.names))
        return jax.make_array_from_callback(padded.shape, sharding, read)
