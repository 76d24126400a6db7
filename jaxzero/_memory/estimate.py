"""estimate_memory: bytes per device of a ZeRO-3 step, before anything runs."""

import dataclasses
from typing import Any

import jax

from jaxzero._cut import CutTree
from jaxzero._layout import Layout
from jaxzero._make_layout import Globs, build_layout, check_alone, checked_numel
from jaxzero._memory.moments import Moment, moments
from jaxzero._memory.step import Step, shard_bytes
from jaxzero._numbers import whole_number
from jaxzero._policy import Policy
from jaxzero._text import format_bytes
from jaxzero._train.options import Optimizer, Sync, check_choices
from jaxzero._train.params_layout import params_layout
from jaxzero._transports import transport_for_gpus
from jaxzero._transports.alive import array_bytes
from jaxzero._tree import PyTree

PARTS = {
    "params": "parameters",
    "optimizer": "optimizer state",
    "grads": "gradient shards",
    "gathered": "gathered parameters",
    "full_grads": "full gradients",
    "buckets": "buckets",
}
"""Fields of `DeviceBytes` that add up, with what a table calls them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes on one device; each part at its own largest.

    Attributes:
      params: parameters, as they are stored.
      optimizer: the optimizer's state.
      grads: gradient shards and accumulators (full ones with `sync="last"`).
      gathered: full parameters that are alive together, in the dtype of computing.
      full_grads: full gradients that are alive together.
      buckets: temporary memory of gathers and reductions.
      total: what is alive together at the fullest moment. At most the sum of the
        parts: a gradient, for example, may take the place of its parameter.
    """

    params: int
    optimizer: int
    grads: int
    gathered: int
    full_grads: int
    buckets: int
    total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a step of `zero3` needs on each device, beside activations.

    Attributes:
      axis_size: ranks that the state is sharded over.
      replicas: copies of each shard.
      sharded: bytes on one device, with everything spread over the ranks.
      unsharded: the same with everything in full on every device, as in plain data
        parallelism.
      fullest: the moment at which most is alive.
    """

    axis_size: int
    replicas: int
    sharded: DeviceBytes
    unsharded: DeviceBytes
    fullest: str

    @property
    def total(self) -> int:
        """Bytes on one device at the fullest moment."""
        return self.sharded.total

    def asdict(self) -> dict[str, Any]:
        """Returns it as plain numbers and words, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        ranks = f"{self.axis_size} rank{'s' * (self.axis_size > 1)}"
        lines = [f"{'bytes per device':<22}{ranks:>12}{'unsharded':>14}"]
        for part, name in PARTS.items():
            lines.append(_row(name, *(getattr(b, part) for b in self._columns)))
        spare = [
            bytes_.total - sum(getattr(bytes_, part) for part in PARTS)
            for bytes_ in self._columns
        ]
        lines.append(_row("not all at once", *spare))
        lines.append(_row("total", *(bytes_.total for bytes_ in self._columns)))
        lines.append(f"Fullest: {self.fullest}. Activations come on top.")
        return "\n".join(lines)

    @property
    def _columns(self) -> tuple[DeviceBytes, DeviceBytes]:
        return self.sharded, self.unsharded


