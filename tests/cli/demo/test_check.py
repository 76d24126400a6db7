import pytest

from jaxzero._cli.demo.check import Curve, compare, tolerance


def curve(*losses: float, norm: float = 1.0) -> Curve:
    return Curve(losses=losses, grad_norms=(norm,) * len(losses))


def test_largest_difference_is_relative_to_the_unsharded_loss() -> None:
    check = compare(curve(4.0, 2.2, 1.0), curve(4.0, 2.0, 1.0), tolerance=0.05)
    assert check.largest == pytest.approx(0.1)
    assert check.step == 2
    assert not check.passed
    assert compare(curve(4.0, 2.2), curve(4.0, 2.0), tolerance=0.2).passed


def test_only_steps_of_both_runs_are_compared() -> None:
    check = compare(curve(4.0, 2.0, 99.0), curve(4.0, 2.0), tolerance=1e-6)
    assert check.passed
    assert check.differences == (0.0, 0.0)


def test_gradient_of_a_wrong_scale_fails() -> None:
    check = compare(curve(4.0, norm=8.0), curve(4.0, norm=1.0), tolerance=0.01)
    assert check.largest == 0.0
    assert check.first_norm_difference == pytest.approx(7.0)
    assert not check.passed


def test_tolerance_is_that_of_the_coarsest_rounding() -> None:
    assert tolerance("float32", "float32") == 1e-4
    assert tolerance("bfloat16", "float32") == 1e-2
    assert tolerance("float32", "float16") == tolerance("bfloat16", "float16") == 2e-2
