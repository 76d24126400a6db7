import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cli.bench.tiny import TREE

from jaxzero import Policy
from jaxzero._cli.bench import rivals
from jaxzero._cli.bench.workload import Workload, whole_numbers


def test_gradients_differ_by_leaf_rank_and_place() -> None:
    base = whole_numbers(0, 0, 8)
    assert set(base) == {-1, 0, 1}
    for other in (whole_numbers(1, 0, 8), whole_numbers(0, 1, 8), np.roll(base, 1)):
        assert (other != base).any()


def test_sums_are_exact_in_sixteen_bits() -> None:
    for leaf in range(7):
        total = np.zeros(7, ml_dtypes.bfloat16)
        for rank in range(256):
            total += whole_numbers(leaf, rank, 7).astype(ml_dtypes.bfloat16)
        exact = sum(whole_numbers(leaf, rank, 7) for rank in range(256))
        np.testing.assert_array_equal(total.astype(np.float64), exact)


def test_each_rank_holds_its_own_gradient_and_dtypes_take_turns() -> None:
    work = Workload(TREE, ["bfloat16", "float32"], jax.devices()[:4])
    for leaf, (name, shape) in enumerate(TREE.items()):
        grad = work.grads[name]
        assert grad.dtype == ("bfloat16", "float32")[leaf % 2]
        assert grad.shape == (4, *shape)
        for rank, shard in enumerate(grad.addressable_shards):
            np.testing.assert_array_equal(
                np.asarray(shard.data, np.float64).ravel(),
                whole_numbers(leaf, rank, grad[0].size),
            )


def test_steps_share_accumulators_in_place() -> None:
    work = Workload(TREE, ["float32"], jax.devices()[:2])
    step = work.step(rivals.ways("cpu", Policy())["per leaf"])
    first = jax.block_until_ready(work.call(step)())
    # A copy: NumPy's view of a CPU array would keep it from being donated.
    once = jax.tree.map(jnp.copy, first)
    again = jax.block_until_ready(work.call(step)())
    for name, leaf in again.items():
        assert first[name].is_deleted()
        np.testing.assert_array_equal(np.asarray(leaf), 2 * once[name])
