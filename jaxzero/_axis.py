"""The mesh axis that is reduced over: ranks, and which values vary over it.

The only file that reads the abstract mesh and the varying types of values under
`jax.shard_map`, so the only one that follows JAX's changes there (0.11 and 0.12).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AxisName = str | tuple[str, ...]

RETYPES = frozenset("pcast pvary reshard sharding_constraint".split())
"""Primitives that change how a value's type varies or is sharded, and no number."""

_UNVARYING = jax.sharding.ManualAxisType(varying=frozenset())

_FIX = (
    "Call it inside a shard_map over that axis, under jit:\n"
    "    step = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...))\n"
    "    # and inside f: {call}(..., {axis!r})"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """The axes of one call, as bound by the surrounding `shard_map`.

    Attributes:
      names: axes that shards are spread over, in the user's order.
      replicate: axes along which shards are copies.
      group_size: ranks along `names`.
      replicas: ranks along `replicate`.
      typed: whether values carry varying types here (`check_vma=True`).
      platform: platform of the mesh's devices, such as "cpu" or "gpu"; None where
        the mesh names no devices.
    """

    names: tuple[str, ...]
    replicate: tuple[str, ...]
    group_size: int
    replicas: int
    typed: bool
    platform: str | None = None

    @property
    def all_names(self) -> tuple[str, ...]:
        """Shard axes, then replicate axes."""
        return self.names + self.replicate

    def rank(self) -> jax.Array:
        """Returns this device's position along the shard axes: int32 scalar."""
        return lax.axis_index(self.names)

    def replica_groups(self, names: tuple[str, ...]) -> np.ndarray:
        """Returns all groups of devices along axes: int64 (groups, ranks).

        Devices are positions in the mesh, of which every device is in one group;
        their order in a group is that of their ranks.
        """
        mesh = jax.sharding.get_abstract_mesh()
        where = [mesh.axis_names.index(name) for name in names]
        ids = np.arange(mesh.size, dtype=np.int64).reshape(mesh.axis_sizes)
        last = range(ids.ndim - len(names), ids.ndim)
        ranks = math.prod(mesh.axis_sizes[i] for i in where)
        return np.moveaxis(ids, where, last).reshape(-1, ranks)

    def result(
        self, shape: Sequence[int], dtype: str, varying: Iterable[str]
    ) -> jax.ShapeDtypeStruct:
        """Returns the type of a custom call's result.

        Without a varying type a result would count as equal on all ranks, and
        `out_specs=P()` would be accepted for a shard.
        """
        if not self.typed:
            return jax.ShapeDtypeStruct(shape, dtype)
        mesh = jax.sharding.get_abstract_mesh()
        return jax.ShapeDtypeStruct(
            shape,
            dtype,
            sharding=NamedSharding(mesh, PartitionSpec()),
            manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset(varying)),
        )

    def shard_axes(self, whole: bool, further: Iterable[str]) -> frozenset[str]:
        """Returns the axes that a shard varies over: none of ours if kept whole."""
        return frozenset(further) | frozenset(() if whole else self.names)

    def unvarying_axes(self, value: Any) -> tuple[str, ...]:
        """Returns those of this call's axes along which a value is known equal."""
        if not self.typed:
            return ()
        return tuple(name for name in self.all_names if name not in varying(value))

    def lift(self, value: jax.Array, names: Iterable[str]) -> jax.Array:
        """Returns the value typed as varying over at least `names`."""
        if not self.typed:
            return value
        missing = tuple(name for name in names if name not in varying(value))
        if not missing:
            return value
        lifted: jax.Array = lax.pcast(value, missing, to="varying")
        return lifted

    def lift_to(self, value: jax.Array, like: Any) -> jax.Array:
        """Returns the value typed as varying over at least what a type varies over.

        Args:
          value: the value.
          like: a result of `jax.typeof`.
        """
        return self.lift(value, like.mat.varying)


def varying(value: Any) -> frozenset[str]:
    """Returns the mesh axes that a value's type varies over."""
    return frozenset(jax.typeof(value).mat.varying)


def type_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns a type, such as of a jaxpr's variable, as something to trace with."""
    if not getattr(aval, "mat", _UNVARYING).varying:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=aval.sharding,
        manual_axis_type=aval.mat,
    )


def aval_varies(aval: Any, names: Iterable[str]) -> bool:
    """Says whether a type, such as of a jaxpr's variable, varies over any axis."""
    return not frozenset(names).isdisjoint(getattr(aval, "mat", _UNVARYING).varying)


