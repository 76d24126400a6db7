"""Leaves in true shape become global arrays of shards, on any mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._cut import Shape
from jaxzero._layout import Layout, LeafLayout
from jaxzero._train.export import auto_shardings, even_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a leaf in true shape belongs.

    Attributes:
      shape: its true shape.
      dtype: the dtype that is wanted.
      owner: the parameter whose layout it takes; None if it stays as it is.
    """

    shape: Shape
    dtype: Any
    owner: LeafLayout | None

    def convert(self, value: Any, xp: Any = jnp) -> Any:
        """Returns the value in the shape and dtype that are wanted."""
        if self.owner is not None:
            return self.owner.to_global(value, xp, self.dtype)
        return value if value.dtype == self.dtype else value.astype(self.dtype)


def param_places(layout: Layout) -> list[Place]:
    """Returns the places of the parameters, in tree order."""
    return [
        Place(shape=leaf.shape, dtype=leaf.stored, owner=leaf) for leaf in layout.leaves
    ]


def place_leaves(
    layout: Layout, places: Sequence[Place], values: Sequence[Any], mesh: Mesh
) -> list[jax.Array]:
    """Returns leaves in true shape as global arrays, of memory of their own.

    Args:
      layout: the layout that is wanted.
      places: the place of each leaf.
      values: the leaves, NumPy arrays or arrays on any devices. Devices send each
        other what they hold; from what only the host or this process holds, the same
        on all processes, each takes what its own devices need.
      mesh: the mesh that is wanted.
    """
    shardings = [
        NamedSharding(mesh, P() if p.owner is None else p.owner.spec) for p in places
    ]
    placed: dict[int, jax.Array] = {}
    arrays: dict[int, jax.Array] = {}
    for i, (place, value) in enumerate(zip(places, values, strict=True)):
        if _is_in_reach(value, shardings[i]):
            spec = P() if place.owner is None else even_spec(layout, place.shape)
            arrays[i] = jax.device_put(value, auto_shardings(NamedSharding(mesh, spec)))
        else:
            host = place.convert(np.asarray(value), np)
            read: Callable[[Any], np.ndarray] = host.__getitem__
            placed[i] = jax.make_array_from_callback(host.shape, shardings[i], read)
    converted = _to_global(
        tuple(places[i] for i in arrays),
        tuple(auto_shardings(shardings[i]) for i in arrays),
        list(arrays.values()),
    )
    for i, value in zip(arrays, converted, strict=True):
        placed[i] = jax.device_put(value, shardings[i])
    return [placed[i] for i in range(len(places))]


def _is_in_reach(value: Any, sharding: NamedSharding) -> bool:
    """Says whether devices that hold a value can send it to all others."""
    if not isinstance(value, jax.Array):
        return False
    # Of what one process holds, JAX would send all to all processes, to compare.
    return sharding.is_fully_addressable or not value.is_fully_addressable


# One function for all calls: jit finds by the places what it has compiled. Nothing is
# aliased, so what was given outlives the next step's donation.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _to_global(
    places: tuple[Place, ...],
    shardings: tuple[NamedSharding, ...],
    values: list[jax.Array],
) -> list[jax.Array]:
    converted: list[jax.Array] = jax.lax.with_sharding_constraint(
        [place.convert(value) for place, value in zip(places, values, strict=True)],
        list(shardings),
    )
    return converted
