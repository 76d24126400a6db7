"""A batch on the mesh: examples over all devices, the rest everywhere."""

import dataclasses
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
        f"dimension that batch_dims says; evaluate takes any number with uneven=True, "
        f"if loss and aux are plain means over examples.{key_hint(leaf)}"
    )


def abstract_batch(batch: PyTree, options: StepOptions, mesh: Mesh) -> PyTree:
    """Returns shapes, dtypes and shardings of a batch.

    Raises:
      ValueError: as `check_batch`.
    """
    check_batch(batch, options)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding
        ),
        batch,
        batch_shardings(batch, options, mesh),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a batch to evaluate.

    Attributes:
      batch: its examples, as global arrays.
      accumulate: microbatches that it is split into on each device.
      spread: whether devices have different examples of it.
      share: what its mean counts in that of the batch.
    """

    batch: PyTree
    accumulate: int
    spread: bool
    share: float


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

    def place_even(self, batch: PyTree) -> list[Part]:
        """Returns a batch as the only part; raises as `place`."""
        return [
            Part(
                batch=self.place(batch),
                accumulate=self._options.accumulate,
                spread=True,
                share=1.0,
            )
        ]

    def place_uneven(self, batch: PyTree) -> list[Part]:
        """Returns a batch of any number of examples as parts of which none is padded.

        No part has more examples at a time on a device than an even split would give.

        Raises:
          ValueError: for a batch without examples, one of arrays that processes built
            together, or a policy other than a mean.
        """
        options, dims = self._options, dims_of(batch, self._options.batch_dims)
        _check_uneven(batch, options)
        # Before what one process may refuse alone: the others wait for its digest.
        _check_agrees(batch, options)
        count = count_examples(batch, dims)
        if count is None:
            return self.place_even(batch)
        if not count:
            raise ValueError(
                "zero3: evaluate got a batch of 0 examples, which have no mean; "
                "expected at least 1. Leave this batch out."
            )
        devices = options.devices
        size = -(-count // (devices * options.accumulate))
        turns = count // (devices * size)
        each = (count - turns * devices * size) // devices
        ends = [turns * devices * size, (turns * size + each) * devices, count]
        parts = []
        for begin, end, accumulate, spread in zip(
            [0, *ends],
            ends,
            [turns, 1, count - ends[1]],
            [True, True, False],
            strict=False,
        ):
            if begin == end:
                continue
            part = _examples(batch, dims, begin, end)
            shardings = (
                batch_shardings(part, options, self._mesh)
                if spread
                else jax.tree.map(lambda _: NamedSharding(self._mesh, P()), part)
            )
            parts.append(
                Part(
                    batch=jax.tree.map(_place, part, shardings),
                    accumulate=accumulate,
                    spread=spread,
                    share=(end - begin) / count,
                )
            )
        return parts


def _check_uneven(batch: PyTree, options: StepOptions) -> None:
    policy = options.policy
    if policy.op != "mean" or policy.divide_by is not None:
        raise ValueError(
            f"zero3: evaluate with uneven=True weighs means of parts, but the policy "
            f"has op={policy.op!r} and divide_by={policy.divide_by}; expected "
            f"op='mean' alone. Fill the batch up with examples that weigh 0 in its sum."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if _is_global(leaf):
            raise ValueError(
                f"zero3: evaluate with uneven=True got batch leaf {path_name(path)} as "
                f"an array over several processes; expected the same examples on every "
                f"process, as NumPy arrays. Give those, or an even batch."
            )


def _examples(
    batch: PyTree, dims: tuple[int | None, ...], begin: int, end: int
) -> PyTree:
    """Returns a range of the examples of a batch."""
    leaves, structure = jax.tree.flatten(batch)
    return jax.tree.unflatten(
        structure,
        [
            leaf if dim is None else leaf[(slice(None),) * dim + (slice(begin, end),)]
            for leaf, dim in zip(leaves, dims, strict=True)
        ],
    )


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
