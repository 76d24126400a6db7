"""The programs of a run over its mesh: birth of parameters, a step, a loss."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._train.batch import batch_specs
from jaxzero._train.batch_dims import dims_of
from jaxzero._train.layout import Layout
from jaxzero._train.optimizer import ShardedOptimizer
from jaxzero._train.options import LossFn, StepOptions
from jaxzero._train.state import Metrics, TrainState
from jaxzero._train.step import local_loss, local_step
from jaxzero._tree import PyTree


def birth(layout: Layout, mesh: Mesh, init_fn: Callable[..., PyTree]) -> Any:
    """Returns the jitted function that makes parameters as global arrays of shards."""
    shardings = [NamedSharding(mesh, leaf.spec(layout.names)) for leaf in layout.leaves]

    def make(*args: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(init_fn(*args))
        return [
            leaf.to_global(value)
            for leaf, value in zip(layout.leaves, leaves, strict=True)
        ]

    return jax.jit(make, out_shardings=shardings)


def step_program(options: StepOptions, mesh: Mesh, optimizer: ShardedOptimizer) -> Any:
    """Returns the jitted (state, batch) -> (state, metrics); the state is donated."""

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        layout = state.layout
        specs = dataclasses.replace(
            jax.tree.map(lambda _: P(), state),
            params=layout.specs,
            opt_state=optimizer.specs(layout),
        )
        mapped = jax.shard_map(
            functools.partial(local_step, options, dims_of(batch, options.batch_dims)),
            mesh=mesh,
            in_specs=(specs, batch_specs(batch, options)),
            out_specs=(specs, P()),
        )
        result: tuple[TrainState, Metrics] = mapped(state, batch)
        return result

    return jax.jit(step, donate_argnums=0)


def loss_program(options: StepOptions, mesh: Mesh) -> Any:
    """Returns the jitted (loss_fn, layout, params, batch) -> (loss, aux)."""

    def loss(
        loss_fn: LossFn, layout: Layout, params: PyTree, batch: PyTree
    ) -> tuple[jax.Array, PyTree]:
        mapped = jax.shard_map(
            functools.partial(
                local_loss,
                dataclasses.replace(options, loss_fn=loss_fn),
                dims_of(batch, options.batch_dims),
                layout,
            ),
            mesh=mesh,
            in_specs=(layout.specs, batch_specs(batch, options)),
            out_specs=P(),
        )
        result: tuple[jax.Array, PyTree] = mapped(params, batch)
        return result

    return jax.jit(loss, static_argnums=(0, 1))
