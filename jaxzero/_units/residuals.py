"""A function of parameters in two passes, which keeps none of its parameters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxzero._units.inline import Atom, Program, evaluate, needed, trace, variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """The forward pass of a function, and its backward pass from what was kept.

    The pull-back of `jax.vjp` holds what the backward pass needs of the forward pass.
    What of this depends on parameters alone, such as a parameter or its transpose, is
    dropped, and computed again from the parameters that the backward pass is given.

    Attributes:
      program: (parameters, values) -> results, then all that the pull-back holds.
      num_params: the first arguments of it.
      num_outs: the first results of it.
      saved: variables that are kept.
      held: per leaf of the pull-back, its variable or literal.
      pull: structure of the pull-back.
    """

    program: Program
    num_params: int
    num_outs: int
    saved: tuple[core.Var, ...]
    held: tuple[Atom, ...]
    pull: Any

    def forward(
        self, params: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns results, and what is kept for the backward pass."""
        program = self.program
        outs = [*program.outs[: self.num_outs], *self.saved]
        consts = program.consts
        found = evaluate(
            needed(program.eqns, outs, effects=True),
            [*program.args, *consts],
            outs,
            [*params, *values, *consts.values()],
        )
        return found[: self.num_outs], found[self.num_outs :]

    def backward(
        self, params: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns cotangents of parameters, and of the values that have one."""
        program = self.program
        kept = set(self.saved)
        is_kept = [_is_var(atom) and atom in kept for atom in self.held]
        again = _chosen(self.held, is_kept, False)
        known = [*program.args[: self.num_params], *program.consts]
        values = evaluate(
            needed(program.eqns, again),
            known,
            again,
            [*params, *program.consts.values()],
        )
        derived = iter(values)
        by_var = dict(zip(self.saved, saved, strict=True))
        leaves = [
            by_var[atom] if flag else next(derived)
            for atom, flag in zip(self.held, is_kept, strict=True)
        ]
        grads: tuple[list[Any], list[Any]]
        grads = jax.tree.unflatten(self.pull, leaves)(list(cotangents))
        return grads


def two_passes(
    fn: Callable[..., list[Any]],
    params: Sequence[Any],
    values: Sequence[Any],
    active: Sequence[bool],
    relevant: Sequence[bool],
) -> Passes:
    """Returns the passes of a function.

    Args:
      fn: (parameters, values) -> results, all lists.
      params: types of the parameters.
      values: types of the values.
      active: per value, whether its cotangent is asked for.
      relevant: per result, whether it has a cotangent.
    """
    pulls: list[Any] = []

    def forward(params: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        def run(params: list[Any], wrt: list[Any]) -> tuple[list[Any], list[Any]]:
            moving = iter(wrt)
            outs = fn(
                params,
                [
                    next(moving) if is_active else value
                    for value, is_active in zip(values, active, strict=True)
                ],
            )
            return _chosen(outs, relevant, True), _chosen(outs, relevant, False)

        wrt = _chosen(values, active, True)
        some, pull, others = jax.vjp(run, params, wrt, has_aux=True)
        leaves, structure = jax.tree.flatten(pull)
        pulls.append(structure)
        first, second = iter(some), iter(others)
        return [next(first if flag else second) for flag in relevant], leaves

    program, _ = trace(forward, list(params), list(values))
    held = program.outs[len(relevant) :]
    free = _free(program, len(params))
    return Passes(
        program=program,
        num_params=len(params),
        num_outs=len(relevant),
        saved=tuple(dict.fromkeys(v for v in variables(held) if v not in free)),
        held=held,
        pull=pulls[0],
    )


def _is_var(atom: Atom) -> bool:
    return not isinstance(atom, core.Literal)


def _chosen(values: Sequence[Any], flags: Sequence[bool], wanted: bool) -> list[Any]:
    return [v for v, flag in zip(values, flags, strict=True) if flag == wanted]


def _free(program: Program, num_params: int) -> set[core.Var]:
    """Returns what depends on parameters and constants alone."""
    free = {*program.args[:num_params], *program.consts}
    for eqn in program.eqns:
        if not eqn.effects and all(var in free for var in variables(eqn.invars)):
            free.update(eqn.outvars)
    return free
