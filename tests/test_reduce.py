"""The derivative of a reduction is that of the same sum in plain `lax`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

TYPED = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
SHAPES = {"even": (6, 2), "ragged": (7,), "cut": (3, 5), "kept": (4,), "scalar": ()}
CUTS = {"even": None, "ragged": None, "cut": 1, "kept": "whole", "scalar": None}


def plain(tree: Any, axes: tuple[str, ...], divisor: float) -> Any:
    """Returns the full sums of all ranks, as a user of `lax` writes them."""
    return jax.tree.map(lambda leaf: lax.psum(leaf, axes) / divisor, tree)


def own(tree: Any, ranks: int, rank: jax.Array) -> Any:
    """Returns this rank's shards of full leaves, cut in plain `jnp`."""

    def cut(name: str, leaf: jax.Array) -> jax.Array:
        if CUTS[name] == "whole":
            return leaf
        dim = CUTS[name] or 0
        if CUTS[name] is None and not (leaf.shape and leaf.shape[0] % ranks == 0):
            leaf = leaf.reshape(-1)
        chunk = -(-leaf.shape[dim] // ranks)
        pad = [(0, 0)] * leaf.ndim
        pad[dim] = (0, chunk * ranks - leaf.shape[dim])
        return lax.dynamic_slice_in_dim(jnp.pad(leaf, pad), rank * chunk, chunk, dim)

    return {name: cut(name, leaf) for name, leaf in tree.items()}


def weigh(shards: Any, rank: jax.Array) -> jax.Array:
    """Returns a scalar to which every element counts differently on every rank."""
    total = jnp.float32(0)
    for i, name in enumerate(sorted(shards)):
        leaf = shards[name].reshape(-1)
        weights = jnp.arange(leaf.size, dtype=jnp.float32) + i + 1
        total += jnp.sum(leaf * weights) * (1 + rank).astype(jnp.float32)
    return total


@pytest.mark.sampled(14)
@TYPED
@pytest.mark.parametrize("replicas", [1, 2], ids=lambda n: f"r{n}")
@pytest.mark.parametrize("ranks", [1, 2, 3], ids=lambda n: f"n{n}")
@pytest.mark.parametrize(
    "policy",
    [
        Policy(op="sum"),
        Policy(bucket_bytes=32),
        Policy(reduction="float32", divide_by=4),
        Policy(op="sum", direct_bytes=0, comm_dtype="bfloat16"),
    ],
    ids=["sum", "mean", "float32", "bf16"],
)
def test_vjp_equals_that_of_plain_lax(make_mesh, ranks, replicas, policy, check_vma):
    """Cut and whole leaves; each rank's loss has its own weights."""
    size = ranks * replicas
    mesh = make_mesh((ranks, replicas), ("data", "replica"))
    axes = ("data", "replica")
    grads = [oracle.integers(SHAPES, r) for r in range(size)]

    def ours(tree: Any) -> jax.Array:
        shards = jaxzero.shard_grads(
            tree, "data", replicate_axis="replica", policy=policy, cuts=CUTS
        )
        return weigh(shards, lax.axis_index("data"))

    def reference(tree: Any) -> jax.Array:
        rank = lax.axis_index("data")
        full = plain(tree, axes, policy.divisor(size))
        return weigh(own(full, ranks, rank), rank)

    def both(tree: Any) -> Any:
        return jax.grad(ours)(tree), jax.grad(reference)(tree)

    for found, expected in PerRank(mesh, check_vma=check_vma).run(both, grads):
        oracle.assert_close(found, expected, size, "float32", scale=100.0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("equal", ["both", "data", "replica"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (1, 2), (2, 1)], ids=str)
def test_leaves_that_are_equal_along_axes_are_summed_over_the_others(
    make_mesh, shape, equal
):
    """Value and derivative: what does not vary is already the sum."""
    mesh = make_mesh(shape, ("data", "replica"))
    varies = {"both": (), "data": ("replica",), "replica": ("data",)}[equal]
    count = int(np.prod([mesh.shape[name] for name in varies]))
    trees = [oracle.integers(SHAPES, r) for r in range(count)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def reduce(tree: Any) -> Any:
        return jaxzero.shard_grads(
            tree,
            "data",
            replicate_axis="replica",
            policy=Policy(op="sum"),
            cuts=CUTS,
        )

    def step(stacked: Any) -> Any:
        tree = jax.tree.map(lambda leaf: leaf[0], stacked)
        rank = lax.axis_index("data")
        grads = jax.grad(lambda t: weigh(reduce(t), rank))(tree)
        shards = jax.tree.map(lambda leaf: leaf[None], reduce(tree))
        return shards, jax.tree.map(lambda leaf: leaf[None], grads)

    spec = P(varies or None)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(spec,),
        out_specs=(
            {name: P() if CUTS[name] == "whole" else P("data") for name in CUTS},
            spec,
        ),
    )
    shards, grads = jax.jit(mapped)(stacked)
    full = oracle.reduce(trees, "sum")
    for rank in range(shape[0]):
        held = {
            name: np.asarray(leaf)[0 if CUTS[name] == "whole" else rank]
            for name, leaf in shards.items()
        }
        oracle.assert_same(held, oracle.shard(full, shape[0], rank, CUTS))

    # The loss of all ranks together is linear in the leaf: its gradient at one tree
    # is what the loss gains, element by element, whichever tree it is.
    def total_loss(full: Any) -> jax.Array:
        losses = [
            weigh(own(full, shape[0], jnp.int32(rank)), jnp.int32(rank))
            for rank in range(shape[0])
        ]
        # Typed as equal along the replicas, so their loss counts once.
        return sum(losses, start=jnp.float32(0))

    expected = jax.grad(total_loss)(jax.tree.map(np.float32, trees[0]))
    for index in range(count):
        found = jax.tree.map(lambda leaf, i=index: np.asarray(leaf)[i], grads)
        oracle.assert_close(found, expected, mesh.size, "float32", scale=100.0)


@TYPED
def test_cotangent_of_the_accumulator_passes_through(make_mesh, check_vma):
    grads = [np.arange(8, dtype=np.float32)] * 4
    into = [np.ones(2, np.float32)] * 4

    def step(g: Any, acc: Any) -> Any:
        def loss(g: Any, acc: Any) -> jax.Array:
            shard = jaxzero.shard_grads(g, "data", into=acc)
            return jnp.sum(shard * jnp.float32([3, 5]))

        return jax.grad(loss, argnums=(0, 1))(g, acc)

    for g, acc in PerRank(make_mesh(4), check_vma=check_vma).run(step, grads, into):
        np.testing.assert_array_equal(acc, [3, 5])
        np.testing.assert_array_equal(g, np.float32([3, 5] * 4) / 4)


def test_gradients_of_gradients(make_mesh):
    """Reverse over reverse, through the gather and the reduction of its transpose."""
    like = jax.ShapeDtypeStruct((6,), "float32")
    shards = [np.float32([1, 2]) + 2 * r for r in range(3)]

    def step(shard: Any) -> Any:
        def loss(shard: Any) -> jax.Array:
            return jnp.sum(jaxzero.gather_params(shard, like, "data") ** 3)

        return jax.grad(lambda s: jnp.sum(jax.grad(loss)(s) * jnp.float32([1, 2])))(
            shard
        )

    for rank, found in enumerate(PerRank(make_mesh(3)).run(step, shards)):
        # Three ranks sum x**3: 3 * 6x, times the weights.
        np.testing.assert_array_equal(found, 18 * shards[rank] * np.float32([1, 2]))


@pytest.mark.parametrize("cut", ["flat", 0])
def test_positions_beyond_32_bits_are_traced(make_mesh, cut):
    """The rank's slice of a leaf that all hold starts at 2**32."""
    mapped = jax.shard_map(
        lambda g: jaxzero.shard_grads(g, "data", cuts=cut),
        mesh=make_mesh(2),
        in_specs=P(),
        out_specs=P("data"),
    )
    leaf = jax.ShapeDtypeStruct((2**33 - 1,), "bfloat16")
    assert jax.eval_shape(mapped, leaf).shape == (2**33,)
