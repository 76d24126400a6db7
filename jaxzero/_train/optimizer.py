"""An optimizer on shards: what its state looks like on a rank and on the mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._axis import aval_varies, bind_axis
from jaxzero._empty import empty_as_constants
from jaxzero._layout import Layout, LeafLayout
from jaxzero._train.elementwise import check_any_shape, check_elementwise
from jaxzero._train.extra_args import update
from jaxzero._train.optimizer_layout import check_replicated, match_leaves
from jaxzero._train.options import Optimizer
from jaxzero._tree import PyTree


class ShardedOptimizer:
    """An optimizer that runs on shards, looked at before it runs."""

    def __init__(self, optimizer: Optimizer, mesh: Mesh) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._known: dict[Layout, tuple[PyTree, list[LeafLayout | None]]] = {}
        self.init = jax.jit(self._first, static_argnums=0)
        """(layout, global parameters) -> first state; compiled once per layout."""

    def _first(self, layout: Layout, params: PyTree) -> PyTree:
        """Returns the first state for global parameters; the function of `init`."""

        def init(params: PyTree) -> PyTree:
            axis = bind_axis(layout.names, None, "zero3")
            return self._optimizer.init(empty_as_constants(axis, params))

        mapped: Callable[[PyTree], PyTree] = jax.shard_map(
            init,
            mesh=self._mesh,
            in_specs=(layout.specs,),
            out_specs=self.specs(layout),
        )
        return mapped(params)

    def shapes(self, layout: Layout) -> PyTree:
        """Returns shapes and dtypes of its state on one rank."""
        return self._look(layout)[0]

    def specs(self, layout: Layout) -> PyTree:
        """Returns the specs of its state as global arrays."""
        shapes, owners = self._look(layout)
        return jax.tree.unflatten(
            jax.tree.structure(shapes),
            [P() if o is None else o.spec for o in owners],
        )

    def abstract(self, layout: Layout) -> PyTree:
        """Returns shapes, dtypes and shardings of its state as global arrays."""
        shapes, owners = self._look(layout)
        leaves, structure = jax.tree.flatten(shapes)
        return jax.tree.unflatten(
            structure,
            [
                jax.ShapeDtypeStruct(
                    leaf.shape if owner is None else owner.global_shape,
                    leaf.dtype,
                    sharding=NamedSharding(
                        self._mesh, P() if owner is None else owner.spec
                    ),
                )
                for leaf, owner in zip(leaves, owners, strict=True)
            ],
        )

    def _look(self, layout: Layout) -> tuple[PyTree, list[LeafLayout | None]]:
        if layout not in self._known:
            self._known[layout] = self._checked(layout)
        return self._known[layout]

    def _checked(self, layout: Layout) -> tuple[PyTree, list[LeafLayout | None]]:
        """Traces it, and refuses one whose result depends on how leaves are cut."""
        shards = self._traced(layout, layout.abstract(self._mesh), layout.specs)
        owners = match_leaves(
            shards.state, layout.leaves, lambda leaf: leaf.shard_shape
        )
        check_replicated(shards.state, owners, shards.varying)
        check_elementwise(shards.program, layout.names, shards.results)
        everywhere = NamedSharding(self._mesh, P())
        likes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.stored, sharding=everywhere)
            for leaf in layout.leaves
        ]
        specs = [P() for _ in likes]
        try:
            leaves = self._traced(
                layout, layout.unflatten(likes), layout.unflatten(specs)
            )
        except ValueError:
            # It asks for shards, as jaxzero.clip_by_global_norm with `like` does, so
            # it knows that it does not see leaves.
            return shards.state, owners
        check_any_shape(shards.program, leaves.program, shards.results, leaves.results)
        return shards.state, owners

    def _traced(self, layout: Layout, params: PyTree, specs: PyTree) -> "_Traced":
        """Traces its start and one update."""
        seen: dict[str, Any] = {}

        def probe(params: PyTree) -> PyTree:
            axis = bind_axis(layout.names, None, "zero3")
            lifted = [
                value if leaf.cut.layout == "whole" else axis.lift(value, axis.names)
                for leaf, value in zip(
                    layout.leaves, jax.tree.leaves(params), strict=True
                )
            ]
            params = layout.unflatten(lifted)
            state = self._optimizer.init(params)
            seen["state"] = jax.eval_shape(lambda: state)
            seen["varying"] = [
                aval_varies(jax.typeof(leaf), layout.names)
                for leaf in jax.tree.leaves(state)
            ]
            loss = jnp.zeros((), jnp.float32)
            results = update(
                self._optimizer, params, state, params, value=loss, grad=params
            )
            seen["results"] = jax.eval_shape(lambda: results)
            # Along a new dimension any rank may differ, so nothing is refused here.
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], results)

        mapped = jax.shard_map(
            probe,
            mesh=self._mesh,
            in_specs=(specs,),
            out_specs=P(self._mesh.axis_names),
        )
        (eqn,) = jax.make_jaxpr(mapped)(params).jaxpr.eqns
        return _Traced(program=eqn.params["jaxpr"], **seen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """An optimizer as its first update shows it.

    Attributes:
      program: what it computes, a jaxpr.
      state: shapes of its first state.
      varying: per leaf of the state, whether its type says that it differs by rank.
      results: shapes of (updates, state).
    """

    program: Any
    state: PyTree
    varying: list[bool]
    results: PyTree
