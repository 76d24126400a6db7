"""The native calls on NumPy arrays, and what they must return, in float64 NumPy."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxzero import _cpu, _ffi

_ffi.register()

Array = npt.NDArray[np.generic]

FORMAT = np.int64(_cpu.format)
REAL = ("float32", "bfloat16", "float16", "float64")
ANY = (*REAL, "complex64", "complex128")

_PRECISION_AND_LAST_EXPONENT = {
    "bfloat16": (8, -133),
    "float16": (11, -24),
    "float32": (24, -149),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """A row of the slot table; the shard's components unless `count` says less."""

    outer: int = 1
    length: int = 1
    inner: int = 1
    chunk: int = 1
    begin: int = 0
    count: int = -1
    row_offset: int = 0
    operand: int = 0
    base: int = -1
    accumulate: int = 0

    @property
    def shard_numel(self) -> int:
        return self.outer * self.chunk * self.inner

    @property
    def leaf_numel(self) -> int:
        return self.outer * self.length * self.inner

    @property
    def numel(self) -> int:
        return self.shard_numel - self.begin if self.count < 0 else self.count

    @property
    def columns(self) -> slice:
        return slice(self.row_offset, self.row_offset + self.numel)

    @property
    def carried(self) -> slice:
        return slice(self.begin, self.begin + self.numel)

    def as_shard(self) -> "Slot":
        """The same place in the row, for unpack, whose operand is the shard."""
        numel = self.shard_numel
        return dataclasses.replace(self, outer=1, length=numel, inner=1, chunk=numel)


def table(slots: Sequence[Slot]) -> npt.NDArray[np.int64]:
    """The slots as the attribute that handlers read."""
    rows = [dataclasses.asdict(slot) | {"count": slot.numel} for slot in slots]
    columns = _cpu.slot_columns()
    return np.array([[row[c] for c in columns] for row in rows], np.int64).reshape(-1)


def row_end(slots: Sequence[Slot]) -> int:
    return max(slot.columns.stop for slot in slots)


# Values


def numbers(seed: int, numel: int, dtype: str) -> Array:
    """Components in mixed magnitudes, rounded to the dtype, as an array of it."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(numel) * 2.0 ** rng.integers(-6, 7, numel)
    return from_components(nearest(values, component(dtype)), dtype)


def component(dtype: str) -> str:
    """The dtype of an array's components."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def components(array: Array) -> npt.NDArray[np.float64]:
    """An array's components in float64."""
    real = np.dtype(component(array.dtype.name))
    return wide(np.ascontiguousarray(array).reshape(-1).view(real))


