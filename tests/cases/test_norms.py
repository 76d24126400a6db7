"""Norms and scales of what is spread over ranks, as users found them wrong."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero

TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])


@TYPED
def test_clipping_does_not_depend_on_the_number_of_ranks(make_mesh, check_vma):
    """Neither rank's own norm (3 and 4) nor the larger of both is the limit's."""
    grads = [np.float32([3, 0, 0, 4])] * 2
    clip = jaxzero.clip_by_global_norm(1.0, "data")

    def step(g):
        shard = jaxzero.shard_grads(g, "data")
        return jaxzero.global_norm(shard, "data"), clip.update(shard, ())[0]

    found = PerRank(make_mesh(2), check_vma=check_vma).run(step, grads)
    wanted = ([0.6, 0.0], [0.0, 0.8])
    for (norm, clipped), want in zip(found, wanted, strict=True):
        assert float(norm) == 5.0
        np.testing.assert_allclose(clipped, np.float32(want), rtol=1e-6)


@TYPED
@pytest.mark.parametrize(
    ("tree", "norm"),
    [
        ({}, 0.0),
        ({"e": np.zeros((0, 10), np.float32), "w": np.ones(4, np.float32)}, 2.0),
    ],
    ids=["no-leaf", "empty-leaf"],
)
def test_empty_groups_have_a_norm_and_do_not_poison(make_mesh, tree, norm, check_vma):
    mesh = make_mesh(2)
    shards = jaxzero.shard_params(tree, mesh, "data")
    clip = jaxzero.clip_by_global_norm(1.0, "data")
    mapped = jax.shard_map(
        lambda t: (jaxzero.global_norm(t, "data"), clip.update(t, ())[0]),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P(), P("data")),
        check_vma=check_vma,
    )
    found, clipped = jax.jit(mapped)(shards)
    assert (found.shape, float(found)) == ((), norm)
    for leaf in jax.tree.leaves(clipped):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, 0.5))
