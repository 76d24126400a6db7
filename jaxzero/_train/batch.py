"""A batch on the mesh: examples over all devices, the rest everywhere."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._train.batch_dims import count_examples, dims_of, key_hint
from jaxzero._train.options import StepOptions
from jaxzero._train.processes import check_processes_agree
from jaxzero._tree import PyTree, path_name


def batch_spec(options: StepOptions, dim: int | None) -> P:
    """Returns the spec of a leaf with examples along a dimension, or without."""
    if dim is None:
        return P()
    return P(*[None] * dim, options.names + options.replicate)


def batch_specs(batch: PyTree, options: StepOptions) -> PyTree:
    """Returns the spec of each leaf."""
    return jax.tree.unflatten(
        jax.tree.structure(batch),
        [batch_spec(options, dim) for dim in dims_of(batch, options.batch_dims)],
    )


def batch_shardings(batch: PyTree, options: StepOptions, mesh: Mesh) -> PyTree:
    """Returns the sharding of each leaf."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), batch_specs(batch, options)
    )


def check_batch(batch: PyTree, options: StepOptions) -> None:
    """Refuses a batch that cannot be split over devices and microbatches.

    Raises:
      ValueError: naming a leaf.
    """
    dims = dims_of(batch, options.batch_dims)
    count = count_examples(batch, dims)
    parts = options.devices * options.accumulate
    if count is None or (count and count % parts == 0):
        return
    path, leaf, dim = next(
        (path_name(path), leaf, dim)
        for (path, leaf), dim in zip(
            jax.tree_util.tree_leaves_with_path(batch), dims, strict=True
        )
        if dim is not None
    )
    raise ValueError(
        f"zero3: batch leaf {path} has shape {jnp.shape(leaf)}; expected a number of "
        f"examples along dimension {dim} that divides by {parts} ({options.devices} "
        f"devices x {options.accumulate} microbatches). Give all examples, along the "
        f"dimension that batch_dims says.{key_hint(leaf)}"
    )


def abstract_batch(batch: PyTree, options: StepOptions, mesh: Mesh) -> PyTree:
    """Returns shapes, dtypes and shardings of a batch.

    Raises:
      ValueError: as `check_batch`.
    """
    check_batch(batch, options)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        batch,
        batch_shardings(batch, options, mesh),
    )


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
            _check_agrees(batch, self._options)
            self._compared = True
        check_batch(batch, self._options)
        shardings = batch_shardings(batch, self._options, self._mesh)
        return jax.tree.map(_place, batch, shardings)


def _check_agrees(batch: PyTree, options: StepOptions) -> None:
    # Each process takes what its own devices need of what it has, so batches that
    # differ would be trained on in part, without a word.
    if jax.process_count() > 1:
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        dims = dims_of(batch, options.batch_dims)
        check_processes_agree(
            "zero3",
            [
                (path_name(path), dim, *_content(leaf))
                for (path, leaf), dim in zip(leaves, dims, strict=True)
            ],
            what="another batch",
            fix=(
                "Give all examples on every process, or give global arrays, made from "
                "what each process has read: jax.tree.map("
                "jax.make_array_from_process_local_data, "
                "zero.batch_shardings(local), local)."
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
