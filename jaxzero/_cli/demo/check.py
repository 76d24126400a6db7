"""Compares a sharded run with an unsharded one of the same steps.

Losses alone would not show gradients of a wrong scale: Adam does not depend on it. So
the norm of the first step's gradient, the same point in both runs, is compared too.
"""

import dataclasses

CHECKED_STEPS = 50
"""Rounding differences grow exponentially in training; the promise covers these."""

TOLERANCES = {
    # Only the order of float32 sums differs: 1e-6 was seen.
    "float32": 1e-4,
    # Rounded gradients move the parameters a little otherwise in every step. With the
    # default options 1e-3 was seen for bfloat16 (three seeds), 2e-4 for float16.
    "bfloat16": 1e-2,
    "float16": 2e-3,
}
"""By the dtype of the wire."""

COMPUTE_TOLERANCES = {
    "float32": 0.0,
    # With the default options 9e-3 was seen for bfloat16, 2e-3 for float16 (three
    # seeds each).
    "bfloat16": 5e-2,
    "float16": 2e-2,
}
"""By the dtype of computing; the unsharded run computes in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Per step: the loss in nats per byte, and the norm of the mean gradient."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The unsharded losses, and relative differences of the sharded run from it."""

    losses: tuple[float, ...]
    differences: tuple[float, ...]
    first_norm_difference: float
    tolerance: float

    @property
    def largest(self) -> float:
        """The largest difference of a loss."""
        return max(self.differences)

    @property
    def step(self) -> int:
        """The step, counted from 1, at which it occurred."""
        return 1 + self.differences.index(self.largest)

    @property
    def passed(self) -> bool:
        """Whether all differences are within the tolerance."""
        return max(self.largest, self.first_norm_difference) <= self.tolerance


def tolerance(wire: str, compute_dtype: str) -> float:
    """Returns the largest relative difference that rounding explains."""
    return max(TOLERANCES[wire], COMPUTE_TOLERANCES[compute_dtype])


def compare(sharded: Curve, unsharded: Curve, tolerance: float) -> CheckResult:
    """Compares two runs over the steps of the shorter one."""
    pairs = zip(sharded.losses, unsharded.losses, strict=False)
    return CheckResult(
        losses=unsharded.losses,
        differences=tuple(_difference(ours, theirs) for ours, theirs in pairs),
        first_norm_difference=_difference(
            sharded.grad_norms[0], unsharded.grad_norms[0]
        ),
        tolerance=tolerance,
    )


def _difference(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)
