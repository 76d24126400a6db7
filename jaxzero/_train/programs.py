"""The programs of a run over its mesh: birth of parameters, a step, a loss."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._layout import Layout
from jaxzero._train.batch import Part, batch_specs
from jaxzero._train.batch_dims import dims_of
from jaxzero._train.optimizer import ShardedOptimizer
from jaxzero._train.options import LossFn, StepOptions
from jaxzero._train.state import Metrics, TrainState
from jaxzero._train.step import local_loss, local_step
from jaxzero._tree import PyTree


def birth(layout: Layout, mesh: Mesh, init_fn: Callable[..., PyTree]) -> Any:
    """Returns the jitted function that makes parameters as global arrays of shards."""
    shardings = [NamedSharding(mesh, leaf.spec) for leaf in layout.leaves]

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
    """Returns the jitted function from a part of a batch to its share of (loss, aux).

    Its arguments are loss_fn, layout and the fields of `Part`, with the parameters
    before the batch.
    """

    def loss(
        loss_fn: LossFn,
        layout: Layout,
        accumulate: int,
        spread: bool,
        share: float,
        params: PyTree,
        batch: PyTree,
    ) -> tuple[jax.Array, PyTree]:
        mapped = jax.shard_map(
            functools.partial(
                local_loss,
                dataclasses.replace(options, loss_fn=loss_fn, accumulate=accumulate),
                dims_of(batch, options.batch_dims),
                layout,
            ),
            mesh=mesh,
            in_specs=(layout.specs, batch_specs(batch, options) if spread else P()),
            out_specs=P(),
        )
        result: tuple[jax.Array, PyTree] = jax.tree.map(
            lambda value: value * share, mapped(params, batch)
        )
        return result

    return jax.jit(loss, static_argnums=(0, 1, 2, 3, 4))


def loss_of_parts(
    program: Any, loss_fn: LossFn, state: TrainState, parts: Sequence[Part]
) -> tuple[jax.Array, PyTree]:
    """Returns loss and auxiliary results of a batch by a `loss_program`."""
    found = [
        program(
            loss_fn,
            state.layout,
            part.accumulate,
            part.spread,
            part.share,
            state.params,
            part.batch,
        )
        for part in parts
    ]
    total: tuple[jax.Array, PyTree]
    total = jax.tree.map(lambda first, *rest: sum(rest, first), *found)
    return total
