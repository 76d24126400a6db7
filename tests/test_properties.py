"""Random trees, options and meshes against the oracle.

Data are whole numbers, so that sums are exact on every wire and a difference of one
bit is a bug; a second property takes real numbers, to rounding. Examples are the same
in every run.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from per_rank import PerRank

import jaxzero
from jaxzero import Policy

examples = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)

NARROW = ("float32", "bfloat16", "float16")
WIDE = ("float64", "complex128", "complex64", "float32", "bfloat16")
WIRES = (None, "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is drawn for one leaf."""

    shape: tuple[int, ...]
    dtype: str
    cut: Any
    into_dtype: str

    def layout(self, min_shard_numel: int) -> Any:
        """Returns the oracle's cut: small leaves stay whole unless asked for."""
        small = np.prod(self.shape, dtype=int) < min_shard_numel
        return "whole" if self.cut is None and small else self.cut

    def draw(self, *seed: int, dtype: str | None = None, real: bool = False) -> Any:
        """Returns whole numbers (or reals) of this leaf's shape."""
        return numbers(self.shape, dtype or self.dtype, *seed, real=real)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """What is drawn for the mesh."""

    ranks: int
    replicas: int
    kind: str
    check_vma: bool
    min_shard_numel: int

    def layout(self, tree: Any, like: Any) -> jaxzero.Layout:
        """Returns how a tree with the shapes of `like` is spread over it."""
        return jaxzero.make_layout(
            like,
            "data",
            mesh={"data": self.ranks, "replica": self.replicas},
            replicate_axis="replica",
            cuts=tree_map(lambda leaf: leaf.cut, tree),
            min_shard_numel=self.min_shard_numel,
        )

    def make(self, make_mesh: Any) -> PerRank:
        mesh = make_mesh((self.ranks, self.replicas), ("data", "replica"), self.kind)
        return PerRank(mesh, check_vma=self.check_vma)

    @property
    def size(self) -> int:
        return self.ranks * self.replicas


def numbers(shape: Any, dtype: str, *seed: int, real: bool = False) -> np.ndarray:
    """Returns random numbers of magnitude up to 8, complex where the dtype is."""
    rng = np.random.default_rng(seed)
    draw = rng.normal if real else lambda size: rng.integers(-8, 8, size, endpoint=True)
    value = np.asarray(draw(size=shape), np.float64)
    if dtype.startswith("complex"):
        value = value + 1j * np.asarray(draw(size=shape))
    return oracle.stored(value, dtype)


# Strategies


@st.composite
def leaves(draw: Any, dtypes: tuple[str, ...]) -> Leaf:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    cuts = [None, "flat", "whole", *range(-len(shape), len(shape))]
    dtype = draw(st.sampled_from(dtypes))
    like = [d for d in dtypes if d.startswith("complex") == dtype.startswith("complex")]
    return Leaf(shape, dtype, draw(st.sampled_from(cuts)), draw(st.sampled_from(like)))


def trees(dtypes: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves(dtypes) | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=6,
    )


@st.composite
def meshes(draw: Any) -> Mesh:
    ranks = draw(st.sampled_from([1, 2, 3, 5, 6, 8]))
    replicas = draw(st.sampled_from([1, 2] if ranks < 5 else [1]))
    return Mesh(
        ranks,
        replicas,
        draw(st.sampled_from(["auto", "explicit"])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 2, 10, 1 << 40])),
    )


@st.composite
def policies(draw: Any, wires: tuple[str | None, ...] = WIRES) -> Policy:
    return Policy(
        op=draw(st.sampled_from(["mean", "sum"])),
        divide_by=draw(st.none() | st.sampled_from([1, 4, -0.5, 3, 300.0])),
        comm_dtype=draw(st.sampled_from(wires)),
        bucket_bytes=draw(st.none() | st.integers(1, 4096)),
        direct_bytes=draw(st.sampled_from([None, 0, 64, 1 << 40])),
        reduction=draw(st.sampled_from(["native", "float32"])),
    )


