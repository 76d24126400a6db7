"""Transport "xla": pack, a `lax` collective, unpack. Any backend, any process layout.

Buckets follow each other: the pack of a bucket takes a result of the unpack before
it as an ordering operand, so that one bucket's buffers are alive at a time and the
collectives run in plan order on every rank.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxzero import _ffi
from jaxzero._axis import Axis, varying
from jaxzero._padding import padded, trimmed
from jaxzero._plan import Bucket, GatherPlan, Limits, ReducePlan
from jaxzero._transports.alive import Alive, gathering_in_turns, reducing_in_turns
from jaxzero._transports.names import PREFIX, bucket_name
from jaxzero._transports.transport import Arrays, Reduced


class Xla:
    """Transport "xla"; its methods are described in `Transport`."""

    name = "xla"
    on_gpu = False
    splits_calls = False
    limits = Limits(bucket_bytes=64 << 20, direct_bytes=256 << 10, widens_bfloat16=True)

    def reduce_scatter(
        self,
        plan: ReducePlan,
        axis: Axis,
        leaves: Arrays,
        into: Arrays | None,
        with_stats: bool,
    ) -> Reduced:
        shards = _Partial(into)
        stats: list[jax.Array] = []
        for number, bucket in enumerate(plan.buckets):
            with jax.named_scope(PREFIX + bucket_name(number, bucket)):
                send, dim = _rows_to_send(plan, axis, bucket, leaves, stats)
                rows, num_rows = _reduced_rows(axis, bucket, send, dim)
                stats.append(
                    _unpack(plan, axis, bucket, rows, num_rows, shards, with_stats)
                )
        return Reduced(
            [
                shards.finish(i, leaf.cut.shard_shape, leaf.shard_dtype)
                for i, leaf in enumerate(plan.leaves)
            ],
            stats if with_stats else [],
        )

    def all_gather(
        self, plan: GatherPlan, axis: Axis, shards: Arrays
    ) -> list[jax.Array]:
        leaves = _Partial(None)
        token: list[jax.Array] = []
        for number, bucket in enumerate(plan.buckets):
            with jax.named_scope(PREFIX + bucket_name(number, bucket)):
                if bucket.kind == "packed":
                    done = _gather_packed(plan, axis, bucket, shards, leaves, token)
                    token.append(done)
                else:
                    i = bucket.slots[0].leaf
                    leaves.done[i] = _gather_direct(plan, axis, bucket, shards[i])
        return [
            leaves.finish(i, leaf.shape, leaf.dtype)
            for i, leaf in enumerate(plan.leaves)
        ]

    def gathering(self, plan: GatherPlan) -> Iterator[Alive]:
        return gathering_in_turns(plan)

    def reducing(
        self, plan: ReducePlan, *, accumulates: bool, kept: bool
    ) -> Iterator[Alive]:
        return reducing_in_turns(plan, accumulates=accumulates, kept=kept)


@dataclasses.dataclass
class _Partial:
    """Results under construction: a leaf split over buckets is written in turns."""

    into: Arrays | None
    done: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    def bases(self, bucket: Bucket) -> "_Bases":
        """Returns the arrays that the bucket's next write goes into."""
        found = [self._base(slot.leaf) for slot in bucket.slots]
        count = itertools.count()
        return _Bases(
            operands=[base for base in found if base is not None],
            numbers=[-1 if base is None else next(count) for base in found],
        )

    def write(self, bucket: Bucket, results: Arrays) -> None:
        """Takes the results of a call, in slot order."""
        for slot, result in zip(bucket.slots, results, strict=True):
            self.done[slot.leaf] = result

    def _base(self, leaf: int) -> jax.Array | None:
        if leaf in self.done:
            return self.done[leaf]
        return None if self.into is None else self.into[leaf]

    def finish(self, leaf: int, shape: Sequence[int], dtype: str) -> jax.Array:
        """Returns the finished result; an empty leaf was never written."""
        if leaf in self.done:
            return self.done[leaf]
        return jnp.zeros(shape, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bases:
    """Arrays that a call writes into.

    Attributes:
      operands: those that exist, in slot order: operands 1, 2, ... of the call.
      numbers: per slot its position among them, or -1.
    """

    operands: list[jax.Array]
    numbers: list[int]

    @property
    def aliases(self) -> dict[int, int]:
        """The operands that share memory with a result; operand 0 is the rows."""
        return {1 + j: i for i, j in enumerate(self.numbers) if j >= 0}


def _rows_to_send(
    plan: ReducePlan, axis: Axis, bucket: Bucket, leaves: Arrays, earlier: Arrays
) -> tuple[jax.Array, int]:
    """Returns what enters the collective, and the dimension that ranks divide."""
    if bucket.kind == "packed":
        return _pack(plan, axis, bucket, leaves, earlier), 0
    first = bucket.slots[0].leaf
    if bucket.kind == "local":
        return leaves[first], 0
    # Its own shape, so that the received rows are the shard without a copy.
    cut = plan.leaves[first].cut
    return padded(cut, leaves[first]), cut.shard_dim


def _reduced_rows(
    axis: Axis, bucket: Bucket, send: jax.Array, dim: int
) -> tuple[jax.Array, int]:
    """Returns the rows that arrive on this rank, and how many are left to sum."""
    with jax.named_scope("collective"):
        if bucket.collective == "none":
            return send, 1
        if bucket.collective == "all_reduce":
            return lax.psum(send, axis.all_names), 1
        if bucket.recv_rows == 1:
            rows = lax.psum_scatter(send, axis.names, scatter_dimension=dim, tiled=True)
            return (lax.psum(rows, axis.replicate) if axis.replicate else rows), 1
        rows = lax.all_to_all(send, axis.names, dim, dim, tiled=True)
        if not axis.replicate:
            return rows, bucket.recv_rows
        # Replicas add partial sums, which need the wide dtype to stay exact.
        wide = np.promote_types(rows.dtype, np.float32)
        rows = rows.astype(wide).reshape(bucket.recv_rows, -1)
        return lax.psum(jnp.sum(rows, axis=0), axis.replicate), 1


def _pack(
    plan: ReducePlan, axis: Axis, bucket: Bucket, leaves: Arrays, earlier: Arrays
) -> jax.Array:
    """Packs a bucket's leaves, after the last of the `earlier` results."""
    names = frozenset(axis.all_names + bucket.varying)
    operands = [leaves[slot.leaf] for slot in bucket.slots]
    operands += _token(earlier, names)
    shape = (bucket.send_rows, bucket.row_numel)
    with jax.named_scope("pack"):
        (send,) = _ffi.call(
            _ffi.PACK,
            [axis.result(shape, bucket.comm_dtype, names)],
            [axis.lift(value, names) for value in operands],
            slots=_ffi.leaf_slots(bucket, plan.leaves),
            group_size=np.int64(bucket.send_rows),
            pre_scale=np.float64(bucket.pre_scale),
        )
    return send


def _token(earlier: Arrays, names: frozenset[str]) -> list[jax.Array]:
    """Returns the last result to wait for that does not widen the result's type."""
    fitting = [value for value in earlier if varying(value) <= names]
    return fitting[-1:]


def _unpack(
    plan: ReducePlan,
    axis: Axis,
    bucket: Bucket,
    rows: jax.Array,
    num_rows: int,
    shards: _Partial,
    with_stats: bool,
) -> jax.Array:
    """Writes the bucket's shards into `shards`; returns its statistics."""
    specs = [plan.leaves[slot.leaf] for slot in bucket.slots]
    bases = shards.bases(bucket)
    names = axis.shard_axes(bucket.whole, bucket.varying)
    results = [axis.result(s.cut.shard_shape, s.shard_dtype, names) for s in specs]
    with jax.named_scope("unpack"):
        *written, stats = _ffi.call(
            _ffi.UNPACK,
            [*results, axis.result((2,), "float32", names)],
            [axis.lift(value, names) for value in (rows, *bases.operands)],
            aliases={0: 0} if bucket.in_place else bases.aliases,
            slots=_ffi.shard_slots(
                bucket, plan.leaves, bases.numbers, accumulate=shards.into is not None
            ),
            num_rows=np.int64(num_rows),
            divisor=np.float64(plan.divisor * bucket.pre_scale),
            with_stats=np.int64(with_stats),
        )
    shards.write(bucket, written)
    return stats


def _gather_direct(
    plan: GatherPlan, axis: Axis, bucket: Bucket, shard: jax.Array
) -> jax.Array:
    leaf = plan.leaves[bucket.slots[0].leaf]
    shard = shard.astype(leaf.dtype)
    if bucket.collective == "all_gather":
        with jax.named_scope("collective"):
            dim = leaf.cut.shard_dim
            shard = lax.all_gather(shard, axis.names, axis=dim, tiled=True)
    full: jax.Array = trimmed(leaf.cut, shard).reshape(leaf.shape)
    return full


def _gather_packed(
    plan: GatherPlan,
    axis: Axis,
    bucket: Bucket,
    shards: Arrays,
    leaves: _Partial,
    token: Arrays,
) -> jax.Array:
    """Gathers a bucket of shards into `leaves`; returns an ordering token."""
    specs = [plan.leaves[slot.leaf] for slot in bucket.slots]
    names = frozenset(axis.names + bucket.varying)
    operands = [shards[slot.leaf] for slot in bucket.slots] + _token(token, names)
    with jax.named_scope("pack"):
        (row,) = _ffi.call(
            _ffi.PACK,
            [axis.result((1, bucket.row_numel), bucket.comm_dtype, names)],
            [axis.lift(value, names) for value in operands],
            slots=_ffi.shard_slots(bucket, plan.leaves),
            group_size=np.int64(1),
            pre_scale=np.float64(1.0),
        )
    with jax.named_scope("collective"):
        rows = lax.all_gather(row, axis.names, axis=0, tiled=True)
    bases = leaves.bases(bucket)
    with jax.named_scope("unpack"):
        *results, done = _ffi.call(
            _ffi.UNPACK_LEAVES,
            [
                *(axis.result(spec.shape, spec.dtype, names) for spec in specs),
                axis.result((1,), "float32", names),
            ],
            [axis.lift(value, names) for value in (rows, *bases.operands)],
            aliases=bases.aliases,
            slots=_ffi.leaf_slots(bucket, plan.leaves, bases.numbers),
            group_size=np.int64(bucket.send_rows),
        )
    leaves.write(bucket, results)
    return done
