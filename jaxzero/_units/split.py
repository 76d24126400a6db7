"""Units: runs of items whose parameters are gathered together."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jaxzero._units.find import Item, num_bytes
from jaxzero._units.inline import Atom, variables

MARK = "jaxzero_unit_boundary"
"""Name of a value after which a unit ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Equations whose parameters are there together.

    Attributes:
      eqns: its equations.
      params: numbers of the parameters that they read.
      reads: variables that they read from earlier units or from around the program.
      writes: variables that later units or the results need.
    """

    eqns: tuple[core.JaxprEqn, ...]
    params: tuple[int, ...]
    reads: tuple[core.Var, ...]
    writes: tuple[core.Var, ...]


def split(
    items: Sequence[Item],
    outs: Sequence[Atom],
    size: Callable[[int], int],
    limit: int,
    is_alone: Callable[[Item], bool],
) -> list[Unit]:
    """Returns the units of a program.

    A unit ends where the parameters of the next item would make it larger than
    `limit`, at the place since its last own parameter where the fewest bytes live.

    Args:
      items: items in order.
      outs: results of the program.
      size: bytes of a parameter.
      limit: bytes of a unit, unless one item needs more.
      is_alone: says whether an item is a unit by itself.
    """
    lives = _live_bytes(items, outs)
    ends: list[int] = []
    have: set[int] = set()
    last = begin = 0  # the item after the last one that reads parameters of this unit
    for i, item in enumerate(items):
        alone = is_alone(item)
        more = item.params - have
        if have and more and (alone or sum(map(size, have | more)) > limit):
            begin = min(
                range(max(last, begin + 1), i + 1), key=lambda j: (lives[j], -j)
            )
            ends.append(begin)
            have = set()
        have |= item.params
        if item.params:
            last = i + 1
        if alone:
            ends.append(i)
        if (alone or _is_marked(item)) and i + 1 < len(items):
            begin = last = i + 1
            ends.append(begin)
            have = set()
    bounds = sorted({0, *ends, len(items)})
    parts = [items[a:b] for a, b in itertools.pairwise(bounds)]
    return _units(parts, outs)


def _is_marked(item: Item) -> bool:
    return any(eqn.params.get("name") == MARK for eqn in item.eqns)


def _live_bytes(items: Sequence[Item], outs: Sequence[Atom]) -> list[int]:
    """Returns, per place before an item, the bytes computed before and read after."""
    lives = [0] * (len(items) + 1)
    live: set[Any] = set(variables(outs))
    written = {var for item in items for var in item.writes}
    total = sum(num_bytes(var) for var in live if var in written)
    for i in reversed(range(len(items))):
        lives[i + 1] = total
        for var in items[i].writes:
            if var in live:
                live.remove(var)
                total -= num_bytes(var)
        for var in items[i].reads:
            if var in written and var not in live:
                live.add(var)
                total += num_bytes(var)
    return lives


def _units(parts: Sequence[Sequence[Item]], outs: Sequence[Atom]) -> list[Unit]:
    units: list[Unit] = []
    later = set(variables(outs))
    for part in reversed(parts):
        written = {var for item in part for var in item.writes}
        reads = dict.fromkeys(
            var for item in part for var in item.reads if var not in written
        )
        eqns = dict.fromkeys(id(eqn) for item in part for eqn in item.eqns)
        by_id = {id(eqn): eqn for item in part for eqn in item.eqns}
        units.append(
            Unit(
                eqns=tuple(by_id[key] for key in eqns),
                params=tuple(sorted(frozenset[int]().union(*(i.params for i in part)))),
                reads=tuple(reads),
                writes=tuple(
                    var for item in part for var in item.writes if var in later
                ),
            )
        )
        later |= set(reads)
    return units[::-1]
