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


def choose(policy: Policy, platform: str | None = None) -> Choice:
    """Returns the transports that carry out a call.

    Args:
      policy: names a transport, or leaves the choice.
      platform: platform of the mesh's devices, if it is known while tracing.

    Raises:
      NotImplementedError: if the policy names a transport that cannot run here, or
        none can.
    """
    obstacle = _ffi.cuda_obstacle()
    on_gpu = platform in ("gpu", "cuda")
    if obstacle is not None and on_gpu:
        # Neither transport has kernels for the mesh, and XLA would only say that a
        # custom call is not registered.
        raise NotImplementedError(
            f"the mesh has NVIDIA GPUs, but {obstacle}. Build jaxzero with "
            f"JAXZERO_CUDA=on (see BUILD.md), or use a mesh of CPU devices."
        )
    if policy.transport == "xla":
        return Choice(names=("xla",), reason="asked for")
    if policy.transport == "nccl":
        found = obstacle
        if found is None and platform is not None and not on_gpu:
            found = f"the mesh has devices of platform {platform!r}"
        if found is not None:
            raise NotImplementedError(
                f"Policy transport='nccl' cannot run here: {found}. "
                f"Use transport='xla' or 'auto'."
            )
        return Choice(names=("nccl",), reason="asked for")
    if obstacle is not None:
        return Choice(names=("xla",), reason=obstacle)
    return Choice(names=("nccl", "xla"), reason="nccl on CUDA, xla elsewhere")
