"""shard_params and unshard_params against the oracle's shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from per_rank import PerRank

import jaxzero

SHAPES = {
    "even": (12, 2),
    "ragged": (7,),
    "scalar": (),
    "empty": (3, 0),
    "cut": (2, 5),
    "kept": (3, 2),
}
CUTS = {
    "even": None,
    "ragged": None,
    "scalar": None,
    "empty": 0,
    "cut": 1,
    "kept": "whole",
}


def params(dtype: str = "float32") -> Any:
    return oracle.integers(SHAPES, 0, dtype=dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_every_device_holds_its_rank_s_shard(make_mesh, ranks, dtype):
    mesh = make_mesh(ranks)
    shards = jaxzero.shard_params(params(dtype), mesh, "data", cuts=CUTS)
    # A scalar of integers may be a count, which every rank needs.
    layout = CUTS | ({"scalar": "whole"} if dtype == "int32" else {})
    for name, array in shards.items():
        assert array.dtype == params(dtype)[name].dtype
        for rank, device in enumerate(mesh.devices.flat):
            (held,) = (s.data for s in array.addressable_shards if s.device == device)
            want = oracle.shard_leaf(params(dtype)[name], ranks, rank, layout[name])
            np.testing.assert_array_equal(np.asarray(held), want)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a",), ("b",)], ids="".join)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_ranks_follow_the_order_of_the_names(make_mesh, names, kind):
    """The layout is that of shard_grads over the same axes, on permuted devices."""
    mesh = make_mesh((2, 3), ("a", "b"), kind, order=[3, 5, 0, 1, 4, 2])
    # XLA may crash on an empty argument of a shard_map.
    tree = {k: v for k, v in params().items() if v.size}
    cuts = {k: CUTS[k] for k in tree}
    shards = jaxzero.shard_params(tree, mesh, names, cuts=cuts)
    specs = jax.tree.map(lambda x: x.sharding.spec, shards)
    others = tuple(name for name in ("a", "b") if name not in names)
    ranks = PerRank(mesh, (*names, *others))
    mapped = jax.shard_map(
        lambda tree: jax.tree.map(lambda leaf: leaf[None], tree),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=ranks.spec,
        check_vma=False,
    )
    copies = mesh.size // np.prod([mesh.shape[name] for name in names])
    found = ranks.split(jax.jit(mapped)(shards))
    for index, held in enumerate(found):
        want = oracle.shard(tree, mesh.size // copies, index // copies, cuts)
        oracle.assert_same(held, want)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_results_of_a_step_come_back_in_true_shape(make_mesh, ranks, kind):
    """Also empty leaves, which XLA replicates instead of cutting them."""
    mesh = make_mesh(ranks, kind=kind)
    like = jax.eval_shape(params)
    shards = jaxzero.shard_params(params(), mesh, "data", cuts=CUTS)
    specs = jax.tree.map(lambda x: x.sharding.spec, shards)

    def there_and_back(tree: Any) -> Any:
        full = jaxzero.gather_params(tree, like, "data", cuts=CUTS)
        return jaxzero.shard_grads(full, "data", cuts=CUTS)

    step = jax.shard_map(there_and_back, mesh=mesh, in_specs=(specs,), out_specs=specs)
    back = jaxzero.unshard_params(jax.jit(step)(shards), like, cuts=CUTS)
    assert all(isinstance(leaf, np.ndarray) for leaf in back.values())
    oracle.assert_same(back, params())


def test_params_may_be_jax_arrays_numbers_and_mixed_trees(make_mesh):
    tree = [{"w": jnp.arange(5.0), "n": None}, (3, 2.5, True)]
    shards = jaxzero.shard_params(tree, make_mesh(2), "data")
    back = jaxzero.unshard_params(shards, tree)
    oracle.assert_same(back, [{"w": np.arange(5.0), "n": None}, (3, 2.5, True)])
    assert [x.dtype.name for x in back[1]] == ["int32", "float32", "bool"]


def test_only_whole_leaves_are_replicated(make_mesh):
    shards = jaxzero.shard_params(params(), make_mesh(4), "data", cuts=CUTS)
    specs = {name: array.sharding.spec for name, array in shards.items()}
    assert specs["kept"] == P()
    assert specs["cut"] == P(None, "data")
    assert {specs[name] for name in ("even", "ragged", "scalar")} == {P("data")}
    # A scalar costs one element a rank; the first rank holds its value.
    assert shards["scalar"].shape == (4,)
    np.testing.assert_array_equal(shards["scalar"][1:], np.zeros(3))


SMALL = 8
SMALL_CUTS = CUTS | {"kept": "flat"}
SMALL_LAYOUT = SMALL_CUTS | {"ragged": "whole", "scalar": "whole"}
"""What SMALL makes of SMALL_CUTS: an explicit cut wins."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 8], ids=lambda n: f"n{n}")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_small_leaves_stay_whole_there_and_back(make_mesh, ranks, kind, check_vma):
    mesh = make_mesh(ranks, kind=kind)
    layout = jaxzero.make_layout(
        jax.eval_shape(params),
        "data",
        mesh=mesh,
        cuts=SMALL_CUTS,
        min_shard_numel=SMALL,
    )
    shards = jaxzero.shard_params(params(), mesh, layout)
    specs = jax.tree.map(lambda x: x.sharding.spec, shards)
    oracle.assert_same(shards, oracle.shards(params(), ranks, SMALL_LAYOUT))
    whole = {name for name, cut in SMALL_LAYOUT.items() if cut == "whole"}
    assert {name for name, spec in specs.items() if spec == P()} == whole
    oracle.assert_same(jaxzero.unshard_params(shards, layout), params())

    def there_and_back(tree: Any) -> Any:
        full = jaxzero.gather_params(tree, layout)
        return jaxzero.shard_grads(full, layout)

    step = jax.shard_map(
        there_and_back,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
        check_vma=check_vma,
    )
    back = jaxzero.unshard_params(jax.jit(step)(shards), layout)
    oracle.assert_same(back, params())


