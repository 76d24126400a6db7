"""One training step twice: with everything sharded, and on one device without jaxzero.

Both steps own the state that they are given (it is donated) and return its successor.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._cli.model import Params, mean_loss
from jaxzero._cli.text import Bytes

AXIS = "shard"
CLIP_NORM = 1.0
PEAK_LEARNING_RATE = 2e-3


class TrainState(NamedTuple):
    """What lives from step to step; ``grads`` are accumulators, zero between steps."""

    params: Params
    grads: Params
    optimizer: optax.OptState


class Metrics(NamedTuple):
    """Mean loss in nats and norm of the mean gradient before clipping."""

    loss: jax.Array
    grad_norm: jax.Array


class Trainer(NamedTuple):
    """A step, the state that it starts from, and how to place its data."""

    state: TrainState
    step: jax.stages.Wrapped
    place: Callable[[Bytes], jax.Array]


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Returns Adam with a short warm-up and a cosine decay over ``steps``."""
    warmup = max(1, steps // 10)
    return optax.adam(
        optax.warmup_cosine_decay_schedule(
            init_value=PEAK_LEARNING_RATE / 10,
            peak_value=PEAK_LEARNING_RATE,
            warmup_steps=warmup,
            decay_steps=max(steps, warmup + 1),
            end_value=PEAK_LEARNING_RATE / 10,
        )
    )


def sharded_trainer(
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    policy: jaxzero.Policy,
) -> Trainer:
    """Builds the ZeRO-3 step: each device keeps 1/N of parameters, gradients, Adam.

    Args:
        params: full parameters; they are read, not kept.
        optimizer: elementwise, so that it may run on shards.
        mesh: a mesh with the one axis ``AXIS``.
        policy: ``divide_by`` must count devices times microbatches.
    """
    like = jax.eval_shape(lambda: params)

    def initial(shards: Params) -> TrainState:
        zeros = jax.tree.map(jnp.zeros_like, shards)
        return TrainState(shards, zeros, optimizer.init(shards))

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        # All microbatches see the same parameters: one gather serves the step.
        full = jaxzero.gather_params(state.params, like, AXIS)

        def microbatch(
            grads: Params, tokens: jax.Array
        ) -> tuple[Params, tuple[jax.Array, jax.Array]]:
            # `full` varies over the axis, so this gradient is the local one.
            loss, local_grads = jax.value_and_grad(mean_loss)(full, tokens)
            grads, stats = jaxzero.shard_grads(
                local_grads, AXIS, into=grads, policy=policy, with_stats=True
            )
            return grads, (loss, stats.norm)

        grads, (losses, norms) = lax.scan(microbatch, state.grads, tokens)
        # The last norm is that of the finished sum over microbatches and devices.
        metrics = Metrics(lax.pmean(jnp.mean(losses), AXIS), norms[-1])
        new_params, new_optimizer = _update(
            optimizer, state.params, grads, state.optimizer, metrics.grad_norm
        )
        zeros = jax.tree.map(jnp.zeros_like, grads)
        return TrainState(new_params, zeros, new_optimizer), metrics

    shards = jaxzero.shard_params(params, mesh, AXIS)
    # Every shard is cut on its first dimension; only Adam's step counts have none.
    specs = jax.tree.map(
        lambda leaf: P(AXIS) if leaf.ndim else P(), jax.eval_shape(initial, shards)
    )
    on_mesh = functools.partial(jax.shard_map, mesh=mesh)
    state = jax.jit(on_mesh(initial, in_specs=P(AXIS), out_specs=specs))(shards)
    sharded_step = jax.jit(
        on_mesh(step, in_specs=(specs, P(None, AXIS)), out_specs=(specs, P())),
        donate_argnums=0,
    )
    data = NamedSharding(mesh, P(None, AXIS))
    return Trainer(state, sharded_step, lambda tokens: jax.device_put(tokens, data))


def unsharded_trainer(
    params: Params, optimizer: optax.GradientTransformation
) -> Trainer:
    """Builds the same step on one device: ``jax.grad`` of the mean loss."""

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        flat_tokens = tokens.reshape(-1, tokens.shape[-1])
        loss, grads = jax.value_and_grad(mean_loss)(state.params, flat_tokens)
        norm = optax.global_norm(grads)
        new_params, new_optimizer = _update(
            optimizer, state.params, grads, state.optimizer, norm
        )
        return TrainState(new_params, {}, new_optimizer), Metrics(loss, norm)

    # The step donates its state, so it must not own the caller's parameters.
    copy = jax.tree.map(jnp.copy, params)
    state = TrainState(copy, {}, optimizer.init(copy))
    return Trainer(state, jax.jit(step, donate_argnums=0), jnp.asarray)


def _update(
    optimizer: optax.GradientTransformation,
    params: Params,
    grads: Params,
    state: optax.OptState,
    norm: jax.Array,
) -> tuple[Params, optax.OptState]:
    scale = CLIP_NORM / jnp.maximum(norm, CLIP_NORM)
    clipped = jax.tree.map(lambda grad: grad * scale, grads)
    updates, state = optimizer.update(clipped, state, params)
    return optax.apply_updates(params, updates), state
