"""Whether a demo run fits into this machine's memory, before anything is allocated."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxzero._cli.arguments import UsageError
from jaxzero._cli.demo.model import VOCABULARY, ModelConfig, init_params
from jaxzero._cli.demo.options import DemoOptions
from jaxzero._cli.free_memory import free_host_bytes

FLOAT32 = 4
STATES = 3  # parameters and two moments of Adam
BLOCK_ACTIVATIONS = 11  # widths of a block that its backward pass needs, at least


def check_memory(options: DemoOptions) -> None:
    """Refuses a run that cannot fit.

    Raises:
        UsageError: if `needed_bytes` is more than what is free.
    """
    needed, free = needed_bytes(options), free_host_bytes()
    if free is not None and needed > free:
        raise UsageError(
            f"--blocks {options.blocks} --width {options.width} --batch {options.batch}"
            f" --length {options.length} over {options.devices} devices needs at least"
            f" {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free; try"
            " smaller ones"
        )


def needed_bytes(options: DemoOptions) -> int:
    """Returns a lower limit of what all devices together need at the same time."""
    config = ModelConfig(blocks=options.blocks, width=options.width)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    numel = _numel(shapes)
    # A layer at a time, or a unit, which may be a single leaf.
    alone = shapes["blocks"][0] if options.layers else _largest(shapes)
    gathered = _numel(alone)
    itemsize = jnp.dtype(options.compute_dtype).itemsize
    # Each device gathers parameters and computes full gradients of them.
    step = 2 * options.devices * gathered * itemsize + _activation_bytes(
        options, options.batch // options.accumulate
    )
    if options.check:
        # Afterwards, beside the state of the sharded run: its own, and gradients.
        unsharded = (STATES + 1) * numel * FLOAT32
        step = max(step, unsharded + _activation_bytes(options, options.batch))
    # The parameters of the start, and the state of each replica.
    return (1 + STATES * options.replicas) * numel * FLOAT32 + step


def _activation_bytes(options: DemoOptions, sequences: int) -> int:
    tokens = sequences * options.length
    kept = 1 if options.layers else BLOCK_ACTIVATIONS
    itemsize = jnp.dtype(options.compute_dtype).itemsize
    blocks = options.blocks * options.width * kept * itemsize
    return tokens * (blocks + VOCABULARY * FLOAT32)


def _largest(shapes: Any) -> Any:
    return max(jax.tree.leaves(shapes), key=lambda leaf: math.prod(leaf.shape))


def _numel(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