def wide(values: Array) -> npt.NDArray[np.float64]:
    """The same values in float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)


def from_components(values: npt.ArrayLike, dtype: str) -> Array:
    """An array whose components are the given float64 values."""
    with np.errstate(over="ignore"):
        real = np.asarray(values, np.float64).astype(np.dtype(component(dtype)))
    return real.view(np.dtype(dtype))


def nearest(values: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.float64]:
    """Rounds float64 values once, to the nearest even value of a dtype."""
    if dtype == "float64":
        return values
    precision, last = _PRECISION_AND_LAST_EXPONENT[dtype]
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaNs
        _, exponent = np.frexp(values)
        unit = np.maximum(exponent - precision, last)
        rounded = np.ldexp(np.rint(np.ldexp(values, -unit)), unit)
    limit = float(ml_dtypes.finfo(np.dtype(dtype)).max)
    beyond = np.isfinite(values) & (np.abs(rounded) > limit)
    return np.where(beyond, np.copysign(np.inf, values), rounded)


def assert_same(actual: Array, expected: npt.NDArray[np.float64]) -> None:
    """Compares components bit for bit, except that all NaNs are alike."""
    found = components(actual)
    expected = expected.reshape(-1)
    np.testing.assert_array_equal(found, expected)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(expected[known]))


# Calls


def call(
    target: str,
    results: Sequence[tuple[tuple[int, ...], str]],
    operands: Sequence[Array],
    aliases: dict[int, int] | None = None,
    **attributes: object,
) -> list[Array]:
    """Emits one custom call and waits for its results."""
    emit = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in results],
        input_output_aliases=aliases,
    )
    values = emit(*map(jnp.asarray, operands), **{"format": FORMAT, **attributes})
    return [np.asarray(value) for value in values]


def array_shape(numel: int, dtype: str) -> tuple[int, ...]:
    """The shape of an array of `numel` components."""
    return (numel // 2 if dtype.startswith("complex") else numel,)


def base_aliases(slots: Sequence[Slot]) -> dict[int, int]:
    """Every base shares memory with its result; operand 0 is not a base."""
    return {1 + slot.base: i for i, slot in enumerate(slots) if slot.base >= 0}


def pack(
    slots: Sequence[Slot],
    leaves: Sequence[Array],
    dtype: str,
    group_size: int,
    row_numel: int | None = None,
    pre_scale: float = 1.0,
) -> Array:
    """Calls jaxzero_pack on a bucket full of NaN."""
    shape = (group_size, row_end(slots) if row_numel is None else row_numel)
    poison = np.full(shape, np.nan, np.dtype(dtype))
    (bucket,) = call(
        "jaxzero_pack",
        [(shape, dtype)],
        [*leaves, poison],
        {len(leaves): 0},
        slots=table(slots),
        group_size=np.int64(group_size),
        pre_scale=np.float64(pre_scale),
    )
    return bucket


def unpack(
    slots: Sequence[Slot],
    rows: Array,
    dtypes: Sequence[str],
    bases: Sequence[Array] = (),
    *,
    num_rows: int = 1,
    divisor: float = 1.0,
    with_stats: bool = False,
    aliases: dict[int, int] | None = None,
) -> tuple[list[Array], Array]:
    """Calls jaxzero_unpack; returns the shards and the statistics."""
    shapes = [array_shape(s.shard_numel, d) for s, d in zip(slots, dtypes, strict=True)]
    *shards, stats = call(
        "jaxzero_unpack",
        [*zip(shapes, dtypes, strict=True), ((2,), "float32")],
        [rows, *bases],
        base_aliases(slots) if aliases is None else aliases,
        slots=table(slots),
        num_rows=np.int64(num_rows),
        divisor=np.float64(divisor),
        with_stats=np.int64(with_stats),
    )
    return shards, stats


def unpack_leaves(
    slots: Sequence[Slot],
    bucket: Array,
    dtypes: Sequence[str],
    bases: Sequence[Array] = (),
) -> tuple[list[Array], Array]:
    """Calls jaxzero_unpack_leaves; returns the leaves and the token."""
    shapes = [array_shape(s.leaf_numel, d) for s, d in zip(slots, dtypes, strict=True)]
    *leaves, done = call(
        "jaxzero_unpack_leaves",
        [*zip(shapes, dtypes, strict=True), ((1,), "float32")],
        [bucket, *bases],
        base_aliases(slots),
        slots=table(slots),
        group_size=np.int64(bucket.shape[0]),
    )
    return leaves, done


# Answers


def packed(
    slots: Sequence[Slot], leaves: Sequence[Array], group_size: int, row_numel: int
) -> npt.NDArray[np.float64]:
    """The bucket, unrounded."""
    bucket = np.zeros((group_size, row_numel))
    for slot in slots:
        leaf = components(leaves[slot.operand])
        blocks = leaf.reshape(slot.outer, slot.length, slot.inner)
        padded = np.zeros((slot.outer, slot.chunk * group_size, slot.inner))
        padded[:, : slot.length] = blocks
        for rank in range(group_size):
            own = padded[:, rank * slot.chunk : (rank + 1) * slot.chunk]
            bucket[rank, slot.columns] = own.reshape(-1)[slot.carried]
    return bucket


# Geometries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Leaves over one group."""

    group_size: int
    row_numel: int
    slots: tuple[Slot, ...]


CASES = {
    "one_rank": Case(group_size=1, row_numel=7, slots=(Slot(length=7, chunk=7),)),
    "flat": Case(
        group_size=4,
        row_numel=36,
        slots=(
            Slot(operand=0, length=5, chunk=2),
            Slot(operand=1, length=3, chunk=1, row_offset=4),
            Slot(operand=2, length=73, chunk=19, row_offset=8),
            Slot(operand=3, length=1, chunk=1, row_offset=32),
        ),
    ),
    "dim": Case(
        group_size=3,
        row_numel=96,
        slots=(
            # Uneven, the last rank owns one of two; and more ranks than length.
            Slot(operand=0, outer=5, length=5, inner=3, chunk=2),
            Slot(operand=1, outer=4, length=2, inner=2, chunk=1, row_offset=32),
            # Even, and uneven with runs of one component.
            Slot(operand=2, outer=2, length=6, inner=4, chunk=2, row_offset=48),
            Slot(operand=3, outer=7, length=7, inner=1, chunk=3, row_offset=64),
        ),
    ),
    "split": Case(
        group_size=4,
        row_numel=48,
        slots=(
            # Column ranges that begin and end inside blocks and in the padding.
            Slot(operand=0, outer=3, length=6, inner=4, chunk=2, begin=5, count=11),
            Slot(operand=1, length=30, chunk=8, begin=3, count=5, row_offset=16),
            Slot(
                operand=2, outer=4, length=5, chunk=2, begin=7, count=1, row_offset=32
            ),
        ),
    ),
    "whole": Case(
        group_size=1,
        row_numel=28,
        slots=(
            Slot(operand=0, length=12, chunk=12),
            Slot(operand=1, outer=3, length=4, chunk=4, begin=2, row_offset=16),
        ),
    ),
    "empty_slots": Case(
        group_size=2,
        row_numel=8,
        slots=(
            Slot(operand=0, length=0, chunk=0),
            Slot(operand=1, length=7, chunk=4),
            Slot(operand=2, length=8, chunk=4, begin=4, row_offset=4),
        ),
    ),
    # Several chunks of work, with leaves across their borders.
    "large": Case(
        group_size=3,
        row_numel=200_016,
        slots=(
            Slot(operand=0, length=200_001, chunk=66_667),
            Slot(
                operand=1, outer=300, length=100, inner=9, chunk=34, row_offset=66_672
            ),
            Slot(operand=2, length=10, chunk=4, row_offset=158_480),
        ),
    ),
}
"""Kinds of cuts, each with padding, gaps between slots and a gap at the end."""