def estimate_memory(
    params: PyTree | Layout,
    axis_size: int | None = None,
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    *,
    optimizer: Optimizer | None = None,
    cuts: CutTree = None,
    min_shard_numel: int = 0,
    layers: Globs = (),
    stacked: Globs = (),
    replicas: int = 1,
    accumulate: int = 1,
    sync: Sync = "each",
) -> MemoryEstimate:
    """Estimates the memory that a step of `zero3` needs on each device.

    Needs no device and no mesh, and takes shapes for parameters. Follows the step
    moment by moment through its plans: gathers, backward pass, reductions, update.
    Where XLA may order operations in several ways, the one that needs most counts.

    Activations are not in it, nor what XLA adds for them (such as transposed copies
    of weights), nor the batch. On CPU devices XLA also widens 16-bit floats to
    float32 for matrix products, and bfloat16 for sums, and copies what
    `reduction="float32"` exchanges, which is not in it either. Gradient shards
    count until the update, as they must for `clip_norm`; without it, XLA may update
    some of them earlier.

    Parameters that are in no layer count as gathered all at once: an upper bound,
    because their shapes do not tell the units that `zero3` finds in the loss.

    Layers are those of `apply_layers`. With `Policy(overlap=True)` the parameters of
    the layer before, or the gradients of the layer after, exist beside a layer, with
    their bucket. For a loss that calls `gathered` itself, which has one layer at a
    time, ask with `Policy(overlap=False)`.

    Args:
      params: parameters, or their shapes and dtypes (`jax.eval_shape(init, key)`). Or
        their `Layout`, which says all of ranks, replicas, cuts and layers.
      axis_size: ranks that the state is sharded over.
      policy: as for `zero3`. With `transport="auto"` the estimate is for `"nccl"`,
        the transport of NVIDIA GPUs; for CPU devices ask for `"xla"`.
      optimizer: as for `zero3`. None stands for one with two moments in the dtype of
        the shards, such as Adam.
      cuts: as for `zero3`.
      min_shard_numel: as for `zero3`.
      layers: as for `zero3`.
      stacked: as for `zero3`.
      replicas: copies of each shard (hybrid sharding), on axis_size x replicas
        devices.
      accumulate: as for `zero3`.
      sync: as for `zero3`.

    Returns:
      A `MemoryEstimate`; `print(estimate)` shows a table.

    Raises:
      ValueError: for a count below 1, a cut or glob that does not fit, or options
        at odds.
      TypeError: for leaves that are no floating-point arrays, or options of the wrong
        type.

    Example:
      >>> import jax, jaxzero
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
      >>> estimate = jaxzero.estimate_memory(params, 8)
      >>> estimate.sharded.params, estimate.unsharded.params
      (524288, 4194304)
    """
    if isinstance(params, Layout):
        check_alone("estimate_memory", axis_size=axis_size, cuts=cuts)
        check_alone("estimate_memory", layers=layers or None, stacked=stacked or None)
        check_alone("estimate_memory", min_shard_numel=min_shard_numel or None)
        given, params = params, params.like
        ranks, replicas = given.group_size, given.replicas
    else:
        ranks = _count("axis_size", axis_size)
        replicas = _count("replicas", replicas)
        given = None
    check_choices(
        "estimate_memory",
        accumulate,
        sync,
        layers,
        stacked,
        "" if replicas > 1 else "replicas above 1",
    )
    layout = params_layout(
        given
        or build_layout(
            params,
            ("data",),
            (),
            {"data": ranks},
            what="params",
            cuts=cuts,
            min_shard_numel=checked_numel("estimate_memory", min_shard_numel),
            layers=layers,
            stacked=stacked,
        ),
        params,
        policy,
    )
    step = Step(
        layout=layout,
        policy=policy,
        transport=transport_for_gpus(policy),
        replicas=replicas,
        accumulate=accumulate,
        sync=sync,
    )
    found = list(moments(step))
    fullest = max(found, key=lambda moment: moment.total)
    return MemoryEstimate(
        axis_size=ranks,
        replicas=replicas,
        sharded=_device_bytes(
            shard_bytes(layout.leaves),
            _optimizer_bytes(layout, optimizer, sharded=True),
            found,
        ),
        unsharded=_unsharded(step, optimizer),
        fullest=fullest.name,
    )


def _device_bytes(params: int, optimizer: int, found: list[Moment]) -> DeviceBytes:
    return DeviceBytes(
        params=params,
        optimizer=optimizer,
        grads=max(moment.grads for moment in found),
        gathered=max(moment.gathered for moment in found),
        full_grads=max(moment.full_grads for moment in found),
        buckets=max(moment.buckets for moment in found),
        total=params + optimizer + max(moment.total for moment in found),
    )


def _unsharded(step: Step, optimizer: Optimizer | None) -> DeviceBytes:
    """Returns the bytes of a step in which every device has everything."""
    leaves = step.layout.leaves
    params = sum(array_bytes(leaf.shape, leaf.stored) for leaf in leaves)
    converted = step.full_bytes(
        [leaf for leaf in leaves if step.compute_dtype(leaf) != leaf.stored]
    )
    grads = step.full_bytes(leaves)
    if step.loops:
        found = [Moment(name="", grads=params, gathered=converted, full_grads=grads)]
    else:
        found = [
            Moment(name="", gathered=converted),
            Moment(name="", full_grads=grads),
        ]
    state = _optimizer_bytes(step.layout, optimizer, sharded=False)
    return _device_bytes(params, state, found)


def _optimizer_bytes(
    layout: Layout, optimizer: Optimizer | None, *, sharded: bool
) -> int:
    shapes = [
        jax.ShapeDtypeStruct(leaf.shard_shape if sharded else leaf.shape, leaf.stored)
        for leaf in layout.leaves
    ]
    if optimizer is None:
        return 2 * _tree_bytes(shapes)
    return _tree_bytes(jax.eval_shape(optimizer.init, layout.unflatten(shapes)))


def _tree_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count(name: str, value: Any) -> int:
    count = whole_number(f"estimate_memory: {name}", value)
    if count < 1:
        raise ValueError(f"estimate_memory: {name}={value}; expected at least 1.")
    return count


def _row(name: str, sharded: int, unsharded: int) -> str:
    return f"{name:<22}{format_bytes(sharded):>12}{format_bytes(unsharded):>14}"
