"""What of a program depends on parameters alone, and where each is needed."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from jaxzero._units.inline import Atom, Program, needed, variables

SMALL = 8
"""How many times smaller than its parameters a value must be to travel by itself."""

_LOOPS = {
    primitives.scan_p,
    primitives.while_p,
    primitives.cond_p,
    primitives.remat_p,
    primitives.custom_vjp_call_p,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One step of a program.

    Attributes:
      eqns: its equations; first those of parameters alone, which every item that
        needs them has.
      params: numbers of the parameters that they read.
      reads: other variables that they read.
      writes: variables that later items may read.
    """

    eqns: tuple[core.JaxprEqn, ...]
    params: frozenset[int]
    reads: tuple[core.Var, ...]
    writes: tuple[core.Var, ...]


def num_bytes(var: Any) -> int:
    """Returns the size of a variable; 0 for what is no array of numbers."""
    dtype = var.aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return int(math.prod(var.aval.shape)) * int(dtype.itemsize)


class Finder:
    """Finds the items of a program whose arguments are parameters.

    Equations of parameters alone (casts, transposes) belong to every item that reads
    their results, so that these are no longer there than the parameters. Small
    results of parameters alone (a norm) are computed once, beside the first item that
    needs the same parameters anyway, and are values like others from then on.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._number = {var: i for i, var in enumerate(program.args)}
        self._roots: dict[core.Var, frozenset[int]] = {
            var: frozenset([i]) for var, i in self._number.items()
        }
        self._pure: list[core.JaxprEqn] = []
        self._small: set[core.Var] = set()
        self._others: list[tuple[int, core.JaxprEqn]] = []
        for place, eqn in enumerate(program.eqns):
            if self._is_pure(eqn):
                self._take(eqn)
            else:
                self._others.append((place, eqn))

    def items(self) -> list[Item]:
        """Returns the items in an order in which each is computed after its reads."""
        found = [(place, self._item(eqn)) for place, eqn in self._others]
        first: dict[int, int] = {}
        for place, item in found:
            for param in item.params:
                first.setdefault(param, place)
        results = [v for v in variables(self._program.outs) if v in self._roots]
        asked = {var for _, item in found for var in item.reads} | set(results)
        end = len(self._program.eqns)
        for var in self._roots:
            if var in asked:
                roots = self._roots[var]
                place = max(first.get(root, -1) for root in roots)
                alone = all(root not in first for root in roots)
                found.append((end if alone else place, self._delivery(var)))
        return _ordered(found)

    def _is_pure(self, eqn: core.JaxprEqn) -> bool:
        inputs = variables(eqn.invars)
        return (
            bool(inputs)
            and not eqn.effects
            and eqn.primitive not in _LOOPS
            and all(var in self._roots for var in inputs)
            and not all(var in self._small for var in inputs)
        )

    def _take(self, eqn: core.JaxprEqn) -> None:
        self._pure.append(eqn)
        roots = frozenset[int]().union(*(self._roots[v] for v in variables(eqn.invars)))
        whole = sum(num_bytes(self._program.args[root]) for root in roots)
        for var in eqn.outvars:
            self._roots[var] = roots
            if num_bytes(var) * SMALL <= whole:
                self._small.add(var)

    def _item(self, eqn: core.JaxprEqn) -> Item:
        inputs = variables(eqn.invars)
        given = {v for v in inputs if v in self._roots and v not in self._small}
        return Item(
            eqns=(*self._chain(given), eqn),
            params=self._params(given),
            reads=_unique(v for v in inputs if v not in given),
            writes=tuple(v for v in eqn.outvars if not isinstance(v, core.DropVar)),
        )

    def _delivery(self, var: core.Var) -> Item:
        return Item(
            eqns=tuple(self._chain([var])),
            params=self._roots[var],
            reads=(),
            writes=(var,),
        )

    def _chain(self, outs: Iterable[core.Var]) -> Sequence[core.JaxprEqn]:
        return needed(self._pure, list(outs))

    def _params(self, given: Iterable[core.Var]) -> frozenset[int]:
        return frozenset[int]().union(*(self._roots[var] for var in given))


def _ordered(found: Sequence[tuple[int, Item]]) -> list[Item]:
    """Returns items by place, but each after those whose results it reads."""
    writer = {var: i for i, (_, item) in enumerate(found) for var in item.writes}
    key: dict[int, int] = {}
    # Deliveries, at the end of the list, read nothing, so they come first here.
    for i in sorted(range(len(found)), key=lambda i: (bool(found[i][1].reads), i)):
        place, item = found[i]
        earlier = [key[writer[var]] for var in item.reads if var in writer]
        key[i] = max([place, *earlier])
    # A delivery stands before what is read at its place.
    order = sorted(key, key=lambda i: (key[i], bool(found[i][1].reads), i))
    return [found[i][1] for i in order]


def _unique(atoms: Iterable[Atom]) -> tuple[core.Var, ...]:
    return tuple(dict.fromkeys(variables(list(atoms))))
