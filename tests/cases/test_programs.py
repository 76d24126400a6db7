"""Calls inside larger programs: loops, other axes, other world sizes, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

P = PartitionSpec


@pytest.mark.parametrize("cut", [None, "flat", "whole", 1])
@pytest.mark.parametrize("ranks", [1, 2, 3], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_scan_accepts_accumulators_as_carry(make_mesh, cut, ranks, kind, check_vma):
    """A result typed as equal on all ranks would change the type of the carry."""
    chunks = [
        [oracle.integers((6, 5), 10 * k + r) for k in range(3)] for r in range(ranks)
    ]

    def step(stacked):
        start = jaxzero.shard_grads(stacked[0], "data", cuts=cut)
        total, _ = jax.lax.scan(
            lambda acc, g: (jaxzero.shard_grads(g, "data", into=acc, cuts=cut), None),
            start,
            stacked[1:],
        )
        return total

    mesh = make_mesh(ranks, kind=kind)
    found = PerRank(mesh, check_vma=check_vma).run(step, [np.stack(c) for c in chunks])
    full = oracle.reduce([sum(c) for c in chunks])
    for rank, shard in enumerate(found):
        oracle.assert_close(shard, oracle.shard(full, ranks, rank, cut), 4, "float32")


@pytest.mark.parametrize("ranks", [1, 2, 3], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("direct_bytes", [0, None], ids=["direct", "packed"])
def test_a_shard_may_not_leave_as_if_it_were_equal(make_mesh, ranks, direct_bytes):
    """`out_specs=P()` on a shard is refused: it would keep one rank's piece."""
    policy = Policy(direct_bytes=direct_bytes)
    mapped = jax.shard_map(
        lambda g: jaxzero.shard_grads(g[0], "data", policy=policy),
        mesh=make_mesh(ranks),
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"varying|replicat"):
        jax.eval_shape(mapped, np.ones((ranks, 2048), np.float32))


@pytest.mark.parametrize(
    "names", [("shard",), ("replica", "shard"), ("shard", "replica")]
)
def test_calls_over_several_axes_in_turn(make_mesh, names):
    """Groups of different devices in one program, again and again."""
    mesh = make_mesh((2, 4), ("replica", "shard"))
    ranks = PerRank(mesh, ("replica", "shard"))
    grads = [np.full(8, r, np.float32) for r in range(8)]

    def step(g):
        first = jaxzero.shard_grads(g, "shard")
        second = jaxzero.shard_grads(g, names)
        third = jaxzero.shard_grads(g, "shard", policy=Policy(op="sum"))
        return first, second, third

    jitted, placed = ranks.jit(step), ranks.place(grads)
    for _ in range(100):
        # Many calls in flight would hang: XLA:CPU runs out of threads, with plain
        # `lax.psum_scatter` as well.
        result = jax.block_until_ready(jitted(placed))
    for rank, (first, second, third) in enumerate(ranks.split(result)):
        group = range(4) if rank < 4 else range(4, 8)
        mean = np.mean(group if names == ("shard",) else range(8))
        np.testing.assert_array_equal(first, np.full(2, np.mean(group)))
        np.testing.assert_array_equal(second, np.full(second.shape, mean))
        np.testing.assert_array_equal(third, np.full(2, np.sum(group)))


@pytest.mark.parametrize("cuts", [None, "flat", 0], ids=["default", "flat", "dim0"])
@jax.numpy_dtype_promotion("standard")  # optax mixes dtypes
def test_a_checkpoint_continues_at_another_world_size(make_mesh, cuts):
    """Saved over 8 ranks, in true shape; loaded over 6, then 3, then 1."""
    optax = pytest.importorskip("optax")
    params = {"w": np.arange(10, dtype=np.float32), "m": np.ones((6, 2), np.float32)}
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    adam = optax.adam(0.125)
    state_like = jax.eval_shape(adam.init, like)
    # Scalars of the optimizer are equal on all ranks.
    state_cuts = jax.tree.map(lambda s: cuts if s.shape else "whole", state_like)

    def loss(p):
        return jnp.sum((p["w"] - 3) ** 2) + jnp.sum(p["m"] ** 2)

    def train(params, state, ranks):
        mesh = make_mesh(ranks)
        shards = jaxzero.shard_params(params, mesh, "data", cuts=cuts)
        opt = jaxzero.shard_params(state, mesh, "data", cuts=state_cuts)
        specs = jax.tree.map(lambda x: x.sharding.spec, (shards, opt))

        def steps(shards, opt):
            for _ in range(3):
                grads = jax.grad(
                    lambda s: loss(jaxzero.gather_params(s, like, "data", cuts=cuts))
                )(shards)
                grads = jax.tree.map(lambda g: g / ranks, grads)
                updates, opt = adam.update(grads, opt)
                shards = optax.apply_updates(shards, updates)
            return shards, opt

        mapped = jax.shard_map(steps, mesh=mesh, in_specs=specs, out_specs=specs)
        shards, opt = jax.jit(mapped)(shards, opt)
        return (
            jaxzero.unshard_params(shards, like, cuts=cuts),
            jaxzero.unshard_params(opt, state_like, cuts=state_cuts),
        )

    state = jax.tree.map(np.asarray, adam.init(params))
    resumed, state_resumed = params, state
    for ranks in (8, 6, 3, 1):
        resumed, state_resumed = train(resumed, state_resumed, ranks)

    plain, state_plain = params, state
    for _ in range(4 * 3):
        updates, state_plain = adam.update(jax.grad(loss)(plain), state_plain)
        plain = optax.apply_updates(plain, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (resumed, state_resumed),
        (plain, state_plain),
    )


def test_gathered_parameters_of_one_layer_are_alive_at_a_time(make_mesh):
    """Peak memory of 32 checkpointed layers is that of one layer, not of all."""
    size, layers = 256 * 256 + 1, 32
    like = jax.ShapeDtypeStruct((size,), "float32")
    mesh = make_mesh(4)

    def loss(stack, x):
        @jax.checkpoint
        def layer(x, shard):
            full = jaxzero.gather_params(shard, like, "data")
            return jnp.tanh(full[0] * x + jnp.mean(full)), None

        return jax.lax.scan(layer, jax.lax.pcast(x, "data", to="varying"), stack)[0]

    mapped = jax.shard_map(
        jax.grad(loss),
        mesh=mesh,
        in_specs=(P(None, "data"), P()),
        out_specs=P(None, "data"),
    )
    chunk = -(-size // 4)
    arguments = (
        jax.ShapeDtypeStruct(
            (layers, 4 * chunk),
            "float32",
            sharding=NamedSharding(mesh, P(None, "data")),
        ),
        jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, P())),
    )
    memory = jax.jit(mapped).lower(*arguments).compile().memory_analysis()
    # A few copies of one layer: gathered rows, the leaf, its cotangent, the bucket.
    assert memory.temp_size_in_bytes < 8 * 4 * size


@pytest.mark.parametrize("repeats", [3])
def test_a_step_gives_the_same_bits_every_time(make_mesh, repeats):
    """Nothing is kept between calls, and no order is left to chance."""
    rng = np.random.default_rng(0)
    grads = [
        {f"l{i}": rng.normal(size=(50 + i, 3)).astype(np.float32) for i in range(20)}
        for _ in range(8)
    ]
    ranks = PerRank(make_mesh(8))
    step = ranks.jit(
        lambda g: jaxzero.shard_grads(
            g, "data", with_stats=True, policy=Policy(bucket_bytes=1024)
        )
    )
    placed = ranks.place(grads)
    first, *others = [jax.tree.map(np.asarray, step(placed)) for _ in range(repeats)]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)
