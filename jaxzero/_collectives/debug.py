"""JAXZERO_DEBUG=1: which rank brings NaNs and infinities into a sum, and where.

After a sum all ranks have them. The variable is read while JAX traces, so that a
program traced without it holds nothing of this. What is found is only logged: a rank
that raised would leave the others waiting in the next collective.
"""

import functools
import logging
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxzero._axis import Axis, varying

VARIABLE = "JAXZERO_DEBUG"

_LOGGER = logging.getLogger("jaxzero")


def is_on() -> bool:
    """Says whether the variable asks for checks.

    Raises:
      ValueError: for a value without a meaning.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}; expected 1, or 0 or nothing for off.")
    return value == "1"


def log_nonfinite(axis: Axis, paths: Sequence[str], leaves: Sequence[object]) -> None:
    """Makes every rank log its leaves that are not finite, if the variable is 1.

    Args:
      axis: axis of the call.
      paths: key path of each leaf.
      leaves: what this rank brings into the sum.
    """
    if not is_on():
        return
    if not _has_cpu_device():
        _LOGGER.warning(
            "%s=1 cannot check gradients: JAX needs a CPU device to call back to "
            "Python. Add cpu to JAX_PLATFORMS, as in JAX_PLATFORMS=cuda,cpu.",
            VARIABLE,
        )
        return
    checked = [
        (path, array)
        for path, array in zip(paths, map(jnp.asarray, leaves), strict=True)
        if array.size and jnp.issubdtype(array.dtype, jnp.inexact)
    ]
    if not checked:
        return
    sizes = [(f"{path} ({array.dtype})", array.size) for path, array in checked]
    # Not behind a condition on the device, which vmap could not batch.
    jax.debug.callback(
        functools.partial(_log, axis, sizes),
        _counts(axis, [array for _, array in checked]),
        axis.rank(),
        lax.axis_index(axis.replicate) if axis.replicate else None,
    )


def _has_cpu_device() -> bool:
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return False


def _counts(axis: Axis, arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns how many elements of each array are not finite, as one array.

    One, because JAX copies each argument of a callback by itself.
    """
    counts = [jnp.sum(~jnp.isfinite(a), dtype=jnp.uint32) for a in arrays]
    names = frozenset[str]().union(*map(varying, counts))
    return jnp.stack([axis.lift(count, names) for count in counts])


def _log(
    axis: Axis,
    sizes: Sequence[tuple[str, int]],
    counts: jax.Array,
    rank: jax.Array,
    replica: jax.Array | None,
) -> None:
    found = [
        f"{leaf}: {count} of {size}"
        for (leaf, size), count in zip(sizes, np.asarray(counts), strict=True)
        if count
    ]
    if not found:
        return
    where = f"rank {rank} of {axis.group_size} along {_text(axis.names)}"
    if replica is not None:
        where += f", {replica} of {axis.replicas} along {_text(axis.replicate)}"
    _LOGGER.error("not finite before the sum on %s: %s", where, "; ".join(found))


def _text(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
