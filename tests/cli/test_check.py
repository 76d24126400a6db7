import pytest

from jaxzero._cli.check import compare


def test_largest_difference_is_relative_to_the_unsharded_loss() -> None:
    check = compare([4.0, 2.2, 1.0], [4.0, 2.0, 1.0], tolerance=0.05)
    assert check.largest == pytest.approx(0.1)
    assert check.step == 2
    assert not check.passed
    assert compare([4.0, 2.2], [4.0, 2.0], tolerance=0.2).passed


def test_only_steps_of_both_runs_are_compared() -> None:
    check = compare([4.0, 2.0, 99.0], [4.0, 2.0], tolerance=1e-6)
    assert check.passed
    assert check.differences == (0.0, 0.0)
