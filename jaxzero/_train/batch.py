"""A batch on the mesh: examples over all devices, the rest everywhere."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._train.options import StepOptions
from jaxzero._train.processes import check_processes_agree
from jaxzero._tree import PyTree, path_name


def batch_spec(options: StepOptions) -> P:
    """Returns the spec of a leaf with examples."""
    return P(options.names + options.replicate)


def batch_specs(batch: PyTree, options: StepOptions) -> PyTree:
    """Returns the spec of each leaf."""
    return jax.tree.map(
        lambda leaf: batch_spec(options) if jnp.ndim(leaf) else P(), batch
    )


def batch_shardings(batch: PyTree, options: StepOptions, mesh: Mesh) -> PyTree:
    """Returns the sharding of each leaf.

    Raises:
      ValueError: naming a leaf that cannot be split over devices and microbatches.
    """
    parts = options.devices * options.accumulate

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        shape = jnp.shape(leaf)
        if not shape:
            return NamedSharding(mesh, P())
        if shape[0] % parts or not shape[0]:
            is_raw_key = shape[-1] in (2, 4) and leaf.dtype == jnp.uint32
            raise ValueError(
                f"zero3: batch leaf {path_name(path)} has shape {shape}; expected a "
                f"first dimension that divides by {parts} ({options.devices} devices x "
                f"{options.accumulate} microbatches). Give all examples along "
                f"dimension 0."
                + " A random key must come from jax.random.key."
                * is_raw_key
            )
        return NamedSharding(mesh, batch_spec(options))

    return jax.tree_util.tree_map_with_path(sharding, batch)


class Batches:
    """The batches of a run, as its processes give them."""

    def __init__(self, mesh: Mesh, options: StepOptions) -> None:
        self._mesh = mesh
        self._options = options
        self._compared = False

    def place(self, batch: PyTree) -> PyTree:
        """Returns a batch as global arrays.

        Processes send each other nothing but, once, a digest of what they gave.

        Raises:
          ValueError: for a batch that cannot be split over devices and microbatches,
            or a first one that differs between processes.
        """
        if not self._compared:
            _check_agrees(batch)
            self._compared = True
        shardings = batch_shardings(batch, self._options, self._mesh)
        return jax.tree.map(_place, batch, shardings)


def _check_agrees(batch: PyTree) -> None:
    # Each process takes what its own devices need of what it has, so batches that
    # differ would be trained on in part, without a word.
    if jax.process_count() > 1:
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        check_processes_agree(
            "zero3",
            [(path_name(path), *_content(leaf)) for path, leaf in leaves],
            what="another batch",
            fix=(
                "Give all examples on every process, or give global arrays, made from "
                "what each process has read: jax.make_array_from_process_local_data("
                "zero.batch_sharding, local)."
            ),
        )


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable or _is_global(leaf):
        placed: jax.Array = jax.device_put(leaf, sharding)
        return placed
    # `device_put` would send all of it to all processes, in every step, to compare.
    if _is_key(leaf):
        data = _place(jax.random.key_data(leaf), sharding)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return keys
    host = _on_host(leaf)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def _content(leaf: Any) -> tuple[Any, ...]:
    """Returns shape, dtype and a digest of what is in a leaf, if this process knows."""
    described = (jnp.shape(leaf), str(jnp.result_type(leaf)))
    if _is_global(leaf):
        return described
    host = _on_host(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return (*described, hashlib.sha256(host.tobytes()).hexdigest()[:16])


def _on_host(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    # As JAX takes it: 64-bit numbers only in 64-bit mode.
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
