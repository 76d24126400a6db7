"""How a plan is carried out: the transports, and the choice of one."""

import dataclasses

import jax

from jaxzero._plan import LIMITS, Limits
from jaxzero._policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A transport's name, with the reason for it."""

    name: str
    limits: Limits
    reason: str


def choose(policy: Policy) -> Choice:
    """Returns the transport that carries out a call.

    Raises:
      NotImplementedError: if the policy names a transport that cannot run here.
    """
    if policy.transport == "nccl":
        raise NotImplementedError(
            "Policy transport='nccl' needs the CUDA module, which this build of "
            "jaxzero does not have. Use transport='xla' or 'auto'."
        )
    reason = "asked for" if policy.transport == "xla" else "no CUDA module"
    return Choice(name="xla", limits=LIMITS["xla"], reason=reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What the unpack pass measured of one bucket's shards on this rank.

    Attributes:
      norm_and_finite: float32[2], the norm of the shards and 1 if all are finite.
      whole: the leaves are kept whole, so every rank measured the same values.
    """

    norm_and_finite: jax.Array
    whole: bool
