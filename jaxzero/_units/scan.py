"""A `lax.scan` over stacked parameters, gathered layer by layer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxzero._axis import type_of
from jaxzero._units.body import Record, is_float, moving, stacked_turns
from jaxzero._units.inline import Program, evaluate, flat, needed, variables
from jaxzero._units.parameters import Parameters
from jaxzero._units.residuals import Passes, two_passes
from jaxzero._units.schedule import Bundle, Pending, Turns, take
from jaxzero._units.sliced import counts, sliced_inputs
from jaxzero._units.split import Unit


class Scan:
    """A unit that is one scan.

    The last layer in each direction has a turn of its own, so that the unit that
    follows is gathered beside it.

    Args:
      unit: the unit; its last equation is the scan.
      program: the program that it belongs to.
      parameters: the parameters.
      relevant: variables between units that have a cotangent; None for no gradient.
    """

    def __init__(
        self,
        unit: Unit,
        program: Program,
        parameters: Parameters,
        relevant: set[core.Var] | None,
    ) -> None:
        self._unit = unit
        self._scan = scan = unit.eqns[-1]
        self._sliced = sliced_inputs(unit.eqns, program.args, parameters)
        slices = dict.fromkeys(one.param for one in self._sliced.values())
        self.slices = tuple(slices)
        self._rest = [var for i, var in enumerate(scan.invars) if i not in self._sliced]
        self._chain = needed(unit.eqns[:-1], self._rest)
        asked = {var for eqn in self._chain for var in variables(eqn.invars)}
        asked |= set(variables(self._rest))
        self.whole = tuple(i for i in unit.params if program.args[i] in asked)
        self._whole_vars = [program.args[i] for i in self.whole]
        self._consts, self._carry, _ = counts(scan)
        length, self._reverse = scan.params["length"], scan.params["reverse"]
        self._order = list(range(length))[:: -1 if self._reverse else 1]
        self._body = flat(scan.params["jaxpr"])
        self._passes: Passes | None = None
        self._stacked: list[int] = []
        if relevant is not None and any(var in relevant for var in unit.writes):
            self._differentiate(parameters, relevant)

    @property
    def is_differentiated(self) -> bool:
        """Whether it has a backward pass."""
        return self._passes is not None

    def entry(self) -> Bundle:
        """Returns what the forward pass starts with."""
        return Bundle.whole(self.whole) + self._layer(self._order[0])

    def exit(self) -> Bundle:
        """Returns what the forward pass ends with and the backward pass starts with."""
        return Bundle.whole(self.whole) + self._layer(self._order[-1])

    def forward(
        self,
        turns: Turns,
        full: Sequence[Any],
        reads: Sequence[Any],
        following: Bundle | None,
    ) -> tuple[list[Any], Record, list[Any], list[Any]]:
        """Runs the scan.

        Returns:
          What later units read, the record, the parameters at the end, and those of
          `following`.
        """
        whole, layer = full[: len(self.whole)], full[len(self.whole) :]
        consts, carry, xs = self._parts(self._prepared(whole, reads))

        def turn(
            carry: Sequence[Any], layer: Sequence[Any], at: Any, next_: Bundle | None
        ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
            values = [*consts, *carry, *(take(x, at) for x in xs)]
            (outs, saved), after = turns.forward(self._compute, layer, values, next_)
            stacked = [saved[i] for i in self._stacked]
            return outs[: self._carry], outs[self._carry :], stacked, after

        def step(state: Any, at: jax.Array) -> tuple[Any, Any]:
            carry, layer = state
            next_ = self._layer(at + self._step)
            new, ys, stacked, after = turn(carry, layer, at, next_)
            return (new, after), (ys, stacked)

        ys: list[Any] = []
        stacks: list[Any] = []
        if len(self._order) > 1:
            (carry, layer), (ys, stacks) = lax.scan(
                step,
                (carry, list(layer)),
                jnp.asarray(sorted(self._order[:-1]), jnp.int32),
                reverse=self._reverse,
                unroll=self._scan.params["unroll"],
            )
        carry, last_ys, last, after = turn(carry, layer, self._order[-1], following)
        results = dict(
            zip(
                self._scan.outvars,
                [*carry, *stacked_turns(ys, None, last_ys, self._reverse)],
                strict=True,
            )
        )
        record = Record(list(reads), stacks, last, carry)
        outs = [results[var] for var in self._unit.writes]
        return outs, record, [*whole, *layer], after

    def backward(
        self,
        turns: Turns,
        full: Sequence[Any],
        record: Record,
        cotangents: dict[core.Var, Any],
        pending: Pending | None,
        following: Bundle | None,
    ) -> tuple[list[Any], Pending, list[Any]]:
        """Differentiates the scan.

        Returns:
          Cotangents of the reads that have one, the gradients that are left to reduce,
          and the parameters of `following`.
        """
        whole, layer = full[: len(self.whole)], list(full[len(self.whole) :])
        rest = self._prepared(whole, record.reads)
        consts, _, xs = self._parts(rest)
        hoisted = evaluate(
            needed(self._known.eqns, self._hoisted),
            [*self._const_vars, *self._known.consts],
            self._hoisted,
            [*consts, *self._known.consts.values()],
        )
        outvars = self._scan.outvars
        carried: list[Any] = [
            cotangents[var] if var in cotangents else turns.zeros(value)
            for var, value, flag in zip(
                outvars[: self._carry], record.carry, self._moves, strict=True
            )
            if flag
        ]
        ys = [cotangents[var] for var in outvars[self._carry :] if var in cotangents]

        def turn(
            turns: Turns,
            at: Any,
            stacked: Sequence[Any],
            layer: Sequence[Any],
            carried: Sequence[Any],
            pending: Pending | None,
            next_: Bundle | None,
        ) -> Any:
            saved = self._saved(consts, [take(x, at) for x in xs], hoisted, stacked)
            values, pending, before = turns.backward(
                self._pull,
                layer,
                saved,
                [*carried, *(take(y, at) for y in ys)],
                self._layer(at),
                pending,
                next_,
            )
            return *self._active_parts(values), pending, before

        order, step = self._order, self._step
        only = len(order) == 1
        of_consts, carried, first_xs, pending, layer = turn(
            turns,
            order[-1],
            record.last,
            layer,
            carried,
            pending,
            following if only else self._layer(order[-2]),
        )
        loop_xs: list[Any] = []
        last_xs: list[Any] | None = None
        if len(order) > 2:
            turns.start(self.slices)

            def body(state: Any, at: jax.Array) -> tuple[Any, Any]:
                carried, layer, grads, total, sums = state
                inner = turns.with_sums(self.slices, sums)
                waits = self._layer(at + step) if grads else Bundle(())
                added, carried, of_xs, left, before = turn(
                    inner,
                    at,
                    [take(s, at - self._base) for s in record.stacks],
                    layer,
                    carried,
                    Pending(waits, grads),
                    self._layer(at - step),
                )
                total = [a + b for a, b in zip(total, added, strict=True)]
                sums = [inner.sums[i] for i in self.slices]
                return (carried, before, left.grads, total, sums), of_xs

            sums = [turns.sums[i] for i in self.slices]
            state, loop_xs = lax.scan(
                body,
                (carried, layer, pending.grads, of_consts, sums),
                jnp.asarray(sorted(order[1:-1]), jnp.int32),
                reverse=not self._reverse,
                unroll=self._scan.params["unroll"],
            )
            carried, layer, grads, of_consts, sums = state
            turns.put(self.slices, sums)
            pending = Pending(self._layer(order[1]) if grads else Bundle(()), grads)
        if not only:
            added, carried, last_xs, pending, layer = turn(
                turns,
                order[0],
                [take(s, order[0] - self._base) for s in record.stacks],
                layer,
                carried,
                pending,
                following,
            )
            of_consts = [a + b for a, b in zip(of_consts, added, strict=True)]
        of_xs = stacked_turns(loop_xs, last_xs, first_xs, self._reverse)
        of_whole, of_reads = self._to_reads(
            whole, record.reads, [*of_consts, *carried], of_xs
        )
        left = Pending(Bundle.whole(self.whole), of_whole)
        if not turns.parameters.overlap:
            turns.reduce(left)
            return of_reads, pending, layer
        return of_reads, pending + left, layer

    @property
    def _step(self) -> int:
        return -1 if self._reverse else 1

    @property
    def _base(self) -> int:
        return min(self._order[:-1])

    def _layer(self, at: Any) -> Bundle:
        return Bundle(tuple((i, at) for i in self.slices))

    def _prepared(self, whole: Sequence[Any], reads: Sequence[Any]) -> list[Any]:
        """Returns the inputs of the scan that are no sliced parameters."""
        return evaluate(
            self._chain,
            [*self._whole_vars, *self._unit.reads],
            self._rest,
            [*whole, *reads],
        )

    def _parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        split = self._consts + self._carry
        return (
            list(values[: self._consts]),
            list(values[self._consts : split]),
            list(values[split:]),
        )

    def _run(self, layer: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Computes one layer: (its parameters, constants, carry, xs) -> carry, ys."""
        by_param = dict(zip(self.slices, layer, strict=True))
        others = iter(values)
        inputs = []
        for place in range(len(self._scan.invars)):
            one = self._sliced.get(place)
            if one is None:
                inputs.append(next(others))
                continue
            value = by_param[one.param]
            for dtype in one.dtypes:
                value = lax.convert_element_type(value, dtype)
            inputs.append(value)
        body = self._body
        return evaluate(
            body.eqns,
            [*body.args, *body.consts],
            body.outs,
            [*inputs, *body.consts.values()],
        )

    @property
    def _compute(self) -> Callable[..., tuple[list[Any], list[Any]]]:
        if self._passes is not None:
            return self._passes.forward
        return lambda layer, values: (self._run(layer, values), [])

    def _differentiate(self, parameters: Parameters, relevant: set[core.Var]) -> None:
        derived = {*self._whole_vars, *(v for e in self._chain for v in e.outvars)}
        has: list[bool] = [
            not isinstance(v, core.Literal)
            and is_float(v)
            and (v in derived or v in relevant)
            for v in self._rest
        ]
        consts, moves, xs = self._parts(has)
        self._moves = moving(self._body, set(self._sliced), consts, moves, xs)
        self._active = [*consts, *self._moves, *xs]
        self._wanted = has
        self._relevant = relevant
        outs = self._scan.outvars[self._carry :]
        rest_args = [a for i, a in enumerate(self._body.args) if i not in self._sliced]
        self._passes = passes = two_passes(
            self._run,
            [parameters.type_of(i, layer=True) for i in self.slices],
            [type_of(var.aval) for var in rest_args],
            self._active,
            [*self._moves, *(var in relevant for var in outs)],
        )
        self._pull = passes.backward
        self._known = passes.program
        values = passes.program.args[len(self.slices) :]
        self._const_vars, _, xs_vars = self._parts(values)
        fixed = {*self._const_vars, *passes.program.consts}
        for eqn in passes.program.eqns:
            if not eqn.effects and all(v in fixed for v in variables(eqn.invars)):
                fixed.update(eqn.outvars)
        saved = passes.saved
        given = set(self._const_vars) | set(xs_vars)
        self._xs_vars = xs_vars
        self._hoisted = [v for v in saved if v in fixed and v not in given]
        self._stacked = [
            i for i, v in enumerate(saved) if v not in fixed and v not in given
        ]

    def _saved(
        self,
        consts: Sequence[Any],
        xs: Sequence[Any],
        hoisted: Sequence[Any],
        stacked: Sequence[Any],
    ) -> list[Any]:
        """Returns what a turn needs of its forward pass, in order."""
        assert self._passes is not None
        saved = self._passes.saved
        known = dict(zip(self._const_vars, consts, strict=True))
        known |= zip(self._xs_vars, xs, strict=True)
        known |= zip(self._hoisted, hoisted, strict=True)
        known |= zip((saved[i] for i in self._stacked), stacked, strict=True)
        return [known[var] for var in saved]

    def _active_parts(
        self, values: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns cotangents of constants, carry and xs."""
        consts, moves, _ = self._parts(self._active)
        a = sum(consts)
        b = a + sum(moves)
        return list(values[:a]), list(values[a:b]), list(values[b:])

    def _to_reads(
        self,
        whole: Sequence[Any],
        reads: Sequence[Any],
        of_consts_and_carry: Sequence[Any],
        of_xs: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Takes cotangents of the scan's inputs back to parameters and reads."""
        consts, moves, _ = self._parts(self._wanted)
        flags = [*consts, *self._moves]
        kept = [
            value
            for value, wanted in zip(
                of_consts_and_carry,
                [w for w, f in zip([*consts, *moves], flags, strict=True) if f],
                strict=True,
            )
            if wanted
        ]
        moving = [i for i, var in enumerate(self._unit.reads) if var in self._relevant]

        def wanted(whole: list[Any], some: list[Any]) -> list[Any]:
            given = list(reads)
            for i, value in zip(moving, some, strict=True):
                given[i] = value
            rest = self._prepared(whole, given)
            return [v for v, flag in zip(rest, self._wanted, strict=True) if flag]

        pull = jax.vjp(wanted, list(whole), [reads[i] for i in moving])[1]
        found: tuple[list[Any], list[Any]] = pull([*kept, *of_xs])
        return found
