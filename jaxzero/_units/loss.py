"""The value and the sharded gradients of a program without annotations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxzero._axis import type_of
from jaxzero._units.find import Finder
from jaxzero._units.inline import Program, evaluate, trace, variables
from jaxzero._units.parameters import Parameters
from jaxzero._units.residuals import Passes, two_passes
from jaxzero._units.schedule import Bundle, Pending, Turns
from jaxzero._units.split import Unit, split

UNITS = 16
"""A program has about so many units, unless it asks for others."""


class UnitLoss:
    """A function of parameters, cut into units.

    Args:
      fn: (list of full parameters) -> (scalar to differentiate, anything). It may
        close over values that are being traced, such as a batch.
      parameters: how its parameters are gathered and reduced.
      unit_bytes: parameters of a unit, gathered; None for the default.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], tuple[Any, Any]],
        parameters: Parameters,
        unit_bytes: int | None = None,
    ) -> None:
        self._parameters = parameters
        types = [parameters.type_of(i) for i in range(len(parameters.leaves))]
        self._program, shapes = trace(fn, types)
        self._structure = jax.tree.structure(shapes)
        sizes = [math.prod(t.shape) * t.dtype.itemsize for t in types]
        limit = unit_bytes or max(sum(sizes) // UNITS, max(sizes, default=0))
        self.units = split(
            Finder(self._program).items(),
            self._program.outs,
            sizes.__getitem__,
            limit,
            lambda item: False,
        )

    def value(self, shards: Sequence[Any]) -> Any:
        """Returns what the function returns, without gradients."""
        turns = Turns(self._parameters, shards, [None] * len(shards))
        env = dict(self._program.consts)

        def compute(unit: Unit) -> Any:
            return lambda full, values: _evaluate(unit, self._program, full, values)

        full = self._first(turns)
        for i, unit in enumerate(self.units):
            outs, full = turns.forward(
                compute(unit),
                full,
                [env[var] for var in unit.reads],
                self._after(i, env),
                self._bundle(i + 1),
            )
            env.update(zip(unit.writes, outs, strict=True))
        return self._results(env)

    def value_and_grad(
        self, shards: Sequence[Any], sums: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Returns what the function returns, and sums with its gradients added.

        Args:
          shards: per parameter, this rank's shard.
          sums: per parameter, shards of gradients to add to, or None.
        """
        turns = Turns(self._parameters, shards, sums)
        program = self._program
        env = dict(program.consts)
        flows = _Flow(program, self.units)
        kept: list[tuple[Passes | None, list[Any]]] = []
        full = self._first(turns)
        last_full = full
        for i, unit in enumerate(self.units):
            passes = self._passes(unit, flows)
            outs, following = turns.forward(
                _forward(unit, program, passes),
                full,
                [env[var] for var in unit.reads],
                self._after(i, env),
                self._bundle(i + 1),
            )
            results, saved = outs
            env.update(zip(unit.writes, results, strict=True))
            kept.append((passes, saved))
            last_full, full = full, following
        self._backward(turns, flows, env, kept, last_full)
        grads = [
            turns.parameters.zeros(shard) if total is None else total
            for total, shard in zip(turns.sums, shards, strict=True)
        ]
        return self._results(env), grads

    def _backward(
        self,
        turns: Turns,
        flows: "_Flow",
        env: dict[core.Var, Any],
        kept: list[tuple[Passes | None, list[Any]]],
        full: list[Any],
    ) -> None:
        """Adds all gradients to the sums of `turns`."""
        cotangents: dict[core.Var, Any] = {}
        for atom in self._program.outs[:1]:
            if not isinstance(atom, core.Literal):
                cotangents[atom] = _typed_like(jnp.ones_like, env[atom], turns)
        pending: Pending | None = None
        active = [i for i, (passes, _) in enumerate(kept) if passes is not None]
        if active and active[-1] != len(kept) - 1:
            bundle = self._bundle(active[-1])
            full = turns.gather(bundle, turns.local(bundle))
        for i in reversed(active):
            unit = self.units[i]
            passes, saved = kept[i]
            assert passes is not None
            given = [
                cotangents.pop(var)
                if var in cotangents
                else _typed_like(jnp.zeros_like, env[var], turns)
                for var in unit.writes
                if var in flows.relevant
            ]
            before = active[active.index(i) - 1] if i != active[0] else None
            values, pending, full = turns.backward(
                passes.backward,
                full,
                saved,
                given,
                Bundle(unit.params),
                pending,
                None if before is None else self._bundle(before),
            )
            moving = [var for var in unit.reads if var in flows.relevant]
            for var, value in zip(moving, values, strict=True):
                known = cotangents.get(var)
                cotangents[var] = value if known is None else known + value
        if turns.parameters.overlap:
            turns.reduce(pending)

    def _first(self, turns: Turns) -> list[Any]:
        bundle = self._bundle(0)
        return turns.gather(bundle, turns.local(bundle))

    def _bundle(self, i: int) -> Bundle | None:
        return Bundle(self.units[i].params) if i < len(self.units) else None

    def _after(self, i: int, env: dict[core.Var, Any]) -> list[Any]:
        """Returns what exists once the unit before is done."""
        return [env[var] for var in self.units[i - 1].writes] if i else []

    def _passes(self, unit: Unit, flows: "_Flow") -> Passes | None:
        relevant = [var in flows.relevant for var in unit.writes]
        if not any(relevant):
            return None
        return two_passes(
            lambda params, values: _evaluate(unit, self._program, params, values),
            [self._parameters.type_of(i) for i in unit.params],
            [type_of(var.aval) for var in unit.reads],
            [var in flows.relevant for var in unit.reads],
            relevant,
        )

    def _results(self, env: dict[core.Var, Any]) -> Any:
        return jax.tree.unflatten(
            self._structure,
            [
                atom.val if isinstance(atom, core.Literal) else env[atom]
                for atom in self._program.outs
            ],
        )


class _Flow:
    """Which variables between units have a cotangent.

    Attributes:
      relevant: those that depend on parameters and that the loss depends on.
    """

    def __init__(self, program: Program, units: Sequence[Unit]) -> None:
        active: set[core.Var] = set()
        for unit in units:
            known = {program.args[i] for i in unit.params} | active
            for eqn in unit.eqns:
                if any(var in known for var in variables(eqn.invars)):
                    known.update(var for var in eqn.outvars if _is_float(var))
            active |= known & set(unit.writes)
        reaching = set(variables(program.outs[:1]))
        for unit in reversed(units):
            known = {var for var in unit.writes if var in reaching}
            for eqn in reversed(unit.eqns):
                if any(var in known for var in eqn.outvars):
                    known.update(variables(eqn.invars))
            reaching |= known & set(unit.reads)
        self.relevant = {var for var in active & reaching if _is_float(var)}


def _is_float(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.inexact))


def _evaluate(
    unit: Unit, program: Program, full: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    names = [program.args[i] for i in unit.params]
    return evaluate(unit.eqns, [*names, *unit.reads], unit.writes, [*full, *values])


def _forward(unit: Unit, program: Program, passes: Passes | None) -> Any:
    if passes is not None:
        return passes.forward
    return lambda full, values: (_evaluate(unit, program, full, values), [])


def _typed_like(make: Any, value: Any, turns: Turns) -> Any:
    return turns.parameters.axis.lift_to(make(value), jax.typeof(value))
