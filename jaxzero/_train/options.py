"""What a ZeRO-3 training step was asked for."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

from jax.sharding import Mesh

from jaxzero._axis import AxisName
from jaxzero._norms.loss_scale import LossScale
from jaxzero._policy import Policy
from jaxzero._train.make_layout import Globs
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
            if field.name not in ("loss_fn", "optimizer")
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
    accumulate: Any, sync: Any, layers: Globs, stacked: Globs, replicate: Any
) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"zero3: accumulate={accumulate!r}; expected a whole number.")
    if accumulate < 1:
        raise ValueError(f"zero3: accumulate={accumulate}; expected at least 1.")
    if sync not in get_args(Sync):
        raise ValueError(
            f"zero3: sync={sync!r}; expected one of "
            f"{', '.join(map(repr, get_args(Sync)))}."
        )
    if sync == "replicas_last" and not replicate:
        raise ValueError(
            "zero3: sync='replicas_last' needs replicate_axis; without replicas use "
            "sync='each'."
        )
    if sync == "last" and (layers or stacked):
        raise ValueError(
            "zero3: sync='last' keeps full gradients of all parameters, but layers or "
            "stacked reduce them layer by layer; expected one of the two. Use "
            "sync='each', or name no layers."
        )


def checked_clip(clip_norm: Any) -> float | None:
    if clip_norm is None:
        return None
    number = float(clip_norm)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(
            f"zero3: clip_norm={clip_norm!r}; expected a finite number above 0, or "
            f"None to leave gradients as they are."
        )
    return number
