"""Compares the losses of the sharded run with those of the unsharded one."""

import dataclasses
from collections.abc import Sequence

CHECKED_STEPS = 50
"""Rounding differences grow exponentially in training; the promise covers these."""

TOLERANCES = {
    # Only the order of float32 sums differs.
    "float32": 1e-4,
    # Rounding gradients to 8 (11) significant bits moves the parameters a little in
    # every step; measured over five seeds, see tests/cli/test_check.py.
    "bfloat16": 2e-2,
    "float16": 5e-3,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Losses of the unsharded run, and how far the sharded ones are from them."""

    losses: tuple[float, ...]
    differences: tuple[float, ...]
    tolerance: float

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max(self.differences)

    @property
    def step(self) -> int:
        """The step, counted from 1, at which it occurred."""
        return 1 + self.differences.index(self.largest)

    @property
    def passed(self) -> bool:
        """Whether all differences are within the tolerance."""
        return self.largest <= self.tolerance


def compare(
    sharded: Sequence[float], unsharded: Sequence[float], tolerance: float
) -> CheckResult:
    """Compares two loss curves over the steps of the shorter one."""
    pairs = list(zip(sharded, unsharded, strict=False))
    return CheckResult(
        losses=tuple(unsharded),
        differences=tuple(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs),
        tolerance=tolerance,
    )
