"""Which inputs of a scan are stacked parameters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from jaxzero._units.parameters import Parameters


@dataclasses.dataclass(frozen=True)
class Sliced:
    """A stacked parameter that a scan goes through.

    Attributes:
      param: its number.
      dtypes: what it is converted to, one after the other.
    """

    param: int
    dtypes: tuple[Any, ...]


def sliced_inputs(
    eqns: Sequence[core.JaxprEqn], args: Sequence[core.Var], parameters: Parameters
) -> dict[int, Sliced]:
    """Returns, per input of the scan that ends some equations, its parameter.

    Args:
      eqns: the equations.
      args: variables of all parameters.
      parameters: their layouts.
    """
    if not eqns or eqns[-1].primitive is not primitives.scan_p:
        return {}
    scan = eqns[-1]
    number = {var: i for i, var in enumerate(args)}
    writer = {var: eqn for eqn in eqns for var in eqn.outvars}
    consts, carry, _ = counts(scan)
    found = {}
    for place in range(consts + carry, len(scan.invars)):
        var: Any = scan.invars[place]
        dtypes: list[Any] = []
        if isinstance(var, core.Literal):
            continue
        while var in writer and writer[var].primitive.name == "convert_element_type":
            dtypes.append(var.aval.dtype)
            (var,) = writer[var].invars
        if var in number and parameters.has_layers(number[var]):
            found[place] = Sliced(number[var], tuple(reversed(dtypes)))
    return found


def counts(scan: core.JaxprEqn) -> tuple[int, int, int]:
    """Returns how many inputs are constants, carries and scanned."""
    consts, carry, xs = (len(list(part)) for part in scan.params["ft_in"].unpack())
    return consts, carry, xs
