"""One training step twice: as ZeRO-3, and on one device without jaxzero.

Both steps own the state that they are given (it is donated) and return its successor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxzero
from jaxzero._cli.demo.model import Params, mean_loss
from jaxzero._cli.demo.options import DemoOptions
from jaxzero._cli.demo.text import Bytes

CLIP_NORM = 1.0
PEAK_LEARNING_RATE = 2e-3
LAYERS = "blocks/*"

LOSS_SCALE = jaxzero.LossScale(initial=2.0**10)
"""For float16, which has no numbers below 6e-8.

The default scale of 2**15 overflows in the first steps, where gradients are largest; a
step that is skipped for that has no like in the unsharded run.
"""


class PlainState(NamedTuple):
    """What the unsharded run keeps; the parts of ``jaxzero.TrainState`` it needs."""

    params: Params
    opt_state: optax.OptState


class Trainer(NamedTuple):
    """A step, the state that it starts from, and how to place its data.

    ``lower(state, tokens)`` lowers the step (state, tokens) -> (state, metrics), where
    metrics are a ``jaxzero.Metrics``.
    """

    state: Any
    lower: Callable[[Any, jax.Array], jax.stages.Lowered]
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


def make_policy(options: DemoOptions) -> jaxzero.Policy:
    """Returns the dtypes of computing, wire and shards."""
    return jaxzero.Policy(
        compute_dtype=options.compute_dtype,
        comm_dtype=options.comm_dtype,
        shard_dtype="float32",
        transport="xla",
    )


def sharded_trainer(
    params: Params, optimizer: optax.GradientTransformation, options: DemoOptions
) -> Trainer:
    """Builds the ZeRO-3 step: each device keeps 1/N of parameters, gradients, Adam.

    Args:
        params: full parameters; they are read, not kept.
        optimizer: elementwise, so that it may run on shards.
        options: say what is asked of ``jaxzero.zero3``.
    """
    mesh = jax.make_mesh((options.replicas, options.shards), ("replica", "shard"))
    zero = jaxzero.zero3(
        mean_loss,
        optimizer,
        mesh,
        "shard",
        policy=make_policy(options),
        replicate_axis="replica" if options.replicas > 1 else None,
        layers=LAYERS if options.layers else (),
        accumulate=options.accumulate,
        clip_norm=CLIP_NORM,
        loss_scale=LOSS_SCALE if options.compute_dtype == "float16" else None,
    )
    return Trainer(
        state=zero.init(params),
        lower=zero.lower,
        place=lambda tokens: jax.device_put(tokens, zero.batch_sharding),
    )


def unsharded_trainer(
    params: Params, optimizer: optax.GradientTransformation
) -> Trainer:
    """Builds the same step on one device, in float32: ``jax.grad`` of the mean loss."""

    def step(
        state: PlainState, tokens: jax.Array
    ) -> tuple[PlainState, jaxzero.Metrics]:
        loss, grads = jax.value_and_grad(mean_loss)(state.params, tokens)
        norm = optax.global_norm(grads)
        scale = CLIP_NORM / jnp.maximum(norm, CLIP_NORM)
        clipped = jax.tree.map(lambda grad: grad * scale, grads)
        updates, opt_state = optimizer.update(clipped, state.opt_state, state.params)
        metrics = jaxzero.Metrics(
            loss=loss,
            grad_norm=norm,
            skipped=jnp.zeros((), jnp.bool_),
            loss_scale=None,
            aux=None,
        )
        new_params = optax.apply_updates(state.params, updates)
        return PlainState(new_params, opt_state), metrics

    # The step donates its state, so it must not own the caller's parameters.
    copy = jax.tree.map(jnp.copy, params)
    return Trainer(
        state=PlainState(copy, optimizer.init(copy)),
        lower=jax.jit(step, donate_argnums=0).lower,
        place=jnp.asarray,
    )
