"""Steps with overlap beside the same without, between processes: equal in every bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multihost.spmd import Spmd

import jaxzero
from jaxzero import GradientTransformation, Policy

TREES = 5


def steps_per_tree() -> int:
    """500 steps on GPUs; processes on CPUs are slow."""
    return 100 if jax.default_backend() == "gpu" else 5


def whole_steps() -> GradientTransformation:
    """Subtracts the gradient and wraps around to -1, 0 or 1, exactly."""

    def step(grad: jax.Array, param: jax.Array) -> jax.Array:
        return (param - grad + 1) % 3 - 1 - param

    return GradientTransformation(
        lambda params: (),
        lambda grads, state, params: (jax.tree.map(step, grads, params), state),
    )


def loss(params: Any, batch: Any) -> jax.Array:
    """Whole numbers all the way; the remainder keeps them small."""
    hidden = batch["x"] % 3 @ params["first"]

    def layer(own: Any, hidden: jax.Array) -> jax.Array:
        # Not maximum, whose gradient at 0 is one half.
        return (jax.nn.relu(hidden @ own["w"]) + jnp.sum(own["b"])) % 8

    return jnp.sum(jaxzero.apply_layers(layer, params["blocks"], hidden))


def random_model(random: np.random.Generator) -> tuple[Any, dict[str, str]]:
    # So small that all sums are whole numbers which float32 holds.
    width, count = int(random.integers(3, 9)), int(random.integers(2, 5))

    def whole(*shape: int) -> np.ndarray:
        return random.integers(-1, 2, shape).astype(np.float32)

    stacked = bool(random.integers(2))
    stack = (count,) if stacked else ()
    blocks: Any = [
        {"w": whole(*stack, width, width), "b": whole(*stack, 2)}
        for _ in range(1 if stacked else count)
    ]
    params = {
        "first": whole(5, width),
        "blocks": blocks[0] if stacked else blocks,
    }
    return params, {"stacked": "blocks"} if stacked else {"layers": "blocks/*"}


@pytest.mark.parametrize("seed", range(TREES))
@pytest.mark.parametrize("mesh", ["flat", "hybrid"])
def test_overlap_changes_no_bit_of_many_steps(
    mesh: str, seed: int, request: pytest.FixtureRequest
) -> None:
    spmd: Spmd = request.getfixturevalue("hybrid" if mesh == "hybrid" else "spmd")
    if jax.default_backend() == "cpu" and (mesh, seed) != ("hybrid", 0):
        pytest.skip("for GPUs")
    random = np.random.default_rng(seed)
    params, layering = random_model(random)
    options: dict[str, Any] = {"accumulate": int(random.integers(1, 3))}
    if mesh == "hybrid":
        options["replicate_axis"] = "replica"
        options["sync"] = str(random.choice(["each", "replicas_last"]))
    reduction: Any = random.choice(["native", "float32"])
    bucket_bytes = int(random.choice([256, 1 << 20]))
    runs = []
    for overlap in (True, False):
        policy = Policy(
            op="sum", overlap=overlap, reduction=reduction, bucket_bytes=bucket_bytes
        )
        zero = jaxzero.zero3(
            loss, whole_steps(), spmd.mesh, policy=policy, **layering, **options
        )
        runs.append((zero, zero.init(params)))
    shape = (8 * 3 * spmd.ranks // np.gcd(8, spmd.ranks), 5)
    for number in range(steps_per_tree() // (2 if mesh == "hybrid" else 1)):
        batch = {"x": random.integers(-4, 5, shape).astype(np.float32)}
        found = [zero.step(state, batch) for zero, state in runs]
        runs = [(zero, new[0]) for (zero, _), new in zip(runs, found, strict=True)]
        for (_, one), (_, other) in [found]:
            assert float(one.loss) == float(other.loss), number
            assert float(one.grad_norm) == float(other.grad_norm), number
            assert float(one.loss) % 1 == 0, number
    first, second = (jax.tree.leaves(state) for _, state in runs)
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))
