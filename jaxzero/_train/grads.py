"""Gradients of one ZeRO-3 step, microbatch by microbatch, on each device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis
from jaxzero._dtypes import component_dtype
from jaxzero._gather_params import gather_params
from jaxzero._gathered import Recipe, Shards
from jaxzero._policy import Policy
from jaxzero._shard_grads import shard_grads
from jaxzero._stats import Stats
from jaxzero._train.layout import Layout
from jaxzero._train.options import StepOptions
from jaxzero._tree import PyTree, path_name

Dims = tuple[int | None, ...]
"""Per leaf of a batch, in tree order, the dimension of its examples, or None."""


@dataclasses.dataclass(frozen=True)
class Summed:
    """Gradients of a whole batch, and what was measured on the way.

    Attributes:
      grads: shards in tree order, divided.
      loss: sum of the losses of all microbatches on this device.
      aux: sum of their auxiliary results.
      stats: measurements of all gradients, if one call reduced them all.
    """

    grads: list[jax.Array]
    loss: jax.Array
    aux: PyTree
    stats: Stats | None


class Gradients:
    """Gradients of one step: microbatch by microbatch, reduced as `sync` says."""

    def __init__(
        self,
        options: StepOptions,
        axis: Axis,
        layout: Layout,
        params: PyTree,
        scale: jax.Array | None = None,
    ) -> None:
        self.options = options
        self.axis = axis
        self.layout = layout
        self.scale = scale
        shards = jax.tree.leaves(params)
        leaves = self.layout.leaves
        self.cuts = self.layout.resident([leaf.option for leaf in leaves])
        likes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        # All microbatches see the same parameters: one gather serves the step.
        self.full = gather_params(
            self.layout.resident(shards),
            self.layout.resident(likes),
            options.names,
            policy=options.policy,
            cuts=self.cuts,
            replicate_axis=options.replicate_axis,
        )
        if options.sync == "replicas_last":
            # Else the sum over replicas would be part of every backward pass.
            shards = [axis.lift(shard, options.replicate) for shard in shards]
        self.shards = shards
        self.groups = self.layout.grouped(shards)

    def of_batch(self, batch: PyTree, dims: Dims) -> Summed:
        """Returns the reduced gradients of this device's part of a batch.

        Args:
          batch: the part.
          dims: per leaf the dimension of its examples, or None.
        """
        options = self.options
        if options.accumulate == 1:
            total = self._of_one(batch)
        elif options.sync == "last":
            total = self._of_several_kept_local(batch, dims)
        else:
            total = self._of_several(batch, dims)
        if options.sync == "replicas_last" and options.replicate:
            grads = shard_grads(
                total.grads,
                options.replicate,
                policy=dataclasses.replace(
                    self._policy(), comm_dtype=None, op="sum", divide_by=None
                ),
                cuts="whole",
            )
            return dataclasses.replace(total, grads=grads, stats=None)
        return total

    def loss_of_batch(self, batch: PyTree, dims: Dims) -> tuple[jax.Array, PyTree]:
        """Returns the sums of losses and auxiliary results, without gradients."""

        def of_one(part: PyTree) -> tuple[jax.Array, PyTree]:
            measured: tuple[jax.Array, PyTree]
            _, measured = self._objective(self.full, self.groups, part)
            return measured

        if self.options.accumulate == 1:
            return of_one(batch)
        _, parts = self._scan(lambda _, part: ((), of_one(part)), (), batch, dims)
        sums: tuple[jax.Array, PyTree]
        sums = jax.tree.map(lambda values: jnp.sum(values, 0), parts)
        return sums

    def _policy(self) -> Policy:
        """Returns the policy of a reduction, with the divisor of the whole batch."""
        return dataclasses.replace(self.options.policy, divide_by=self.options.divisor)

    def _gradient(self, batch: PyTree) -> tuple[jax.Array, PyTree, Any, list[Any]]:
        """Returns loss, aux, local resident gradients and summed group gradients."""
        (_, (loss, aux)), (resident, groups) = jax.value_and_grad(
            self._objective, argnums=(0, 1), has_aux=True
        )(self.full, self.groups, batch)
        divided = jax.tree.map(self._divided, groups)
        return loss, aux, resident, divided

    def _divided(self, grad: jax.Array) -> jax.Array:
        divisor = jnp.asarray(self.options.divisor, grad.real.dtype)
        return grad / divisor

    def _objective(
        self, full: PyTree, groups: list[PyTree], batch: PyTree
    ) -> tuple[jax.Array, Any]:
        params = self.layout.merge(full, self._nodes(groups))
        result = self.options.loss_fn(params, batch)
        loss, aux = _with_aux(result) if self.options.has_aux else (result, None)
        loss = self._of_this_device(_checked_loss(loss), loss, "the loss")
        aux = jax.tree_util.tree_map_with_path(
            lambda path, value: self._of_this_device(
                _checked_aux(value, path_name(path)),
                value,
                f"aux leaf {path_name(path)}",
            ),
            aux,
        )
        scaled = loss if self.scale is None else loss * self.scale
        return scaled, (loss, aux)

    def _of_this_device(self, value: jax.Array, given: Any, what: str) -> jax.Array:
        """Returns a result of the loss function as this device's own.

        One that is equal on all devices, such as of `lax.pmean`, becomes a copy on
        each: the gradient of their mean is then that of what they have in common. For
        another divisor it matters whether it is a sum already, which nothing tells.
        """
        equal = [
            name for name in self.axis.unvarying_axes(given) if lax.axis_size(name) > 1
        ]
        policy = self.options.policy
        is_mean = policy.op == "mean" and policy.divide_by is None
        # A plain number is a constant of each device's own, no sum over devices.
        if equal and not is_mean and isinstance(given, jax.core.Tracer):
            asked = (
                f"op={policy.op!r}"
                if policy.divide_by is None
                else f"divide_by={policy.divide_by}"
            )
            raise ValueError(
                f"zero3: {what} is equal on all devices along "
                f"{', '.join(map(repr, equal))}, as after lax.psum or lax.pmean, and "
                f"Policy({asked}) would add it up over them; expected this device's "
                f"part of the sum. Take the collective off {what} (a divisor may keep "
                f"its own: jnp.sum(losses) / lax.psum(count, axis)), use op='mean', or "
                f"return a constant as a Python number."
            )
        return self.axis.lift(value, self.axis.all_names)

    def _nodes(self, groups: list[PyTree]) -> list[Shards]:
        options = self.options
        last = options.sync == "replicas_last"
        nodes = []
        for group, tree in zip(self.layout.groups, groups, strict=True):
            leaves = self.layout.leaves[group.begin : group.end]
            recipe = Recipe(
                like=tuple((leaf.unit_shape, leaf.dtype) for leaf in leaves),
                cuts=tuple(leaf.option for leaf in leaves),
                axis_name=options.names,
                replicate_axis=None if last else options.replicate_axis,
                policy=options.policy,
            )
            nodes.append(Shards(tree, recipe))
        return nodes

    def _reduce(self, resident: PyTree, into: PyTree | None) -> tuple[PyTree, Stats]:
        options = self.options
        policy = self._policy()
        if into is None:
            stored = {component_dtype(leaf.stored) for leaf in self.layout.leaves}
            if len(stored) == 1:
                policy = dataclasses.replace(policy, shard_dtype=stored.pop())
            else:
                into = self.layout.resident(self._zeros())
        last = options.sync == "replicas_last"
        return shard_grads(
            resident,
            options.names,
            into=into,
            policy=policy,
            cuts=self.cuts,
            replicate_axis=None if last else options.replicate_axis,
            with_stats=True,
        )

    def _summed(
        self, resident: PyTree, groups: list[PyTree], loss: Any, aux: Any, stats: Stats
    ) -> Summed:
        return Summed(
            grads=self.layout.flatten(resident, groups),
            loss=loss,
            aux=aux,
            stats=None if groups else stats,
        )

    def _of_one(self, batch: PyTree) -> Summed:
        loss, aux, resident, groups = self._gradient(batch)
        reduced, stats = self._reduce(resident, None)
        return self._summed(reduced, groups, loss, aux, stats)

    def _of_several(self, batch: PyTree, dims: Dims) -> Summed:
        """Reduces after each microbatch, into accumulators of 1/N."""
        zeros = self._zeros()
        start = (self.layout.resident(zeros), self.layout.grouped(zeros))

        def body(sums: Any, part: PyTree) -> tuple[Any, Any]:
            loss, aux, resident, groups = self._gradient(part)
            reduced, stats = self._reduce(resident, sums[0])
            return (reduced, jax.tree.map(jnp.add, sums[1], groups)), (loss, aux, stats)

        (resident, groups), (losses, auxes, stats) = self._scan(
            body, start, batch, dims
        )
        # The last measurement is that of the finished sum.
        last = jax.tree.map(lambda values: values[-1], stats)
        aux = jax.tree.map(lambda values: jnp.sum(values, 0), auxes)
        return self._summed(resident, groups, jnp.sum(losses), aux, last)

    def _of_several_kept_local(self, batch: PyTree, dims: Dims) -> Summed:
        """Adds full gradients on the device and reduces their sum."""
        stored = self.layout.resident([leaf.stored for leaf in self.layout.leaves])
        start = jax.tree.map(
            lambda full, dtype: self.axis.lift(
                jnp.zeros(full.shape, dtype), self.axis.all_names
            ),
            self.full,
            stored,
        )

        def body(sums: PyTree, part: PyTree) -> tuple[PyTree, Any]:
            loss, aux, resident, _ = self._gradient(part)
            added = jax.tree.map(
                lambda total, grad: total + grad.astype(total.dtype), sums, resident
            )
            return added, (loss, aux)

        sums, (losses, auxes) = self._scan(body, start, batch, dims)
        reduced, stats = self._reduce(sums, None)
        aux = jax.tree.map(lambda values: jnp.sum(values, 0), auxes)
        return self._summed(reduced, [], jnp.sum(losses), aux, stats)

    def _scan(self, body: Any, start: Any, batch: PyTree, dims: Dims) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        split = {
            i: _microbatches(leaf, dim, self.options.accumulate)
            for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
            if dim is not None
        }

        def turn(carry: Any, parts: dict[int, jax.Array]) -> Any:
            # What goes whole to every device serves every microbatch.
            part = [parts.get(i, leaf) for i, leaf in enumerate(leaves)]
            return body(carry, jax.tree.unflatten(structure, part))

        return lax.scan(turn, start, split, length=self.options.accumulate)

    def _zeros(self) -> list[jax.Array]:
        """Returns accumulators, typed as the shards are."""
        return [
            self.axis.lift_to(jnp.zeros(shard.shape, shard.dtype), jax.typeof(shard))
            for shard in self.shards
        ]


def _microbatches(leaf: jax.Array, dim: int, count: int) -> jax.Array:
    """Returns a leaf with its parts along a new first dimension."""
    shape = (*leaf.shape[:dim], count, leaf.shape[dim] // count, *leaf.shape[dim + 1 :])
    return jnp.moveaxis(leaf.reshape(shape), dim, 0)


def _with_aux(result: Any) -> tuple[Any, PyTree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"zero3: has_aux=True, but loss_fn returned a {type(result).__name__}; "
            f"expected a pair (loss, aux). Return one, or leave out has_aux."
        )
    return result


def _checked_loss(loss: Any) -> jax.Array:
    if not jax.tree_util.all_leaves([loss]):
        raise TypeError(
            f"zero3: loss_fn returned a {type(loss).__name__}; expected a real scalar, "
            f"the mean over its batch. To return a pair (loss, aux), set has_aux=True."
        )
    found = jnp.shape(loss)
    dtype = jnp.result_type(loss)
    if found != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"zero3: loss_fn returned {dtype}{list(found)}; expected a real scalar, "
            f"the mean over its batch. Return jnp.mean of the losses (and set "
            f"has_aux=True to return more than the loss)."
        )
    return jnp.asarray(loss, jnp.float32)


def _checked_aux(value: Any, path: str) -> jax.Array:
    dtype = getattr(value, "dtype", type(value))
    if not any(jnp.issubdtype(dtype, t) for t in (jnp.floating, jnp.integer, jnp.bool)):
        raise TypeError(
            f"zero3: aux leaf {path} is of {dtype}; expected real numbers, which "
            f"are averaged over devices in float32. Return two for a complex one, and "
            f"leave out what is no number."
        )
    return jnp.asarray(value, jnp.float32)
