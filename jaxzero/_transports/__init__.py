"""How a plan is carried out: the transports, and the choice of one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

from jaxzero import _ffi
from jaxzero._policy import Policy
from jaxzero._transports.nccl import Nccl
from jaxzero._transports.transport import Transport
from jaxzero._transports.xla import Xla

GPU: Transport = Nccl()
"""The transport of NVIDIA GPUs."""
ANY: Transport = Xla()
"""The transport of any device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The transports of one call, with the reason for them.

    Attributes:
      transports: one for every platform, or that of CUDA and that of what is not
        CUDA; which of the two is known when JAX lowers the program.
      reason: why.
    """

    transports: tuple[Transport, ...]
    reason: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the transports."""
        return tuple(transport.name for transport in self.transports)

    def dispatch(self, carry_out: Callable[..., Any], *operands: Any) -> Any:
        """Returns `carry_out(transport, *operands)` for that of the platform."""
        if len(self.transports) == 1:
            return carry_out(self.transports[0], *operands)
        gpu, other = self.transports
        return lax.platform_dependent(
            *operands,
            cuda=lambda *values: carry_out(gpu, *values),
            default=lambda *values: carry_out(other, *values),
        )


def transport_for_gpus(policy: Policy) -> Transport:
    """Returns the transport that a policy asks for, else that of NVIDIA GPUs."""
    return ANY if policy.transport == ANY.name else GPU


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
    if policy.transport == ANY.name:
        return Choice(transports=(ANY,), reason="asked for")
    if policy.transport == GPU.name:
        found = obstacle
        if found is None and platform is not None and not on_gpu:
            found = f"the mesh has devices of platform {platform!r}"
        if found is not None:
            raise NotImplementedError(
                f"Policy transport={GPU.name!r} cannot run here: {found}. "
                f"Use transport={ANY.name!r} or 'auto'."
            )
        return Choice(transports=(GPU,), reason="asked for")
    if obstacle is not None:
        return Choice(transports=(ANY,), reason=obstacle)
    return Choice(
        transports=(GPU, ANY), reason=f"{GPU.name} on CUDA, {ANY.name} elsewhere"
    )
