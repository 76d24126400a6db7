"""LossScale: how the scale follows finiteness, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import LossScale, LossScaleState


def run(scaling: LossScale, flags: str) -> list[tuple[float, int]]:
    """Returns scale and counter after each step; "g" is a good one."""
    state, seen = scaling.init(), []
    for flag in flags:
        state = jax.jit(scaling.update)(state, jnp.bool_(flag == "g"))
        assert (state.scale.dtype, state.scale.shape) == (jnp.float32, ())
        assert (state.good_steps.dtype, state.good_steps.shape) == (jnp.int32, ())
        seen.append((float(state.scale), int(state.good_steps)))
    return seen


def test_first_state():
    state = LossScale().init()
    assert isinstance(state, LossScaleState)
    assert (state.scale.dtype, float(state.scale)) == (jnp.float32, 2.0**15)
    assert (state.good_steps.dtype, int(state.good_steps)) == (jnp.int32, 0)


def test_scale_grows_after_so_many_good_steps_and_starts_to_count_anew():
    scaling = LossScale(initial=8.0, growth_interval=3)
    assert run(scaling, "gggg") == [(8, 1), (8, 2), (16, 0), (16, 1)]


def test_a_bad_step_shrinks_the_scale_and_resets_the_counter():
    scaling = LossScale(initial=8.0, factor=4.0, growth_interval=2)
    assert run(scaling, "gbgg") == [(8, 1), (2, 0), (2, 1), (8, 0)]


def test_scale_does_not_fall_below_the_minimum():
    scaling = LossScale(initial=8.0, minimum=3.0)
    assert run(scaling, "bbb") == [(4, 0), (3, 0), (3, 0)]


def test_scale_does_not_become_infinite():
    scaling = LossScale(initial=2.0**126, growth_interval=1)
    assert run(scaling, "gggb") == [
        (2.0**127, 0),
        (2.0**127, 0),
        (2.0**127, 0),
        (2.0**126, 0),
    ]


def test_factor_one_is_a_static_scale():
    scaling = LossScale(initial=128.0, factor=1.0, growth_interval=2)
    assert [scale for scale, _ in run(scaling, "gggbb")] == [128.0] * 5


def test_an_interval_of_one_grows_at_every_good_step():
    assert run(LossScale(initial=1.0, growth_interval=1), "gg") == [(2, 0), (4, 0)]


def test_it_is_frozen_hashable_and_keyword_only():
    scaling = LossScale(initial=np.float32(4), growth_interval=np.int64(3))
    assert scaling == LossScale(initial=4.0, growth_interval=3)
    assert hash(scaling) == hash(LossScale(initial=4, growth_interval=3))
    assert repr(scaling) == (
        "LossScale(initial=4.0, factor=2.0, growth_interval=3, minimum=1.0)"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaling.factor = 3.0
    with pytest.raises(TypeError):
        LossScale(4.0)


@pytest.mark.parametrize("field", ["initial", "factor", "minimum"])
@pytest.mark.parametrize("value", [0, -2.0, np.inf, np.nan, 1e39, 1e-40])
def test_numbers_must_be_positive_and_fit_float32(field, value):
    with pytest.raises(ValueError, match=rf"LossScale {field}=.*expected"):
        LossScale(**{field: value})


@pytest.mark.parametrize("field", ["initial", "factor", "minimum"])
@pytest.mark.parametrize("value", ["2", None, True, [2.0]])
def test_numbers_must_be_numbers(field, value):
    with pytest.raises(TypeError, match=rf"LossScale {field}=.*expected a number"):
        LossScale(**{field: value})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"factor": 0.5}, ValueError, "factor=0.5; expected at least 1"),
        ({"initial": 0.5}, ValueError, "initial=0.5; expected at least minimum=1.0"),
        ({"growth_interval": 0}, ValueError, "growth_interval=0; expected at least 1"),
        ({"growth_interval": 2**31}, ValueError, "at most"),
        ({"growth_interval": 2.0}, TypeError, "growth_interval=2.0; expected a whole"),
        ({"growth_interval": True}, TypeError, "growth_interval=True; expected"),
    ],
)
def test_fields_that_do_not_fit(fields, error, message):
    with pytest.raises(error, match=message):
        LossScale(**fields)


@pytest.mark.parametrize("flag", [1, np.float32(1), np.ones(2, bool)])
def test_flag_must_be_one_truth_value(flag):
    scaling = LossScale()
    with pytest.raises(TypeError, match=r"all_finite is .*jaxzero\.all_finite"):
        scaling.update(scaling.init(), flag)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_steps_with_a_float16_overflow_on_one_rank(make_mesh, check_vma):
    """All ranks skip that step and shrink alike; the others are exact."""
    mesh = make_mesh(4)
    scaling = LossScale(initial=2.0**15, growth_interval=2)
    state = scaling.init()
    params = np.zeros(8, np.float32)
    grads = np.arange(8, dtype=np.float32) / 4

    def step(params: Any, grads: Any, state: LossScaleState) -> Any:
        scaled = (grads * state.scale).astype(jnp.float16)
        finite = jaxzero.all_finite(scaled, "data")
        unscaled = scaled.astype(jnp.float32) / state.scale
        params = jnp.where(finite, params - unscaled, params)
        return params, scaling.update(state, finite), finite

    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data"), P("data"), P()),
            out_specs=(P("data"), P(), P()),
            check_vma=check_vma,
        )
    )
    seen = []
    for _ in range(4):
        params, state, finite = jax.block_until_ready(mapped(params, grads, state))
        seen.append((bool(finite), float(state.scale), int(state.good_steps)))
    # 7/4 * 2**15 = 57344 fits float16, twice that does not.
    assert seen == [
        (True, 2.0**15, 1),
        (True, 2.0**16, 0),
        (False, 2.0**15, 0),
        (True, 2.0**15, 1),
    ]
    np.testing.assert_array_equal(params, -3 * grads)
