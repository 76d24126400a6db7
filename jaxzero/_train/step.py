"""One ZeRO-3 step as each device runs it, inside the `shard_map` of `zero3`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, bind_axis
from jaxzero._norm import global_norm
from jaxzero._norm_clip import clipped
from jaxzero._train.empty import empty_as_constants
from jaxzero._train.extra_args import update
from jaxzero._train.grads import Dims, Gradients
from jaxzero._train.layout import Layout
from jaxzero._train.options import StepOptions
from jaxzero._train.state import Metrics, TrainState
from jaxzero._tree import PyTree


def local_step(
    options: StepOptions, dims: Dims, state: TrainState, batch: PyTree
) -> tuple[TrainState, Metrics]:
    """Computes gradients, reduces them, and updates this device's shards."""
    axis = bind_axis(options.names, options.replicate_axis, "zero3")
    state, batch = empty_as_constants(axis, (state, batch))
    scale = None if state.loss_scale is None else state.loss_scale.scale
    gradients = Gradients(options, axis, state.layout, state.params, scale)
    summed = gradients.of_batch(batch, dims)
    norm = (
        global_norm(summed.grads, options.names)
        if summed.stats is None
        else summed.stats.norm
    )
    finite = jnp.isfinite(norm)
    if scale is not None:
        norm = norm / scale
    grads = state.layout.unflatten(_scaled(options, summed.grads, norm, scale))
    loss, aux = over_devices(options, axis, summed.loss, summed.aux)
    unclipped = dataclasses.replace(options, clip_norm=None)
    updates, opt_state = update(
        options.optimizer,
        grads,
        state.opt_state,
        state.params,
        value=loss,
        grad=state.layout.unflatten(_scaled(unclipped, summed.grads, norm, scale)),
    )
    params = jax.tree.map(_updated, state.params, updates)
    took = jnp.ones((), jnp.bool_)
    if options.skip_nonfinite or options.loss_scale is not None:
        took = finite
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(took, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
    following = None
    if options.loss_scale is not None and state.loss_scale is not None:
        following = options.loss_scale.update(state.loss_scale, finite)
    metrics = Metrics(
        loss=loss, grad_norm=norm, skipped=~took, loss_scale=scale, aux=aux
    )
    return (
        TrainState(
            step=state.step + took.astype(jnp.int32),
            params=params,
            opt_state=opt_state,
            loss_scale=following,
            layout=state.layout,
        ),
        metrics,
    )


def local_loss(
    options: StepOptions, dims: Dims, layout: Layout, params: PyTree, batch: PyTree
) -> tuple[jax.Array, PyTree]:
    """Computes loss and auxiliary results, without gradients."""
    axis = bind_axis(options.names, options.replicate_axis, "zero3")
    params, batch = empty_as_constants(axis, (params, batch))
    leaves, structure = jax.tree.flatten(batch)
    # A loss may carry examples through a loop, so that those which all devices have
    # must be typed as those of which each has its own.
    batch = jax.tree.unflatten(
        structure,
        [
            leaf if dim is None else axis.lift(leaf, axis.all_names)
            for leaf, dim in zip(leaves, dims, strict=True)
        ],
    )
    sums = Gradients(options, axis, layout, params).loss_of_batch(batch, dims)
    return over_devices(options, axis, *sums)


def over_devices(
    options: StepOptions, axis: Axis, loss: jax.Array, aux: PyTree
) -> tuple[jax.Array, PyTree]:
    """Returns the mean, or what else the policy says, of sums on each device."""

    def reduced(value: jax.Array) -> jax.Array:
        total: jax.Array = lax.psum(value, axis.all_names)
        return total / options.divisor

    return reduced(loss), jax.tree.map(reduced, aux)


def _updated(param: jax.Array, update: jax.Array) -> jax.Array:
    wide = _wider(param.dtype, update.dtype)
    return (param.astype(wide) + update.astype(wide)).astype(param.dtype)


def _wider(one: Any, other: Any) -> Any:
    # Also where the program around asks for strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(one, other)


def _scaled(
    options: StepOptions,
    grads: list[jax.Array],
    norm: jax.Array,
    scale: jax.Array | None,
) -> list[jax.Array]:
    """Takes the loss scale out and clips."""

    def of_leaf(grad: jax.Array) -> jax.Array:
        if scale is not None:
            wide = _wider(grad.dtype, scale.dtype)
            grad = (grad.astype(wide) / scale.astype(wide)).astype(grad.dtype)
        if options.clip_norm is not None:
            grad = clipped(grad, norm, options.clip_norm)
        return grad

    return [of_leaf(grad) for grad in grads]