@pytest.mark.parametrize(
    ("shape", "given", "other", "ranks", "fits"),
    [
        ((), SMALL, 0, 4, False),
        ((), 0, SMALL, 4, False),
        ((7,), 0, SMALL, 4, False),
        ((7,), SMALL, 0, 4, False),
        ((4,), SMALL, 0, 4, True),
        ((4,), 0, SMALL, 4, True),
        ((), SMALL, 0, 1, False),
        ((7,), 0, SMALL, 1, True),
    ],
)
def test_another_layout_never_gives_a_wrong_value(
    make_mesh, shape, given, other, ranks, fits
):
    """Where the shape tells the layouts apart, the message says what to give."""
    true = oracle.integers({"w": shape}, 0)
    mesh = make_mesh(ranks)

    def layout(numel: int) -> Any:
        return jaxzero.make_layout(true, "data", mesh=mesh, min_shard_numel=numel)

    shards = jaxzero.shard_params(true, mesh, layout(given))
    if fits:
        oracle.assert_same(jaxzero.unshard_params(shards, layout(other)), true)
        return
    with pytest.raises(ValueError, match=r"the same cuts; or the layout of both"):
        jaxzero.unshard_params(shards, layout(other))


@pytest.mark.parametrize("call", ["shard_params", "unshard_params"])
def test_under_jit_the_message_says_where_to_call(make_mesh, call):
    mesh = make_mesh(2)

    def inside(tree: Any) -> Any:
        if call == "shard_params":
            return jaxzero.shard_params(tree, mesh, "data")
        return jaxzero.unshard_params(tree, jax.ShapeDtypeStruct((4,), "float32"))

    with pytest.raises(ValueError, match=f"{call}.*traced.*outside") as caught:
        jax.jit(inside)(jnp.ones(4))
    assert "leaf (the tree itself)" in str(caught.value)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_a_count_of_steps_is_on_every_rank(make_mesh, dtype):
    """As optimizers keep it: not a gradient, and read by all ranks."""
    mesh = make_mesh(4)
    state = {"count": np.ones((), dtype), "mu": np.arange(5, dtype=np.float32)}
    like = jax.eval_shape(lambda: state)
    shards = jaxzero.shard_params(state, mesh, "data")
    assert shards["count"].sharding.spec == P()
    assert [np.asarray(s.data) for s in shards["count"].addressable_shards] == [1] * 4
    assert jaxzero.unshard_params(shards, like)["count"] == 1
    specs = jax.tree.map(lambda x: x.sharding.spec, shards)
    gather = jax.shard_map(
        lambda s: jax.tree.map(
            lambda x: x[None], jaxzero.gather_params(s, like, "data")
        ),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P("data"),
        check_vma=False,
    )
    assert jax.jit(gather)(shards)["count"].tolist() == [1] * 4
