"""Layout: how a tree is spread over mesh axes, leaf by leaf.

Static and hashable, so that it can travel inside a train state as tree structure.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxzero._cut import Cut, CutOption, Shape
from jaxzero._padding import padded, trimmed
from jaxzero._tree import Flat, PyTree, check_structure, path_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafLayout:
    """How one leaf is spread.

    Attributes:
      keys: key path in the tree.
      names: mesh axes that its shards are spread over; none for a whole leaf.
      shape: true shape.
      dtype: true dtype.
      stored: dtype of its shards.
      option: the cut option that gives this cut, whatever path and size.
      cut: its cut; for a stacked leaf, that of each layer.
      layers: number of layers stacked along dimension 0; None if it is not stacked.
    """

    keys: tuple[Any, ...]
    names: tuple[str, ...]
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

    @property
    def spec(self) -> PartitionSpec:
        """Spec under which each rank sees its shard of the global array."""
        if self.cut.whole:
            return PartitionSpec()
        before = len(self._stack(())) + self.cut.shard_dim
        own = self.names if len(self.names) > 1 else self.names[0]
        return PartitionSpec(*(None,) * before, own)

    def to_global(self, leaf: Any, xp: Any = jnp, dtype: Any = None) -> Any:
        """Returns the leaf padded and reshaped to the global shape.

        Args:
          leaf: the leaf, or a moment of it, in true shape.
          xp: NumPy or jax.numpy.
          dtype: dtype of the result; if None, that of the shards.
        """
        leaf = leaf.astype(self.stored if dtype is None else dtype)
        return padded(self.cut, leaf, stack=len(self._stack(())), xp=xp)

    def to_true(self, array: Any) -> Any:
        """Returns the global array in true shape, without padding."""
        stack = len(self._stack(()))
        return trimmed(self.cut, array, stack=stack).reshape(self.shape)

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
    """How a tree is spread over the ranks of mesh axes.

    Made once by `make_layout`, from true shapes, and given to every function that
    takes leaves apart or puts them together. Static and hashable.

    Attributes:
      names: mesh axes that shards are spread over.
      replicate: mesh axes along which shards are copies.
      group_size: ranks along `names`.
      replicas: ranks along `replicate`.
      treedef: structure of the tree.
      leaves: its arrays, in tree order.
      top: structure of the tree with groups for leaves.
      entries: leaves of `top`: the number of a leaf, or a group of them.
    """

    names: tuple[str, ...]
    replicate: tuple[str, ...]
    group_size: int
    replicas: int
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

    def of(self, flat: Flat, what: str) -> tuple[LeafLayout, ...]:
        """Returns how each leaf of a tree of leaves or shards is spread.

        Args:
          flat: the tree; gradients of integers, `float0`, may be missing in it.
          what: its name in messages.

        Raises:
          ValueError: for another structure.
          NotImplementedError: for layers that are stacked.
        """
        by_path = {leaf.path: leaf for leaf in self.leaves}
        check_structure(flat, self.treedef, list(by_path), what, "the layout")
        found = tuple(by_path[leaf.path] for leaf in flat.leaves)
        for leaf in found:
            if leaf.layers is not None:
                raise NotImplementedError(
                    f"{what} leaf {leaf.path} stacks {leaf.layers} layers; expected a "
                    f"layout without stacked=, which only zero3 and estimate_memory "
                    f"take. Give a layout of one layer."
                )
        return found

    def check(self, flat: Flat, what: str) -> None:
        """Refuses a tree whose leaves do not have the true shapes of the layout.

        Args:
          flat: the tree.
          what: its name in messages.

        Raises:
          ValueError: naming the first leaf that differs.
        """
        by_path = {leaf.path: leaf for leaf in self.leaves}
        check_structure(flat, self.treedef, list(by_path), what, "the layout")
        for leaf in flat.leaves:
            expected = by_path[leaf.path].shape
            if leaf.shape != expected:
                raise ValueError(
                    f"{what} leaf {leaf.path} has shape {leaf.shape}; expected "
                    f"{expected}, as in the layout. Make the layout from the true "
                    f"shapes (jax.eval_shape of the init function)."
                )

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in tree order."""
        return tuple(entry for entry in self.entries if isinstance(entry, Group))

    @property
    def like(self) -> PyTree:
        """True shapes and dtypes of the tree."""
        return self.unflatten(
            [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        )

    @property
    def specs(self) -> PyTree:
        """Specs of the global arrays, in the user's structure."""
        return self.unflatten([leaf.spec for leaf in self.leaves])

    def abstract(self, mesh: Mesh) -> PyTree:
        """Returns shapes, dtypes and shardings of the global arrays."""
        return self.unflatten(
            [
                jax.ShapeDtypeStruct(
                    leaf.global_shape,
                    leaf.stored,
                    sharding=NamedSharding(mesh, leaf.spec),
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
