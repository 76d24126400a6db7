import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxzero._cli.demo.model import (
    ModelConfig,
    Params,
    init_params,
    log_probabilities,
    mean_loss,
)

CONFIG = ModelConfig(blocks=2, width=64)


@pytest.fixture(scope="module")
def params() -> Params:
    return init_params(jax.random.key(0), CONFIG)


def random_bytes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def test_untrained_model_is_as_good_as_a_guess(params: Params) -> None:
    loss = mean_loss(params, jnp.asarray(random_bytes(0, 8, 33)))
    assert abs(float(loss) - math.log(256)) < 0.1


def test_prediction_depends_on_earlier_bytes_only(params: Params) -> None:
    inputs = random_bytes(0, 1, 9)
    changed = inputs.copy()
    changed[0, 5] ^= 1
    before, after = (
        np.asarray(log_probabilities(params, x)) for x in (inputs, changed)
    )
    np.testing.assert_allclose(before[0, :5], after[0, :5], atol=1e-5)
    for position in range(5, 9):
        assert np.abs(before[0, position] - after[0, position]).max() > 1e-3


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 4e-3), ("bfloat16", 4e-2)])
def test_16_bit_parameters_change_predictions_by_their_rounding(
    params: Params, dtype: str, atol: float
) -> None:
    inputs = jnp.asarray(random_bytes(0, 2, 17))
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    want, found = (log_probabilities(p, inputs) for p in (params, narrow))
    assert found.dtype == jnp.float32
    assert jax.eval_shape(jax.grad(mean_loss), narrow, inputs) == jax.eval_shape(
        lambda: narrow
    )
    difference = np.abs(np.asarray(want) - np.asarray(found)).max()
    assert 0 < difference < atol


def test_mean_loss_is_the_mean_over_sequences(params: Params) -> None:
    tokens = jnp.asarray(random_bytes(1, 4, 17))
    singles = [float(mean_loss(params, tokens[i : i + 1])) for i in range(4)]
    assert float(mean_loss(params, tokens)) == pytest.approx(np.mean(singles), rel=1e-5)


@pytest.mark.slow
def test_every_parameter_has_a_gradient(params: Params) -> None:
    grads = jax.grad(mean_loss)(params, jnp.asarray(random_bytes(2, 4, 33)))
    for path, grad in jax.tree.leaves_with_path(grads):
        assert float(jnp.linalg.norm(grad)) > 0, jax.tree_util.keystr(path)
