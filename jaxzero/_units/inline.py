"""A function as one flat list of equations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

Atom = Any
"""A `Var` or a `Literal`."""

_DEBUG = core.DebugInfo("jaxzero", "part of a program", None, None)
_CALLS = {primitives.jit_p: "jaxpr", primitives.closed_call_p: "call_jaxpr"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Equations in order, without calls around some of them.

    Attributes:
      eqns: the equations; no two write the same variable.
      args: variables of the arguments.
      consts: values that the function closes over, by their variables.
      outs: variables or literals of the results.
    """

    eqns: tuple[core.JaxprEqn, ...]
    args: tuple[core.Var, ...]
    consts: dict[core.Var, Any]
    outs: tuple[Atom, ...]


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Returns the program of a function, and the shapes that it returns."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return flat(closed), shapes


def flat(closed: core.ClosedJaxpr) -> Program:
    """Returns a closed jaxpr's program."""
    eqns: list[core.JaxprEqn] = []
    consts: dict[core.Var, Any] = {}
    args = tuple(core.Var(var.aval) for var in closed.jaxpr.invars)
    outs = _inline(closed, args, eqns, consts)
    return Program(eqns=tuple(eqns), args=args, consts=consts, outs=tuple(outs))


def _inline(
    closed: core.ClosedJaxpr,
    args: Sequence[Atom],
    eqns: list[core.JaxprEqn],
    consts: dict[core.Var, Any],
) -> list[Atom]:
    """Appends the equations of a jaxpr, under names of their own."""
    jaxpr = closed.jaxpr
    names: dict[core.Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        names[var] = core.Var(var.aval)
        consts[names[var]] = value

    def atom(old: Atom) -> Atom:
        return old if isinstance(old, core.Literal) else names[old]

    for eqn in jaxpr.eqns:
        given = [atom(var) for var in eqn.invars]
        inner = _CALLS.get(eqn.primitive)
        if inner is not None:
            results = _inline(eqn.params[inner], given, eqns, consts)
        else:
            results = [
                var if isinstance(var, core.DropVar) else core.Var(var.aval)
                for var in eqn.outvars
            ]
            eqns.append(eqn.replace(invars=given, outvars=results))
        names.update(zip(eqn.outvars, results, strict=True))
    return [atom(var) for var in jaxpr.outvars]


def variables(atoms: Sequence[Atom]) -> list[core.Var]:
    """Returns what of some atoms is a variable."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def needed(
    eqns: Sequence[core.JaxprEqn], outs: Sequence[Atom], *, effects: bool = False
) -> list[core.JaxprEqn]:
    """Returns the equations that some results (and effects) need, in order."""
    live = set(variables(outs))
    kept = []
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or any(var in live for var in eqn.outvars):
            kept.append(eqn)
            live.update(variables(eqn.invars))
    return kept[::-1]


def evaluate(
    eqns: Sequence[core.JaxprEqn],
    args: Sequence[core.Var],
    outs: Sequence[Atom],
    values: Sequence[Any],
) -> list[Any]:
    """Computes results of equations from values of variables."""
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns))
    jaxpr = core.Jaxpr(
        constvars=[],
        invars=list(args),
        outvars=list(outs),
        eqns=list(eqns),
        effects=effects,
        debug_info=_DEBUG,
    )
    found: list[Any] = jax.core.eval_jaxpr(jaxpr, [], *values)
    return found