# The checks


def is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


def tree_map(function: Any, tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=is_leaf)


def expected(
    drawn: list[Leaf], policy: Policy, grads: list[Any], into: list[Any] | None
) -> list[Any]:
    """Returns the full reduced leaves in float64, or complex128."""
    per_rank = [jax.tree.leaves(tree) for tree in grads]
    full = oracle.reduce(per_rank, policy.op, policy.divide_by, into)
    assert len(full) == len(drawn)
    return full


def is_exact(policy: Policy, contributions: int, drawn: list[Leaf]) -> bool:
    """Says whether every number on the way is held exactly."""
    divisor = abs(policy.divisor(contributions))
    return bool(np.log2(divisor) % 1 == 0)


def check_reduction(
    mesh: Mesh, ranks: PerRank, tree: Any, policy: Policy, accumulate: bool, real: bool
) -> None:
    """Asserts that shards and statistics are the oracle's on every rank."""
    drawn = jax.tree.leaves(tree, is_leaf=is_leaf)
    index = {id(leaf): i for i, leaf in enumerate(drawn)}
    grads = [
        tree_map(lambda leaf, r=r: leaf.draw(index[id(leaf)], r, real=real), tree)
        for r in range(mesh.size)
    ]
    full_into = [
        leaf.draw(i, 99, dtype=leaf.into_dtype, real=real)
        for i, leaf in enumerate(drawn)
    ]
    shards_into = [
        jax.tree.unflatten(
            jax.tree.structure(grads[0]),
            [
                oracle.shard_leaf(
                    x,
                    mesh.ranks,
                    r // mesh.replicas,
                    leaf.layout(mesh.min_shard_numel),
                )
                for x, leaf in zip(full_into, drawn, strict=True)
            ],
        )
        for r in range(mesh.size)
    ]
    layout = mesh.layout(tree, grads[0])
    note(str(jaxzero.make_plan(layout, policy=policy)))

    def step(g: Any, acc: Any) -> Any:
        return jaxzero.shard_grads(
            g,
            layout,
            policy=policy,
            into=acc if accumulate else None,
            with_stats=True,
        )

    found = ranks.run(step, grads, shards_into)
    full = expected(drawn, policy, grads, full_into if accumulate else None)
    stored_dtypes = [leaf.into_dtype if accumulate else leaf.dtype for leaf in drawn]
    stored = [oracle.stored(x, d) for x, d in zip(full, stored_dtypes, strict=True)]
    exact = is_exact(policy, mesh.size, drawn) and not real
    wires = [policy.comm_dtype or leaf.dtype for leaf in drawn]

    for rank, (shards, stats) in enumerate(found):
        assert jax.tree.structure(shards) == jax.tree.structure(grads[0])
        for i, shard in enumerate(jax.tree.leaves(shards)):
            assert shard.dtype == stored[i].dtype
            want = oracle.shard_leaf(
                stored[i] if exact else full[i],
                mesh.ranks,
                rank // mesh.replicas,
                drawn[i].layout(mesh.min_shard_numel),
            )
            if exact:
                oracle.assert_same(shard, want)
            else:
                coarse = (drawn[i].dtype, wires[i], stored_dtypes[i])
                scale = 8.0 * mesh.size / min(1.0, abs(policy.divisor(mesh.size)))
                oracle.assert_close(shard, want, mesh.size, *coarse, scale=scale)
        assert bool(stats.all_finite)
        wide = 1e-6 if exact else 0.1
        assert float(stats.norm) == pytest.approx(
            oracle.global_norm(stored), rel=wide, abs=0 if exact else 0.5
        )
        # Bit for bit the same on every rank.
        assert float(stats.norm) == float(found[0][1].norm)


