"""LossScale: a factor on the loss that keeps float16 gradients in range."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxzero._numbers import finite_number, whole_number


class LossScaleState(NamedTuple):
    """What changes from step to step.

    Attributes:
      scale: what the loss is multiplied by, float32 scalar.
      good_steps: finite steps since the scale last changed, int32 scalar.
    """

    scale: jax.Array
    good_steps: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling: says how the scale follows the finiteness of gradients.

    Multiply the loss by `state.scale`, and divide the shards by it before the
    optimizer sees them. With powers of two both are exact.

    Attributes:
      initial: the first scale.
      factor: what the scale is multiplied or divided by; 1 keeps it as it is.
      growth_interval: finite steps after which the scale grows.
      minimum: the scale never falls below it.

    Raises:
      ValueError: for a value out of range.
      TypeError: for a value that is no number known at trace time.

    Example:
      >>> import jaxzero
      >>> scaling = jaxzero.LossScale(growth_interval=2)
      >>> state = scaling.init()
      >>> state = scaling.update(state, False)
      >>> print(state.scale)
      16384.0
      >>> for _ in range(2):
      ...     state = scaling.update(state, True)
      >>> print(state.scale)
      32768.0
    """

    initial: float = 2.0**15
    factor: float = 2.0
    growth_interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for field in ("initial", "factor", "minimum"):
            object.__setattr__(self, field, _checked_number(self, field))
        object.__setattr__(self, "growth_interval", _checked_interval(self))
        if self.factor < 1:
            raise ValueError(
                f"LossScale factor={self.factor}; expected at least 1 (the scale is "
                f"divided by it to shrink), or exactly 1 for a static scale."
            )
        if self.initial < self.minimum:
            raise ValueError(
                f"LossScale initial={self.initial}; expected at least "
                f"minimum={self.minimum}. Raise initial or lower minimum."
            )

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(
            scale=jnp.asarray(self.initial, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
        )

    def update(
        self, state: LossScaleState, all_finite: jax.Array | bool
    ) -> LossScaleState:
        """Returns the state after a step.

        Args:
          state: the state before it.
          all_finite: whether its gradients were finite, bool scalar, equal on every
            rank: from `jaxzero.all_finite`, or `Stats.all_finite`.

        Returns:
          The scale multiplied by `factor` after `growth_interval` finite steps in a
          row, divided by it (but not below `minimum`) after one that was not finite.

        Raises:
          TypeError: if `all_finite` is no bool scalar.
        """
        finite = _checked_flag(all_finite)
        good = state.good_steps + jnp.int32(1)
        full = good >= self.growth_interval
        grown = state.scale * jnp.float32(self.factor)
        grown = jnp.where(full & jnp.isfinite(grown), grown, state.scale)
        shrunk = state.scale / jnp.float32(self.factor)
        shrunk = jnp.maximum(shrunk, jnp.float32(self.minimum))
        return LossScaleState(
            scale=jnp.where(finite, grown, shrunk),
            good_steps=jnp.where(finite & ~full, good, jnp.zeros_like(good)),
        )


def _checked_number(scaling: LossScale, field: str) -> float:
    value = getattr(scaling, field)
    expected = (
        "a number above 0 that float32 holds, best a power of two, because scaling by "
        "it is exact"
    )
    fix = "What changes from step to step is in LossScaleState."
    number = finite_number(f"LossScale {field}", value, expected, fix)
    least, most = (float(getattr(np.finfo(np.float32), end)) for end in ("tiny", "max"))
    if not least <= number <= most:
        raise ValueError(f"LossScale {field}={value!r}; expected {expected}.")
    return number


def _checked_interval(scaling: LossScale) -> int:
    value = scaling.growth_interval
    interval = whole_number("LossScale growth_interval", value, "steps")
    if not 1 <= interval < 2**31:
        raise ValueError(
            f"LossScale growth_interval={value}; expected at least 1 step, and at "
            f"most 2**31 - 1. For a scale that never grows, use factor=1."
        )
    return interval


def _checked_flag(value: Any) -> jax.Array:
    flag = jnp.asarray(value)
    if flag.dtype != jnp.bool_ or flag.shape:
        raise TypeError(
            f"LossScale.update: all_finite is {flag.dtype}{list(flag.shape)}; expected "
            f"a bool scalar, from jaxzero.all_finite(grads, axis_name)."
        )
    return flag
