"""How a plan is carried out: the transports, and the choice of one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax import lax

from jaxzero import _ffi
from jaxzero._policy import Policy
from jaxzero._transports import nccl, xla

TRANSPORTS: Mapping[str, Any] = {"nccl": nccl, "xla": xla}
"""Modules with the functions `reduce_scatter` and `all_gather`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The transports of one call, with the reason for them.

    Attributes:
      names: one transport for every platform, or "nccl" for CUDA and "xla" for
        what is not CUDA; which of the two is known when JAX lowers the program.
      reason: why.
    """

    names: tuple[str, ...]
    reason: str

    def dispatch(self, carry_out: Callable[..., Any], *operands: Any) -> Any:
        """Returns `carry_out(name, *operands)` for the transport of the platform."""
        if len(self.names) == 1:
            return carry_out(self.names[0], *operands)
        return lax.platform_dependent(
            *operands,
            cuda=lambda *values: carry_out("nccl", *values),
            default=lambda *values: carry_out("xla", *values),
        )


def choose(policy: Policy) -> Choice:
    """Returns the transports that carry out a call.

    Raises:
      NotImplementedError: if the policy names a transport that cannot run here.
    """
    if policy.transport == "xla":
        return Choice(names=("xla",), reason="asked for")
    obstacle = _ffi.cuda_obstacle()
    if obstacle is None:
        if policy.transport == "nccl":
            return Choice(names=("nccl",), reason="asked for")
        return Choice(names=("nccl", "xla"), reason="nccl on CUDA, xla elsewhere")
    if policy.transport == "nccl":
        raise NotImplementedError(
            f"Policy transport='nccl' cannot run here: {obstacle}. "
            f"Use transport='xla' or 'auto'."
        )
    return Choice(names=("xla",), reason=obstacle)
