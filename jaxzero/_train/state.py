"""What a ZeRO-3 training run keeps from step to step, and reports of each."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jaxzero._layout import Layout
from jaxzero._norms.loss_scale import LossScaleState
from jaxzero._tree import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """State of `zero3`: a pytree of global arrays that are shards on each device.

    Attributes:
      step: optimizer steps taken, int32 scalar.
      params: parameters, in the structure of the user's and the layout of
        `shard_params`.
      opt_state: the optimizer's state, its moments in the same layout.
      loss_scale: state of the loss scale, or None.
      layout: how true shapes became shards; static, so a part of the tree's structure.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    loss_scale: LossScaleState | None
    layout: Layout = dataclasses.field(metadata={"static": True})


class Metrics(NamedTuple):
    """What a step of `zero3` reports; equal on every device.

    Attributes:
      loss: the loss whose gradient was taken: mean (or sum, or sum over `divide_by`,
        as the policy says) over devices and microbatches; float32.
      grad_norm: L2 norm of its gradient before clipping; float32.
      skipped: whether the gradient was not finite and the step left parameters and
        optimizer as they were; bool.
      loss_scale: scale that this step used; float32, or None without a loss scale.
      aux: the loss function's auxiliary results, each reduced as the loss is; float32.
        None without `has_aux`.
    """

    loss: jax.Array
    grad_norm: jax.Array
    skipped: jax.Array
    loss_scale: jax.Array | None
    aux: Any
