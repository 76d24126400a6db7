"""The value and the sharded gradients of a program without annotations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxzero._axis import type_of
from jaxzero._units.body import is_float
from jaxzero._units.find import Finder
from jaxzero._units.inline import Program, evaluate, trace, variables
from jaxzero._units.parameters import Parameters
from jaxzero._units.residuals import Passes, two_passes
from jaxzero._units.scan import Scan
from jaxzero._units.schedule import Bundle, Pending, Turns, tied
from jaxzero._units.sliced import sliced_inputs
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
            lambda item: bool(self._sliced(item.eqns)),
        )

    def value(self, shards: Sequence[Any]) -> Any:
        """Returns what the function returns, without gradients."""
        turns = Turns(self._parameters, shards, [None] * len(shards))
        env = dict(self._program.consts)

        blocks = [self._block(unit, None) for unit in self.units]
        self._forward(turns, blocks, env)
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
        relevant = _relevant(program, self.units)
        blocks = [self._block(unit, relevant) for unit in self.units]
        records, full = self._forward(turns, blocks, env)
        self._backward(
            turns, relevant, env, list(zip(blocks, records, strict=True)), full
        )
        grads = [
            turns.parameters.zeros(shard) if total is None else total
            for total, shard in zip(turns.sums, shards, strict=True)
        ]
        return self._results(env), grads

    def _forward(
        self, turns: Turns, blocks: Sequence["Block"], env: dict[core.Var, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Computes all units; returns their records and the last one's parameters."""
        records = []
        full = turns.gather(blocks[0].entry(), turns.local(blocks[0].entry()))
        last = full
        for i, (unit, block) in enumerate(zip(self.units, blocks, strict=True)):
            reads = [env[var] for var in unit.reads]
            if i:
                # Also a unit that reads nothing of it has its turn after the last.
                before = [env[var] for var in self.units[i - 1].writes]
                reads, _ = tied((reads, before), only=0)
            outs, record, last, full = block.forward(
                turns,
                full,
                reads,
                blocks[i + 1].entry() if i + 1 < len(blocks) else None,
            )
            env.update(zip(unit.writes, outs, strict=True))
            records.append(record)
        return records, last

    def _backward(
        self,
        turns: Turns,
        relevant: set[core.Var],
        env: dict[core.Var, Any],
        done: list[tuple["Block", Any]],
        full: list[Any],
    ) -> None:
        """Adds all gradients to the sums of `turns`."""
        cotangents: dict[core.Var, Any] = {}
        for atom in self._program.outs[:1]:
            if not isinstance(atom, core.Literal):
                cotangents[atom] = turns.zeros(env[atom]) + 1
        pending: Pending | None = None
        active = [i for i, (block, _) in enumerate(done) if block.is_differentiated]
        if active and active[-1] != len(done) - 1:
            bundle = done[active[-1]][0].exit()
            full = turns.gather(bundle, turns.local(bundle))
        for i in reversed(active):
            unit = self.units[i]
            block, record = done[i]
            given = {
                var: cotangents.pop(var) if var in cotangents else turns.zeros(env[var])
                for var in unit.writes
                if var in relevant
            }
            before = [done[j][0].exit() for j in active if j < i]
            values, pending, full = block.backward(
                turns, full, record, given, pending, before[-1] if before else None
            )
            moving = [var for var in unit.reads if var in relevant]
            for var, value in zip(moving, values, strict=True):
                known = cotangents.get(var)
                cotangents[var] = value if known is None else known + value
        turns.reduce(pending)

    def _sliced(self, eqns: Sequence[core.JaxprEqn]) -> Any:
        return sliced_inputs(eqns, self._program.args, self._parameters)

    def _block(self, unit: Unit, relevant: set[core.Var] | None) -> "Block":
        make = Scan if self._sliced(unit.eqns) else Straight
        return make(unit, self._program, self._parameters, relevant)

    def _results(self, env: dict[core.Var, Any]) -> Any:
        return jax.tree.unflatten(
            self._structure,
            [
                atom.val if isinstance(atom, core.Literal) else env[atom]
                for atom in self._program.outs
            ],
        )


class Straight:
    """A unit that is computed once, as `Scan` is for one that loops."""

    def __init__(
        self,
        unit: Unit,
        program: Program,
        parameters: Parameters,
        relevant: set[core.Var] | None,
    ) -> None:
        self._unit = unit
        self._names = [program.args[i] for i in unit.params]
        self._passes: Passes | None = None
        if relevant is not None and any(var in relevant for var in unit.writes):
            self._passes = two_passes(
                self._run,
                [parameters.type_of(i) for i in unit.params],
                [type_of(var.aval) for var in unit.reads],
                [var in relevant for var in unit.reads],
                [var in relevant for var in unit.writes],
            )

    @property
    def is_differentiated(self) -> bool:
        """Whether it has a backward pass."""
        return self._passes is not None

    def entry(self) -> Bundle:
        """Returns what the forward pass starts with."""
        return Bundle.whole(self._unit.params)

    def exit(self) -> Bundle:
        """Returns what the forward pass ends with and the backward pass starts with."""
        return self.entry()

    def forward(
        self,
        turns: Turns,
        full: Sequence[Any],
        reads: Sequence[Any],
        following: Bundle | None,
    ) -> tuple[list[Any], Any, list[Any], list[Any]]:
        """Computes it; returns as `Scan.forward` does."""
        compute = self._passes.forward if self._passes else self._without_record
        (outs, saved), after = turns.forward(compute, full, reads, following)
        return outs, saved, list(full), after

    def backward(
        self,
        turns: Turns,
        full: Sequence[Any],
        record: list[Any],
        cotangents: dict[core.Var, Any],
        pending: Pending | None,
        following: Bundle | None,
    ) -> tuple[list[Any], Pending, list[Any]]:
        """Differentiates it; returns as `Scan.backward` does."""
        assert self._passes is not None
        return turns.backward(
            self._passes.backward,
            full,
            record,
            list(cotangents.values()),
            self.entry(),
            pending,
            following,
        )

    def _run(self, full: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        unit = self._unit
        names = [*self._names, *unit.reads]
        return evaluate(unit.eqns, names, unit.writes, [*full, *values])

    def _without_record(
        self, full: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        return self._run(full, values), []


Block = Scan | Straight


def _relevant(program: Program, units: Sequence[Unit]) -> set[core.Var]:
    """Returns what parameters reach and what reaches the loss, between units."""
    active: set[core.Var] = set()
    for unit in units:
        known = {program.args[i] for i in unit.params} | active
        for eqn in unit.eqns:
            if any(var in known for var in variables(eqn.invars)):
                known.update(var for var in eqn.outvars if is_float(var))
        active |= known & set(unit.writes)
    reaching = set(variables(program.outs[:1]))
    for unit in reversed(units):
        known = {var for var in unit.writes if var in reaching}
        for eqn in reversed(unit.eqns):
            if any(var in known for var in eqn.outvars):
                known.update(variables(eqn.invars))
        reaching |= known & set(unit.reads)
    return {var for var in active & reaching if is_float(var)}
