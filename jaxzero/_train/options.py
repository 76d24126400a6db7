"""What a ZeRO-3 training step was asked for."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

from jax.sharding import Mesh

from jaxzero._axis import AxisName
from jaxzero._make_layout import Globs
from jaxzero._norms.clip import checked_limit
from jaxzero._norms.loss_scale import LossScale
from jaxzero._numbers import whole_number
from jaxzero._policy import Policy
from jaxzero._train.batch_dims import BatchDims
from jaxzero._tree import PyTree

Sync = Literal["each", "replicas_last", "last"]
LossFn = Callable[[PyTree, PyTree], Any]


class Optimizer(Protocol):
    """What is asked of an optimizer: `optax.GradientTransformation` has it."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What `zero3` was asked for; see there."""

    loss_fn: LossFn
    optimizer: Optimizer
    names: tuple[str, ...]
    replicate: tuple[str, ...]
    devices: int
    policy: Policy
    accumulate: int
    sync: Sync
    clip_norm: float | None
    loss_scale: LossScale | None
    skip_nonfinite: bool
    has_aux: bool
    batch_dims: BatchDims

    @property
    def replicate_axis(self) -> AxisName | None:
        """Replicate axes as the public functions take them."""
        return self.replicate or None

    @property
    def comparable(self) -> tuple[Any, ...]:
        """What processes can compare of it: all but functions."""
        return tuple(
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("loss_fn", "optimizer", "batch_dims")
        )

    @property
    def divisor(self) -> float:
        """What the sum over devices and microbatches is divided by."""
        return self.policy.divisor(self.devices * self.accumulate)


def check_mesh(mesh: Mesh, names: tuple[str, ...], replicate: tuple[str, ...]) -> None:
    for name in names + replicate:
        if name not in mesh.axis_names:
            raise ValueError(
                f"zero3: axis {name!r} is not in the mesh; expected one of its axes "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
    left = [
        name
        for name in mesh.axis_names
        if name not in names + replicate and mesh.shape[name] > 1
    ]
    if left:
        raise ValueError(
            f"zero3: the mesh also has the axes {', '.join(map(repr, left))}; expected "
            f"every axis of size above 1 in axis_name or replicate_axis. Name them "
            f"there, or for tensor parallelism write the step with shard_grads and "
            f"gather_params."
        )


def check_choices(
    call: str, accumulate: Any, sync: Any, layers: Globs, stacked: Globs, missing: str
) -> None:
    """Refuses options that are out of range or at odds.

    Args:
      call: name of the public function, for messages.
      accumulate: as for `zero3`.
      sync: as for `zero3`.
      layers: as for `zero3`.
      stacked: as for `zero3`.
      missing: the argument that names replicas, if there are none.
    """
    if whole_number(f"{call}: accumulate", accumulate) < 1:
        raise ValueError(f"{call}: accumulate={accumulate}; expected at least 1.")
    if sync not in get_args(Sync):
        raise ValueError(
            f"{call}: sync={sync!r}; expected one of "
            f"{', '.join(map(repr, get_args(Sync)))}."
        )
    if sync == "replicas_last" and missing:
        raise ValueError(
            f"{call}: sync='replicas_last' needs {missing}; without replicas use "
            f"sync='each'."
        )
    if sync == "last" and (layers or stacked):
        raise ValueError(
            f"{call}: sync='last' keeps full gradients of all parameters, but layers "
            f"or stacked reduce them layer by layer; expected one of the two. Use "
            f"sync='each', or name no layers."
        )


def checked_clip(clip_norm: Any) -> float | None:
    if clip_norm is None:
        return None
    fix = "None leaves gradients as they are."
    return checked_limit("zero3: clip_norm", clip_norm, fix)
