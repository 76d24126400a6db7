"""What only shows on one GPU with much memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multihost.spmd import Spmd

import jaxzero
from jaxzero import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def test_more_elements_than_32_bits_count(spmd: Spmd) -> None:
    """A bfloat16 leaf of 2^31 + 8 elements, also as two packed ranks of one GPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if spmd.ranks > 1 or stats.get("bytes_limit", 0) < 60 << 30:
        pytest.skip("needs one rank and 60 GB of memory")
    numel = 2**31 + 8

    def reduce(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = jnp.arange(numel, dtype=jnp.uint32)
        leaf = (index % 251).astype(jnp.bfloat16)
        shard, measured = jaxzero.shard_grads(
            leaf, "data", policy=Policy(shard_dtype="float32"), with_stats=True
        )
        wrong = jnp.sum(shard != (index % 251).astype(jnp.float32), dtype=jnp.uint32)
        return wrong, measured.norm

    ((wrong, norm),) = spmd.run(reduce, [np.zeros((), np.float32)]).values()
    assert wrong == 0
    squares = sum(k * k for k in range(251)) * (numel / 251)
    np.testing.assert_allclose(norm, np.sqrt(squares), rtol=1e-4)
