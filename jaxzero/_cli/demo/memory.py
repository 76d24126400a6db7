"""Bytes that each part of the training state occupies on a device."""

import collections
import dataclasses
from typing import Any

import jax
import optax

import jaxzero
from jaxzero._cli.demo.model import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one device."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.params + self.grads + self.optimizer


def measured_bytes(state: jaxzero.TrainState) -> StateBytes:
    """Reads off the arrays' own shards what the fullest device holds.

    Gradients live inside a step only, in shards like those of the parameters.
    """
    params_bytes = _fullest_device_bytes(state.params)
    return StateBytes(
        params=params_bytes,
        grads=params_bytes,
        optimizer=_fullest_device_bytes(state.opt_state),
    )


def unsharded_bytes(
    params: Params, optimizer: optax.GradientTransformation
) -> StateBytes:
    """Computes from shapes what a device holds when nothing is sharded."""
    params_bytes = _shape_bytes(params)
    return StateBytes(
        params=params_bytes,
        grads=params_bytes,
        optimizer=_shape_bytes(jax.eval_shape(optimizer.init, params)),
    )


def memory_table(sharded: StateBytes, unsharded: StateBytes, temp_bytes: int) -> str:
    """Lays out both side by side, with what a step needs on top."""
    rows = [
        ("parameters", sharded.params, unsharded.params),
        ("gradients", sharded.grads, unsharded.grads),
        ("Adam state", sharded.optimizer, unsharded.optimizer),
        ("total", sharded.total, unsharded.total),
    ]
    lines = [f"{'bytes per device':<22}{'sharded':>14}{'unsharded':>14}{'share':>9}"]
    lines += [
        f"{name:<22}{ours:>14,}{full:>14,}{ours / full:>9.1%}"
        for name, ours, full in rows
    ]
    lines.append(
        "The sharded column is measured on the fullest device; gradients are sharded"
        f"\nlike parameters. A step needs {temp_bytes:,} temporary bytes per device:"
        "\ngradients, gathered parameters, activations."
    )
    return "\n".join(lines)


def _fullest_device_bytes(tree: Any) -> int:
    bytes_on: collections.Counter[jax.Device] = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            bytes_on[shard.device] += shard.data.nbytes
    return max(bytes_on.values(), default=0)


def _shape_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
