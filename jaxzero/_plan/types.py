"""What plans are made of: leaves, routes, buckets and their slots. No JAX."""

import dataclasses
import enum
from typing import Literal

from jaxzero._cut import Cut, Shape
from jaxzero._dtypes import component_bytes, components
from jaxzero._policy import Policy

Collective = Literal["reduce_scatter", "all_reduce", "all_gather", "none"]
Kind = Literal["packed", "direct", "local"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in force: of the policy, else as measured for the transport.

    Attributes:
      bucket_bytes: limit of one bucket.
      direct_bytes: size from which leaves go direct.
      widens_bfloat16: sums bfloat16 through a float32 copy of the operand, as XLA:CPU
        does; a leaf of its own then costs more memory than a bucket.
    """

    bucket_bytes: int
    direct_bytes: int
    widens_bfloat16: bool

    def under(self, policy: Policy) -> "Limits":
        """Returns the limits with the sizes that a policy sets."""
        bucket, direct = policy.bucket_bytes, policy.direct_bytes
        return dataclasses.replace(
            self,
            bucket_bytes=self.bucket_bytes if bucket is None else bucket,
            direct_bytes=self.direct_bytes if direct is None else direct,
        )


class Move(enum.Enum):
    """What brings a leaf to where it is needed."""

    EMPTY = "empty"
    """Nothing: it has no elements, and a constant stands for the result."""
    OWN = "own"
    """Nothing: each rank takes its part of what it holds already."""
    ALONE = "alone"
    """Nothing: one rank holds everything, and its axes have size 1."""
    WHOLE = "whole"
    """An all-reduce, after which every rank of the shard axes has all of it."""
    SCATTER = "scatter"
    """A reduce-scatter, then a sum over replicas."""
    GATHER = "gather"
    """An all-gather."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """How one leaf travels; the planner decides it once, others only follow.

    Attributes:
      move: what brings it to where it is needed.
      kind: kind of its buckets; None for a leaf without elements, which has none.
      reason: why.
    """

    move: Move
    kind: Kind | None
    reason: str

    def __str__(self) -> str:
        return f"{self.kind or 'empty'}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """What the planner knows of one leaf.

    Attributes:
      path: key path in the tree.
      shape: true shape.
      dtype: dtype in which it enters the reduction, or leaves the gather.
      shard_dtype: dtype of its shard.
      cut: how it is cut.
      summed: it is known to be equal on all ranks, so it is their sum already.
      varying: mesh axes besides the shard axes that its shard varies over. Leaves
        that differ in this never share a bucket, because one call gives all its
        results one type.
    """

    path: str
    shape: Shape
    dtype: str
    shard_dtype: str
    cut: Cut
    summed: bool = False
    varying: tuple[str, ...] = ()

    @property
    def shard_components(self) -> int:
        """Reals in one shard, padding included."""
        return self.cut.shard_numel * components(self.dtype)

    @property
    def whole(self) -> bool:
        """Whether every rank keeps all of it."""
        return self.cut.layout == "whole"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """A leaf's place in a bucket: shard components [begin, begin + count).

    Attributes:
      leaf: index of the leaf in the leaves of the plan.
      begin: first component of the shard that travels here; above 0 for a leaf that
        is split over buckets.
      count: components that do, padding of the shard included.
      row_offset: component of each row of the bucket at which they start.
    """

    leaf: int
    begin: int
    count: int
    row_offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Leaves moved by one collective.

    Attributes:
      kind: "packed" (through a send buffer), "direct" (one leaf, read in place) or
        "local" (no collective).
      collective: what moves it.
      comm_dtype: real dtype on the wire; for "local", that of the leaf.
      send_rows: rows of the side with full leaves, one per rank; 1 for an all-reduce.
      recv_rows: rows that come back; more than 1 are summed on arrival.
      in_place: what is received is the shard itself, scaled where it is.
      pre_scale: power of two multiplied before the sum (float16 wires only).
      whole: its leaves stay whole, so all ranks hold the same results.
      varying: mesh axes besides the shard axes that its shards vary over.
      row_numel: reals in a row, padding included.
      slots: the leaves, in row order.
    """

    kind: Kind
    collective: Collective
    comm_dtype: str
    send_rows: int
    recv_rows: int
    in_place: bool
    pre_scale: float
    whole: bool
    varying: tuple[str, ...]
    row_numel: int = 0
    slots: tuple[Slot, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_numel * component_bytes(self.comm_dtype)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank gives to the collective."""
        match self.collective:
            case "none":
                return 0
            case "all_gather":
                return self.row_bytes
            case _:
                return self.send_rows * self.row_bytes

    @property
    def send_bytes(self) -> int:
        """Bytes of the packed rows of the side with full leaves."""
        return self.send_rows * self.row_bytes if self.kind == "packed" else 0

    @property
    def recv_bytes(self) -> int:
        """Bytes of the received rows, unless they are results themselves."""
        if self.collective == "none" or self.in_place:
            return 0
        return self.recv_rows * self.row_bytes