def bind_axis(axis_name: AxisName, replicate_axis: AxisName | None, call: str) -> Axis:
    """Returns the axis of a call, checked against the surrounding `shard_map`.

    Args:
      axis_name: axis, or tuple of axes, that shards are spread over.
      replicate_axis: axis or axes along which shards are copies, or None.
      call: name of the public function, for messages.

    Raises:
      ValueError: for an axis that is not bound here, or named twice.
      TypeError: for names that are no strings.
      NotImplementedError: if some axes of the mesh are left to the compiler.
    """
    names, replicate = axis_names(axis_name, replicate_axis, call)
    both = names + replicate
    mesh = jax.sharding.get_abstract_mesh()
    manual = () if mesh.empty else mesh.manual_axes
    for name in both:
        if name not in manual:
            bound = f"bound here: {', '.join(map(repr, manual)) or 'none'}"
            fix = _FIX.format(call=f"jaxzero.{call}", axis=axis_name)
            raise ValueError(
                f"{call}: axis {name!r} is not bound by a shard_map ({bound}). {fix}"
            )
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return Axis(
        names=names,
        replicate=replicate,
        group_size=math.prod(sizes[name] for name in names),
        replicas=math.prod(sizes[name] for name in replicate),
        typed=bool(varying(lax.axis_index(names[0]))),
        platform=getattr(mesh.abstract_device, "platform", None),
    )


def mesh_sizes(mesh: Mesh | AbstractMesh | Mapping[str, int] | None) -> dict[str, int]:
    """Returns the sizes of a mesh's axes by name; None is the surrounding mesh."""
    if isinstance(mesh, Mapping):
        return dict(mesh)
    found = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return {} if found.empty else dict(found.shape)


def axis_names(
    axis_name: AxisName, replicate_axis: AxisName | None, call: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns both arguments as tuples, the second empty for None.

    Raises:
      ValueError: for an axis named twice.
      TypeError: for names that are no strings.
    """
    names = _names(axis_name, "axis_name", call)
    replicate = (
        () if replicate_axis is None else _names(replicate_axis, "replicate_axis", call)
    )
    both = names + replicate
    for name in both:
        if both.count(name) > 1:
            also = f" and replicate_axis={replicate_axis!r}" if replicate else ""
            raise ValueError(
                f"{call}: axis {name!r} is named twice in axis_name={axis_name!r}"
                f"{also}; name each axis once."
            )
    return names, replicate


def _names(value: AxisName, what: str, call: str) -> tuple[str, ...]:
    names = value if isinstance(value, tuple) else (value,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{call}: {what}={value!r}; expected the name of a mesh axis or a "
            f"non-empty tuple of names."
        )
    return names


def check_not_auto_sharded(what: str, value: Any, call: str) -> None:
    """Refuses a leaf that the compiler may have sharded over an axis of its own.

    In a partly manual shard_map a custom call sees such a leaf only after XLA has
    gathered it, unasked, on every device.

    Args:
      what: name of the leaf, for the message.
      value: the leaf.
      call: name of the public function, for the message.

    Raises:
      NotImplementedError: naming the leaf and the axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    spec = getattr(getattr(jax.typeof(value), "sharding", None), "spec", ())
    used = {
        name
        for entry in spec
        if entry is not None
        for name in (entry if isinstance(entry, tuple) else (entry,))
    }
    left = [
        name
        for name, size, kind in kinds
        if size > 1
        and (kind == AxisType.Auto or (kind == AxisType.Explicit and name in used))
    ]
    if left:
        raise NotImplementedError(
            f"{call}: {what} may be sharded over the mesh axes "
            f"{', '.join(map(repr, left))}, which this shard_map leaves to the "
            f"compiler; XLA would gather it on every device first. Make the shard_map "
            f"manual over all axes (drop axis_names=), or nest a shard_map over "
            f"{', '.join(map(repr, left))} around this call."
        )


def mask_to_first(axis: Axis, value: jax.Array, names: Sequence[str]) -> jax.Array:
    """Returns the value on the ranks with index 0 along `names`, zero elsewhere.

    A leaf that is equal along an axis is already the sum over it, so it must enter
    a sum over that axis once.
    """
    first = jnp.bool_(True)
    for name in names:
        first = first & (lax.axis_index(name) == 0)
    lifted = axis.lift(value, axis.all_names)
    return jnp.where(first, lifted, jnp.zeros_like(lifted))
