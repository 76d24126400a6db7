"""Policy: what the user asks of a reduction, checked once, hashable."""

import dataclasses
from typing import Any, Literal, get_args

from jaxzero._dtypes import COMM_DTYPES, component_dtype, dtype_name, is_supported
from jaxzero._numbers import finite_number, whole_number

Op = Literal["mean", "sum"]
Reduction = Literal["native", "float32"]
Transport = Literal["auto", "nccl", "xla"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Says how leaves are summed, scaled, sent and stored.

    Dtypes are per component: `comm_dtype="bfloat16"` sends a complex64 leaf as pairs
    of bfloat16.

    Attributes:
      op: `"mean"` divides the sum by the number of ranks (times the number of
        replicas), `"sum"` does not divide.
      divide_by: replaces the divisor of `op`; one division, whatever the mesh.
      comm_dtype: dtype on the wire; None sends each leaf in its own dtype.
      shard_dtype: dtype of the returned shards; None keeps the leaf's dtype (or
        takes that of `into`).
      compute_dtype: dtype of the parameters that `gather_params` returns; None
        keeps the dtype of `like`.
      bucket_bytes: limit of one bucket, the packed send buffer of one collective;
        None takes the transport's measured default. It changes speed and memory,
        never a result.
      direct_bytes: leaves of at least this size get a collective of their own and
        are read in place, where their layout allows it; None takes the transport's
        measured default.
      overlap: let collectives of `apply_layers` run beside the layer whose turn it is;
        full parameters and gradients of one more layer then exist at a time.
      flush_bytes: split `shard_grads` of a whole tree into calls of at least so many
        bytes, from its last leaves on, so that the first ones run beside the rest of
        the backward pass (with JAX 0.12 and later); None for one call. For transport
        "nccl".
      reduction: `"native"` sums in the comm dtype inside the collective, `"float32"`
        exchanges the comm dtype and sums in float32 (float64 for 64-bit leaves) in
        rank order: one rounding, deterministic.
      transport: `"nccl"` (one fused custom call on NVIDIA GPUs), `"xla"` (pack,
        `lax` collective, unpack; any backend), or `"auto"`.

    Raises:
      ValueError: for a value outside its list or range.
      TypeError: for a dtype that cannot be summed, or a value of the wrong type.

    Example:
      >>> import jaxzero
      >>> policy = jaxzero.Policy(comm_dtype="bfloat16", shard_dtype="float32")
      >>> policy.divisor(8), policy.comm_dtype
      (8.0, 'bfloat16')
    """

    op: Op = "mean"
    divide_by: float | None = None
    comm_dtype: Any = None
    shard_dtype: Any = None
    compute_dtype: Any = None
    bucket_bytes: int | None = None
    direct_bytes: int | None = None
    overlap: bool = True
    flush_bytes: int | None = None
    reduction: Reduction = "native"
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        for field, choices in (
            ("op", get_args(Op)),
            ("reduction", get_args(Reduction)),
            ("transport", get_args(Transport)),
        ):
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(
                    f"Policy {field}={value!r}; expected one of "
                    f"{', '.join(map(repr, choices))}."
                )
        for field in ("comm_dtype", "shard_dtype", "compute_dtype"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, _checked_dtype(self, field))
        if self.divide_by is not None:
            object.__setattr__(self, "divide_by", _checked_divisor(self.divide_by))
        _check_bytes(self, "bucket_bytes", minimum=1)
        _check_bytes(self, "direct_bytes", minimum=0)
        _check_bytes(self, "flush_bytes", minimum=1)
        if not isinstance(self.overlap, bool):
            raise TypeError(f"Policy overlap={self.overlap!r}; expected True or False.")

    def divisor(self, count: int) -> float:
        """Returns what the sum over `count` contributions is divided by.

        Args:
          count: ranks, times replicas, times microbatches where they are summed too.
        """
        if self.divide_by is not None:
            return self.divide_by
        return float(count) if self.op == "mean" else 1.0


def _checked_dtype(policy: Policy, field: str) -> str:
    value = getattr(policy, field)
    expected = f"expected one of {', '.join(COMM_DTYPES)}, complex64, complex128"
    try:
        name = dtype_name(value)
    except TypeError as error:
        raise TypeError(f"Policy {field}={value!r} is no dtype; {expected}.") from error
    if not is_supported(name):
        raise TypeError(
            f"Policy {field}={name!r} cannot hold sums of gradients; {expected}."
        )
    return component_dtype(name)


def _checked_divisor(value: Any) -> float:
    expected = "a finite number other than 0"
    fix = "To scale by a traced value, use op='sum' and scale the shards."
    number = finite_number("Policy divide_by", value, expected, fix)
    if number == 0.0:
        raise ValueError(f"Policy divide_by={value!r}; expected {expected}. {fix}")
    return number


def _check_bytes(policy: Policy, field: str, minimum: int) -> None:
    value = getattr(policy, field)
    if value is None:
        return
    object.__setattr__(policy, field, whole_number(f"Policy {field}", value, "bytes"))
    if value < minimum:
        raise ValueError(
            f"Policy {field}={value}; expected at least {minimum} "
            f"(bytes), or None for the default."
        )
