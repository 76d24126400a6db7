"""Transport "nccl": the whole plan in one custom call, through XLA's communicator.

The call takes all leaves and returns all shards. Its temporary memory is an operand
that no other call uses (`_temp` says how), so that XLA sees it. XLA runs the call on
the stream of its own collectives: two collectives of different communicators in flight
may deadlock.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxzero import _ffi
from jaxzero._axis import Axis
from jaxzero._plan import (
    Bucket,
    GatherPlan,
    LeafSpec,
    Limits,
    Move,
    Plan,
    ReducePlan,
)
from jaxzero._transports.alive import Alive, gathering_at_once, reducing_at_once
from jaxzero._transports.names import PREFIX, bucket_name, call_name
from jaxzero._transports.transport import Arrays, Reduced

_ON_COLLECTIVE_STREAM = {
    "_xla_stream_annotation": "collective",
    # Keeps XLA from taking the call out of its asynchronous region again.
    "inlineable": "false",
    # JAX 0.11's scheduler leaves loop bodies alone that hold no collective it knows;
    # the hint is one that it looks for.
    "scheduler_hint": "force_delay",
}


class Nccl:
    """Transport "nccl"; its methods are described in `Transport`."""

    name = "nccl"
    on_gpu = True
    splits_calls = True
    limits = Limits(bucket_bytes=256 << 20, direct_bytes=1 << 40, widens_bfloat16=False)

    def reduce_scatter(
        self,
        plan: ReducePlan,
        axis: Axis,
        leaves: Arrays,
        into: Arrays | None,
        with_stats: bool,
    ) -> Reduced:
        sent = _sent(plan.buckets)
        if not sent:
            return Reduced([_empty_shard(spec) for spec in plan.leaves], [])
        return _reduce(plan, axis, sent, leaves, into, with_stats)

    def all_gather(
        self, plan: GatherPlan, axis: Axis, shards: Arrays
    ) -> list[jax.Array]:
        travelling = {
            i: b for i, b in enumerate(plan.buckets) if b.collective != "none"
        }
        sent = _sent(list(travelling.values()))
        gathered = dict(
            zip(sent, _gather(plan, axis, travelling, sent, shards), strict=True)
        )

        def leaf(i: int) -> jax.Array:
            spec = plan.leaves[i]
            match plan.routes[i].move:
                case Move.EMPTY:
                    return jnp.zeros(spec.shape, spec.dtype)
                case Move.OWN:
                    return shards[i].astype(spec.dtype).reshape(spec.shape)
                case _:
                    return gathered[i]

        return [leaf(i) for i in range(len(plan.leaves))]

    def gathering(self, plan: GatherPlan) -> Iterator[Alive]:
        return gathering_at_once(plan)

    def reducing(
        self, plan: ReducePlan, *, accumulates: bool, kept: bool
    ) -> Iterator[Alive]:
        # Arrays of one call all exist before it, kept or not.
        return reducing_at_once(plan, accumulates=accumulates)


def _sent(buckets: Sequence[Bucket]) -> list[int]:
    """Returns the leaves that are operands, in tree order."""
    return sorted({slot.leaf for bucket in buckets for slot in bucket.slots})


def _reduce(
    plan: ReducePlan,
    axis: Axis,
    sent: Sequence[int],
    leaves: Arrays,
    into: Arrays | None,
    with_stats: bool,
) -> Reduced:
    """Reduces the leaves `sent`; others have no elements."""
    tables = _Tables.of(plan, axis, dict(enumerate(plan.buckets)), sent)
    names = _names(plan, axis)
    operands = [leaves[i] for i in sent]
    if into is not None:
        operands += [into[i] for i in sent]
    specs = [plan.leaves[i] for i in sent]
    temp_bytes = _ffi.cuda_module().reduce_temp_bytes(
        *tables.as_bytes(), plan.group_size, plan.replicas, with_stats
    )
    shard_names = [axis.shard_axes(b.whole, b.varying) for b in plan.buckets]
    stats_type = axis.result(
        (len(plan.buckets), 2), "float32", frozenset[str]().union(*shard_names)
    )
    results = _call(
        _ffi.REDUCE_SCATTER,
        call_name("reduce_scatter", plan.buckets),
        [
            *(
                axis.result(
                    spec.cut.shard_shape,
                    spec.shard_dtype,
                    axis.shard_axes(spec.whole, spec.varying),
                )
                for spec in specs
            ),
            *([stats_type] if with_stats else []),
        ],
        [axis.lift(value, names) for value in operands],
        temp=lambda args, digest: _temp(axis, names, temp_bytes, args, digest),
        aliases={} if into is None else {len(sent) + i: i for i in range(len(sent))},
        tables=tables,
        divisor=plan.divisor,
        with_stats=with_stats,
    )
    measured = list(results.pop()) if with_stats else []
    shard_of = dict(zip(sent, results, strict=True))
    return Reduced(
        [
            shard_of[i] if i in shard_of else _empty_shard(spec)
            for i, spec in enumerate(plan.leaves)
        ],
        measured,
    )


def _gather(
    plan: GatherPlan,
    axis: Axis,
    travelling: Mapping[int, Bucket],
    sent: Sequence[int],
    shards: Arrays,
) -> list[jax.Array]:
    """Returns the leaves `sent` from their shards."""
    if not sent:
        return []
    tables = _Tables.of(plan, axis, travelling, sent)
    further = frozenset(name for i in sent for name in plan.leaves[i].varying)
    names = frozenset(axis.names) | further
    temp_bytes = _ffi.cuda_module().gather_temp_bytes(
        *tables.as_bytes(), plan.group_size
    )
    specs = [plan.leaves[i] for i in sent]
    return _call(
        _ffi.ALL_GATHER,
        call_name("all_gather", list(travelling.values())),
        [
            axis.result(spec.shape, spec.dtype, frozenset(axis.names + spec.varying))
            for spec in specs
        ],
        [axis.lift(shards[i], names) for i in sent],
        temp=lambda args, digest: _temp(axis, names, temp_bytes, args, digest),
        aliases={},
        tables=tables,
        divisor=1.0,
        with_stats=False,
    )


def _temp(
    axis: Axis, names: frozenset[str], temp_bytes: int, operands: Arrays, digest: int
) -> jax.Array:
    """Returns memory for one call to work in.

    Not a result of the fused call: an unused result would keep XLA from removing the
    barrier in `_call`. XLA merges equal calls, and must not give one memory to two: so
    this one has the operands of the call that it is for, and a digest of the rest. It
    is equal to another only if those two calls are, which are then merged as well.
    """
    result = axis.result((max(temp_bytes, 1),), "uint8", names)
    return _ffi.call(_ffi.TEMP, [result], operands, digest=np.int64(digest))[0]


def _empty_shard(spec: LeafSpec) -> jax.Array:
    return jnp.zeros(spec.cut.shard_shape, spec.shard_dtype)


def _names(plan: ReducePlan, axis: Axis) -> frozenset[str]:
    """Returns all axes that operands vary over; one call has one type of operand."""
    return frozenset(axis.all_names).union(*(b.varying for b in plan.buckets))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tables:
    """A plan as the attributes that both fused calls share."""

    slots: np.ndarray
    buckets: np.ndarray
    bucket_names: str
    group_size: int
    replicas: int
    shard_groups: np.ndarray
    replicate_groups: np.ndarray
    all_groups: np.ndarray

    @staticmethod
    def of(
        plan: Plan,
        axis: Axis,
        numbered: Mapping[int, Bucket],
        sent: Sequence[int],
    ) -> "_Tables":
        buckets = list(numbered.values())
        operand = {leaf: i for i, leaf in enumerate(sent)}
        used = {bucket.collective for bucket in buckets}
        scatters = not used.isdisjoint({"reduce_scatter", "all_gather"})
        replicas = plan.replicas if isinstance(plan, ReducePlan) else 1

        def groups(names: tuple[str, ...], are_used: bool) -> np.ndarray:
            if not are_used:
                return np.zeros(0, np.int64)
            return axis.replica_groups(names).reshape(-1)

        return _Tables(
            slots=_ffi.slot_table(_slot_rows(plan, buckets, operand)),
            buckets=_bucket_table(buckets),
            bucket_names="".join(f"{bucket_name(*item)};" for item in numbered.items()),
            group_size=plan.group_size,
            replicas=replicas,
            shard_groups=groups(axis.names, scatters),
            replicate_groups=groups(axis.replicate, scatters and replicas > 1),
            all_groups=groups(axis.all_names, "all_reduce" in used),
        )

    def as_bytes(self) -> tuple[bytes, bytes]:
        return self.slots.tobytes(), self.buckets.tobytes()


def _slot_rows(
    plan: Plan, buckets: Sequence[Bucket], operand: dict[int, int]
) -> list[dict[str, int]]:
    """Returns the slots of all buckets; accumulators are found by their leaf."""
    return [
        _ffi.leaf_row(plan.leaves[slot.leaf], slot, operand[slot.leaf])
        for bucket in buckets
        for slot in bucket.slots
    ]


_INVERSE_OF = {"all_gather": "reduce_scatter"} | {
    name: name for name in ("reduce_scatter", "all_reduce", "none")
}
"""What C++ calls a collective: a gather is the inverse of its reduce-scatter."""


def _bucket_table(buckets: Sequence[Bucket]) -> np.ndarray:
    module = _ffi.cuda_module()
    codes = module.bucket_codes()
    columns = module.bucket_columns()
    rows = []
    slot_begin = 0
    for bucket in buckets:
        row = {
            "kind": codes["kind"].index(bucket.kind),
            "collective": codes["collective"].index(_INVERSE_OF[bucket.collective]),
            "comm_dtype": codes["comm_dtype"].index(bucket.comm_dtype),
            "send_rows": bucket.send_rows,
            "recv_rows": bucket.recv_rows,
            "row_numel": bucket.row_numel,
            "slot_begin": slot_begin,
            "slot_count": len(bucket.slots),
            "pre_scale_exponent": int(math.log2(bucket.pre_scale)),
            "lands": int(bucket.in_place),
        }
        slot_begin += len(bucket.slots)
        rows.append([row[column] for column in columns])
    return np.array(rows, np.int64).reshape(-1)


def _call(
    target: str,
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Arrays,
    *,
    temp: Callable[[Arrays, int], jax.Array],
    aliases: dict[int, int],
    tables: _Tables,
    divisor: float,
    with_stats: bool,
) -> list[Any]:
    """Emits a fused call.

    XLA puts the annotation of a call also on the instructions that take its results
    apart, and makes each of them wait for the stream. The barrier takes the results
    apart instead, and has no annotation; XLA removes it in the end. It does so only
    if all of its results are used.
    """
    attributes: dict[str, Any] = {
        "slots": tables.slots,
        "buckets": tables.buckets,
        "bucket_names": tables.bucket_names,
        "group_size": np.int64(tables.group_size),
        "replicas": np.int64(tables.replicas),
        "shard_groups": tables.shard_groups,
        "replicate_groups": tables.replicate_groups,
        "all_groups": tables.all_groups,
        "divisor": np.float64(divisor),
        "with_stats": np.int64(with_stats),
    }
    memory = temp(operands, _digest(target, results, attributes))
    with set_xla_metadata(**_ON_COLLECTIVE_STREAM), jax.named_scope(PREFIX + name):
        emitted = _ffi.call(
            target, results, [*operands, memory], aliases=aliases, **attributes
        )
    return list(lax.optimization_barrier(tuple(emitted)))


def _digest(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    attributes: Mapping[str, Any],
) -> int:
    """Returns a number that tells calls apart, the same in every process."""
    types = [(result.shape, str(result.dtype)) for result in results]
    text = hashlib.sha256(repr((target, types)).encode())
    for name, value in attributes.items():
        data = value.encode() if isinstance(value, str) else value.tobytes()
        text.update(f"{name}:{len(data)}:".encode() + data)
    return int.from_bytes(text.digest()[:8], "little", signed=True)
