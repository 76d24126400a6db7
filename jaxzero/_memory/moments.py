"""The moments of a ZeRO-3 step at which a device may hold most beside its state."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxzero._layout import Group
from jaxzero._memory.step import Leaves, Step, shard_bytes
from jaxzero._transports.alive import array_bytes

LAYERS_OUTSIDE_LOOP = 2
"""Of stacked layers `apply_layers` differentiates the last and the first one apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes on a device beside parameters and optimizer.

    Attributes:
      name: what happens.
      grads: gradient shards and accumulators.
      gathered: parameters in full size.
      full_grads: gradients in full size.
      buckets: what gathers and reductions pack, send and receive.
    """

    name: str
    grads: int = 0
    gathered: int = 0
    full_grads: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.grads + self.gathered + self.full_grads + self.buckets


def moments(step: Step) -> Iterator[Moment]:
    """Yields the moments, as upper bounds where the compiler may choose.

    A parameter or gradient counts from when it can exist until nothing needs it any
    more. In a step without microbatches a gradient takes the place of its parameter;
    a loop over microbatches keeps the parameters for the next.
    """
    gathers = step.gathering(step.resident)
    for alive in gathers:
        yield Moment(name="gathering", gathered=alive.full, buckets=alive.temp)
    full = gathers[-1].full
    if step.keeps_full:
        yield from _kept_full(step, full)
    elif step.loops:
        yield from _looped(step, full)
    else:
        yield from _once(step, full)
    everything = shard_bytes(step.layout.leaves)
    if step.sync == "replicas_last" and step.replicas > 1:
        for alive in step.reducing_over_replicas():
            yield Moment(
                name="sum over replicas",
                grads=alive.full + alive.shards,
                buckets=alive.temp,
            )
    yield Moment(name="update", grads=everything)


def _once(step: Step, full: int) -> Iterator[Moment]:
    """Yields the moments between gather and update, without microbatches.

    Args:
      step: the step.
      full: bytes of the resident parameters.
    """
    before = Moment(name="backward pass", gathered=full)
    after = Moment(name="backward pass", full_grads=step.full_bytes(step.resident))
    yield before
    yield from _layers(step, before)
    yield from _layers(step, after)
    own = shard_bytes(step.resident)
    layers = shard_bytes(step.layout.leaves) - own
    if step.stacked_bytes and not step.transport.on_gpu:
        # XLA:CPU writes the quotients of all layers down for the norm, and divides
        # anew for the update.
        yield Moment(
            name="division of gradients",
            grads=layers + step.stacked_bytes,
            full_grads=after.full_grads,
        )
    # Shards of several dtypes get theirs from accumulators.
    mixed = len({leaf.stored for leaf in step.layout.leaves}) > 1
    for alive in step.reducing(step.resident, accumulates=mixed):
        yield Moment(
            name="reduction",
            grads=layers + (own if mixed else alive.shards),
            full_grads=alive.full,
            buckets=alive.temp,
        )


def _looped(step: Step, full: int) -> Iterator[Moment]:
    """Yields the moments of a microbatch, whose shards are added to accumulators."""
    sums = shard_bytes(step.layout.leaves)
    both = Moment(
        name="backward pass",
        grads=sums,
        gathered=full,
        # As they come, so at most while a layer or their reduction needs memory.
        full_grads=step.full_bytes(step.resident) if step.layout.groups else 0,
    )
    yield from _layers(step, both)
    for alive in step.reducing(step.resident, accumulates=True):
        yield Moment(
            name="reduction",
            grads=sums,
            gathered=full,
            full_grads=alive.full,
            buckets=alive.temp,
        )


def _kept_full(step: Step, full: int) -> Iterator[Moment]:
    """Yields the moments of a step that adds its gradients in full size."""
    leaves = step.layout.leaves
    sizes = [step.full_bytes([leaf]) for leaf in leaves]
    yield Moment(
        name="backward pass",
        grads=sum(array_bytes(leaf.shape, leaf.stored) for leaf in leaves),
        gathered=full,
        # XLA:CPU adds each in place as soon as it exists. XLA:GPU fuses the addition
        # into the matrix product, which writes new sums beside the old.
        full_grads=sum(sizes) if step.transport.on_gpu else max(sizes, default=0),
    )
    for alive in step.reducing(leaves, accumulates=False):
        yield Moment(
            name="reduction", grads=alive.full + alive.shards, buckets=alive.temp
        )


def _layers(step: Step, beside: Moment) -> Iterator[Moment]:
    """Yields the moments of each layer.

    Args:
      step: the step.
      beside: what is alive beside it.
    """
    of_group = {group: shard_bytes(step.members(group)) for group in step.layout.groups}
    for group, count in _distinct(step):
        # A scan has room for the shards of all its layers, whichever is at work.
        others = sum(of_group.values()) - (not group.stacked) * of_group[group]
        if step.loops and not step.transport.on_gpu:
            # XLA:CPU adds those of single layers to accumulators at once; XLA:GPU
            # may wait, to add several in one kernel.
            others = step.stacked_bytes
        around = _plus(beside, name=beside.name, grads=others)
        if step.overlaps and count > 1:
            yield from _beside_another(step, group, count, around)
        else:
            yield from _alone(step, group, around)


def _alone(step: Step, group: Group, beside: Moment) -> Iterator[Moment]:
    """Yields the moments of a layer that is gathered when its turn comes."""
    members = step.members(group)
    for alive in step.gathering(members):
        yield _plus(
            beside,
            name="gathering a layer",
            gathered=alive.full + _slice_bytes(group, members),
            buckets=alive.temp,
        )
    for alive in step.reducing(members, accumulates=False):
        yield _plus(
            beside,
            name="reduction of a layer",
            grads=alive.shards,
            full_grads=alive.full,
            buckets=alive.temp,
        )


def _beside_another(
    step: Step, group: Group, count: int, beside: Moment
) -> Iterator[Moment]:
    """Yields the moments of the backward pass of `apply_layers` with overlap.

    While a layer is differentiated, first the gradients of the layer after it are
    reduced, then the parameters of the layer before it are gathered; meanwhile its
    gradients take the place of its parameters. In the forward pass less is alive.
    """
    members = step.members(group)
    layer = step.layer_bytes(members)
    # The first layers and the last are not in the loop, which XLA unrolls if it has
    # one turn. A loop carries full parameters and full gradients: at its ends both
    # exist, and neither is free for the parameters that are gathered between.
    carried = layer if group.stacked and count > LAYERS_OUTSIDE_LOOP + 1 else 0
    # Shards of the layer after, before they are added to accumulators.
    reduced = 0 if group.stacked or not step.loops else shard_bytes(members)
    for alive in step.gathering(members):
        yield _plus(
            beside,
            name="gathering the layer before",
            grads=reduced,
            gathered=layer + alive.full + _slice_bytes(group, members),
            full_grads=carried,
            buckets=alive.temp,
        )
    for alive in step.reducing(members, accumulates=False, kept=True):
        yield _plus(
            beside,
            name="reduction of the layer after",
            grads=alive.shards,
            gathered=layer,
            full_grads=alive.full,
            buckets=alive.temp,
        )


def _slice_bytes(group: Group, members: Leaves) -> int:
    """Returns the bytes of the shards of a layer that a scan takes out of the stack."""
    return shard_bytes(members) // _num_layers(members) if group.stacked else 0


def _distinct(step: Step) -> list[tuple[Group, int]]:
    """Returns one group of each kind and its number of layers; most are alike."""
    kinds: dict[Any, Group] = {}
    counts: collections.Counter[Any] = collections.Counter()
    for group in step.layout.groups:
        members = step.members(group)
        kind = (group.stacked, *((m.shape, m.dtype, m.stored, m.cut) for m in members))
        kinds[kind] = group
        counts[kind] += _num_layers(members) if group.stacked else 1
    return [(group, counts[kind]) for kind, group in kinds.items()]


def _num_layers(members: Leaves) -> int:
    return max(members[0].layers or 1, 1) if members else 1


def _plus(beside: Moment, name: str, **parts: int) -> Moment:
    sums = {part: getattr(beside, part) + more for part, more in parts.items()}
    return dataclasses.replace(beside, name=name, **sums)