@examples
@given(
    mesh=meshes(),
    tree=trees(NARROW),
    policy=policies(),
    accumulate=st.booleans(),
)
def test_whole_numbers_are_reduced_exactly(make_mesh, mesh, tree, policy, accumulate):
    check_reduction(mesh, mesh.make(make_mesh), tree, policy, accumulate, real=False)


@examples
@given(
    mesh=meshes(),
    tree=trees(NARROW),
    policy=policies(),
    accumulate=st.booleans(),
)
def test_real_numbers_are_reduced_to_rounding(
    make_mesh, mesh, tree, policy, accumulate
):
    check_reduction(mesh, mesh.make(make_mesh), tree, policy, accumulate, real=True)


@pytest.mark.slow
@examples
@given(
    mesh=meshes(),
    tree=trees(WIDE),
    policy=policies((*WIRES, "float64")),
    accumulate=st.booleans(),
    real=st.booleans(),
)
def test_wide_and_complex_numbers_are_reduced(
    make_mesh, x64, mesh, tree, policy, accumulate, real
):
    check_reduction(mesh, mesh.make(make_mesh), tree, policy, accumulate, real=real)


@examples
@given(
    mesh=meshes(),
    tree=trees((*NARROW, "complex64", "int32", "bool")),
    policy=policies(),
)
def test_gathered_parameters_are_the_ones_that_were_sharded(
    make_mesh, mesh, tree, policy
):
    """Bit for bit, whatever the layout and the buckets, and out of `jit` as well."""
    ranks = mesh.make(make_mesh)
    counter = iter(range(100))
    params = tree_map(lambda leaf: leaf.draw(next(counter), real=True), tree)
    layout = mesh.layout(tree, params)
    shards = jaxzero.shard_params(params, ranks.mesh, layout)

    back = jaxzero.unshard_params(shards, layout)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    oracle.assert_same(back, params)

    mapped = jax.shard_map(
        lambda s: jax.tree.map(
            lambda x: x[None],
            jaxzero.gather_params(s, layout, policy=policy),
        ),
        mesh=ranks.mesh,
        in_specs=(jax.tree.map(lambda s: s.sharding.spec, shards),),
        out_specs=ranks.spec,
        check_vma=mesh.check_vma,
    )
    for gathered in ranks.split(jax.jit(mapped)(shards)):
        dtypes = jax.tree.map(lambda a, b: a.dtype == b.dtype, gathered, params)
        assert all(jax.tree.leaves(dtypes))
        oracle.assert_same(gathered, params)


@examples
@given(
    mesh=meshes(),
    tree=trees(NARROW),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
    where=st.integers(0, 10**6),
    bucket_bytes=st.none() | st.integers(1, 256),
    reduction=st.sampled_from(["native", "float32"]),
)
def test_one_bad_element_on_one_rank_is_seen_by_all(
    make_mesh, mesh, tree, bad, where, bucket_bytes, reduction
):
    """And without one, nothing in the padding is taken for one."""
    drawn = jax.tree.leaves(tree, is_leaf=is_leaf)
    sizes = [int(np.prod(leaf.shape)) for leaf in drawn]
    total = mesh.size * sum(sizes)
    grads = []
    position = where % total if total else -1
    for r in range(mesh.size):
        flat = []
        for i, leaf in enumerate(drawn):
            value = leaf.draw(i, r)
            if 0 <= position < value.size:
                value.reshape(-1)[position] = bad
            position -= value.size
            flat.append(value)
        grads.append(flat)
    policy = Policy(op="sum", bucket_bytes=bucket_bytes, reduction=reduction)

    def step(g: Any) -> Any:
        return jaxzero.shard_grads(
            g,
            "data",
            replicate_axis="replica",
            policy=policy,
            cuts=[leaf.cut for leaf in drawn],
            with_stats=True,
        )[1]

    for stats in mesh.make(make_mesh).run(step, grads):
        assert bool(stats.all_finite) == (total == 0)
        assert bool(jnp.isfinite(stats.norm)) == (total == 0)
