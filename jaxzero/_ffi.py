"""The native modules: registration, the plan as attribute tables, the calls."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxzero._dtypes import components
from jaxzero._plan import Bucket, LeafSpec, Slot

PACK = "jaxzero_pack"
UNPACK = "jaxzero_unpack"
UNPACK_LEAVES = "jaxzero_unpack_leaves"
REDUCE_SCATTER = "jaxzero_reduce_scatter"
ALL_GATHER = "jaxzero_all_gather"
TEMP = "jaxzero_temp"
CUSTOM_CALLS = (PACK, UNPACK, UNPACK_LEAVES, REDUCE_SCATTER, ALL_GATHER, TEMP)
"""Custom calls that a program of ours contains; `jax.export` must be told of them."""


@functools.cache
def _module(name: str) -> Any:
    """Loads a native module and registers its handlers, once per process.

    The handlers keep no state, so this works before and after the backend starts.
    """
    module = importlib.import_module(f"jaxzero.{name}")
    platform = {"_cpu": "cpu", "_cuda": "CUDA"}[name]
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    return module


@functools.cache
def cuda_obstacle() -> str | None:
    """Returns why there is no transport of our own on CUDA; None if there is one."""
    if importlib.util.find_spec("jaxzero._cuda") is None:
        return "this build of jaxzero has no CUDA module (see BUILD.md)"
    plugins = ("xla_cuda13", "xla_cuda12")
    if not any(_is_installed(f"jax_plugins.{plugin}") for plugin in plugins):
        return "JAX's CUDA plugin is not installed (pip install 'jax[cuda13]')"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def cuda_module() -> Any:
    """Returns the CUDA module, its handlers registered."""
    return _module("_cuda")


def register() -> None:
    """Registers jaxzero's custom calls with JAX.

    Only for a process that runs an exported or serialised program without tracing one:
    every other use of jaxzero does so by itself. It may be called again, before and
    after JAX's backend starts.

    Raises:
      ImportError: if jaxzero's native module was not built.

    Example:
      >>> import jaxzero
      >>> jaxzero.register()
    """
    _module("_cpu")
    if cuda_obstacle() is None:
        _module("_cuda")


def _format() -> np.int64:
    """Returns the number that programs carry, for another version to refuse them."""
    return np.int64(_module("_cpu").format)


def slot_table(rows: Sequence[dict[str, int]]) -> np.ndarray:
    """Returns slots as the int64 table that handlers read.

    C++ owns the order of the columns, so the two sides cannot drift.
    """
    columns = _module("_cpu").slot_columns()
    return np.array([[row[c] for c in columns] for row in rows], np.int64).reshape(-1)


def leaf_row(
    leaf: LeafSpec, slot: Slot, operand: int, base: int = -1
) -> dict[str, int]:
    """Returns a row of a slot table whose operands are leaves."""
    return {
        "operand": operand,
        "outer": leaf.cut.outer,
        "length": leaf.cut.length,
        "inner": leaf.cut.inner * components(leaf.dtype),
        "chunk": leaf.cut.chunk,
        "begin": slot.begin,
        "count": slot.count,
        "row_offset": slot.row_offset,
        "base": base,
        "accumulate": 0,
    }


def leaf_slots(
    bucket: Bucket, leaves: Sequence[LeafSpec], bases: Sequence[int] | None = None
) -> np.ndarray:
    """Returns the table of a bucket whose operands are its leaves, in slot order."""
    return slot_table(
        [
            leaf_row(leaves[slot.leaf], slot, i, bases[i] if bases else -1)
            for i, slot in enumerate(bucket.slots)
        ]
    )


def shard_slots(
    bucket: Bucket,
    leaves: Sequence[LeafSpec],
    bases: Sequence[int] | None = None,
    *,
    accumulate: bool = False,
) -> np.ndarray:
    """Returns the table of a bucket whose operands are its shards, in slot order."""
    rows = []
    for i, slot in enumerate(bucket.slots):
        leaf = leaves[slot.leaf]
        numel = leaf.shard_components
        # A shard is a leaf that one rank owns all of.
        rows.append(
            leaf_row(leaf, slot, i, bases[i] if bases else -1)
            | {"outer": 1, "length": numel, "inner": 1, "chunk": numel}
            | {"accumulate": int(accumulate)}
        )
    return slot_table(rows)


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    *,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> list[jax.Array]:
    """Emits one custom call.

    It has no side effect: identical calls may be merged and unused ones dropped, on
    all ranks alike. Under `vmap` it runs once per batch element.
    """
    register()
    emit: Callable[..., Any] = jax.ffi.ffi_call(
        target,
        list(results),
        has_side_effect=False,
        vmap_method="sequential",
        input_output_aliases=aliases or {},
    )
    return list(emit(*operands, format=_format(), **attributes))
