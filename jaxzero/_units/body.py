"""The body of a scan: which carries have a cotangent, and what all turns gave."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jaxzero._units.inline import Program, variables


@dataclasses.dataclass(frozen=True)
class Record:
    """What the forward pass leaves for the backward pass.

    Attributes:
      reads: values that the scan was given.
      stacks: what was kept of all layers but the last.
      last: what was kept of the last layer.
      carry: the last carry.
    """

    reads: list[Any]
    stacks: list[Any]
    last: list[Any]
    carry: list[Any]


def moving(
    body: Program,
    sliced: set[int],
    consts: Sequence[bool],
    carry: Sequence[bool],
    xs: Sequence[bool],
) -> list[bool]:
    """Returns which carries have a cotangent, in any turn.

    Args:
      body: (constants, carry, xs) -> (carry, ys).
      sliced: the arguments that are parameters of a layer.
      consts: per constant, whether it has one.
      carry: per carry, whether the first one has.
      xs: per further argument, whether it has.
    """
    moves = list(carry)
    while True:
        others = iter([*consts, *moves, *xs])
        active = {var for i, var in enumerate(body.args) if i in sliced or next(others)}
        for eqn in body.eqns:
            if any(var in active for var in variables(eqn.invars)):
                active.update(eqn.outvars)
        new = [
            moved
            or (not isinstance(out, core.Literal) and out in active and is_float(out))
            for moved, out in zip(moves, body.outs[: len(moves)], strict=True)
        ]
        if new == moves:
            return moves
        moves = new


def stacked_turns(
    loop: Sequence[Any],
    first: Sequence[Any] | None,
    last: Sequence[Any],
    reverse: bool,
) -> list[Any]:
    """Returns stacks of what the first turn, the loop and the last turn gave."""
    parts = [] if first is None else [[x[None] for x in first]]
    parts += [list(loop)] if loop else []
    parts += [[x[None] for x in last]]
    if reverse:
        parts = parts[::-1]
    return [
        jnp.concatenate(p) if len(p) > 1 else p[0] for p in zip(*parts, strict=True)
    ]


def is_float(var: Any) -> bool:
    """Says whether a variable can have a cotangent."""
    return bool(jnp.issubdtype(var.aval.dtype, jnp.inexact))
