"""Leaves out of pytrees with their paths, and results back into their places."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero
from jaxzero import Policy
from jaxzero._collectives.leaves import leaf_spec
from jaxzero._cut import cut_leaf
from jaxzero._tree import broadcast_cuts, check_width, flatten, match

Pair = collections.namedtuple("Pair", ["w", "b"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A container of JAX's own kind whose instances can be called, as modules are."""

    w: Any
    b: Any

    def __call__(self, x: Any) -> Any:
        return x


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def paths(tree: Any) -> list[str]:
    return [leaf.path for leaf in flatten(tree, "tree").leaves]


def float0(*sizes: int) -> np.ndarray:
    return np.zeros(sizes, jax.dtypes.float0)


# Flattening.


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"b": np.ones(1), "a": np.ones(2)}, ["['a']", "['b']"]),
        ([np.ones(1), (np.ones(2),)], ["[0]", "[1][0]"]),
        (Pair(np.ones(1), np.ones(2)), [".w", ".b"]),
        (Layer(np.ones(1), {"x": np.ones(2)}), [".w", ".b['x']"]),
        (np.ones(3), ["(the tree itself)"]),
        ({}, []),
        (None, []),
    ],
    ids=["dict", "list", "namedtuple", "dataclass", "array", "empty", "none"],
)
def test_leaves_are_named_by_their_key_paths(tree, expected):
    assert paths(tree) == expected


def test_what_carries_no_gradient_is_set_aside_and_put_back():
    masked = optax.MaskedNode()
    tree = {
        "a": np.ones(1, np.float32),
        "b": None,
        "c": float0(3),
        "d": masked,
        "e": np.ones(2, np.float32),
    }
    flat = flatten(tree, "grads")
    assert [leaf.path for leaf in flat.leaves] == ["['a']", "['e']"]
    back = flat.rebuild(["new a", "new e"])
    assert back["a"] == "new a" and back["e"] == "new e"
    assert back["b"] is None and back["d"] == masked
    assert back["c"] is tree["c"]


def test_rebuild_takes_exactly_one_value_a_leaf():
    flat = flatten({"a": np.ones(1), "b": np.ones(1)}, "grads")
    with pytest.raises(ValueError, match="shorter"):
        flat.rebuild([1])


@pytest.mark.parametrize(
    ("value", "dtype"), [(1.5, "float32"), (3, "int32"), (True, "bool")], ids=repr
)
def test_python_numbers_are_scalars_of_the_dtype_jax_gives_them(value, dtype):
    (leaf,) = flatten([value], "grads").leaves
    assert (leaf.shape, leaf.dtype) == ((), dtype)
    assert leaf.dtype == jnp.asarray(value).dtype.name


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("text", "is of type str"),
        (object(), "is of type object"),
        (np.array(["text"]), "has dtype <U4"),
        (np.array([None]), "has dtype object"),
        (np.array(["2026-01-01"], "datetime64[D]"), "has dtype datetime64[D]"),
        (jax.random.key(0), "has dtype key<fry>"),
    ],
    ids=["str", "object", "strings", "objects", "dates", "key"],
)
def test_leaf_without_numbers_is_refused_by_its_path(value, found):
    with pytest.raises(TypeError) as caught:
        flatten({"net": [value]}, "grads")
    assert f"grads leaf ['net'][0] {found}; expected an array" in str(caught.value)
    assert "Take it out of the tree" in str(caught.value)


def test_shapes_suffice_only_where_nothing_is_computed():
    tree = {"w": shape(4)}
    assert flatten(tree, "like", shapes_suffice=True).leaves[0].shape == (4,)
    with pytest.raises(TypeError, match=r"grads leaf \['w'\] is a ShapeDtypeStruct"):
        flatten(tree, "grads")


# Trees that must agree.


def test_match_ignores_values_and_dtypes():
    reference = flatten({"w": np.ones(4, np.float32)}, "grads")
    flat = match({"w": np.ones(2, np.float16)}, reference, "into", "grads")
    assert [leaf.shape for leaf in flat.leaves] == [(2,)]


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ({"a": 1.0}, "into has no leaf ['b'], which grads has"),
        ({"a": 1.0, "b": None}, "into has no leaf ['b'], which grads has"),
        ({"a": 1.0, "b": float0()}, "into has no leaf ['b'], which grads has"),
        (
            {"a": 1.0, "b": 1.0, "c": {"d": 1.0}},
            "into has a leaf ['c']['d'], which grads does not have",
        ),
        (collections.OrderedDict(a=1.0, b=1.0), "the containers differ"),
    ],
    ids=["missing", "none", "float0", "surplus", "containers"],
)
def test_mismatch_names_the_first_leaf_of_one_tree_only(tree, found):
    reference = flatten({"a": 1.0, "b": 1.0}, "grads")
    with pytest.raises(ValueError) as caught:
        match(tree, reference, "into", "grads")
    message = str(caught.value)
    assert "into must have the structure of grads, but" in message
    assert found in message
    assert "Build it with jax.tree.map over grads" in message


# Cuts as a prefix.

TREE = {"a": {"x": np.ones(1), "y": np.ones(1)}, "b": [np.ones(1), np.ones(1)]}


def choose(path: str, shape: tuple[int, ...]) -> int:
    return 0


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        (None, [None] * 4),
        ("flat", ["flat"] * 4),
        (0, [0] * 4),
        (np.int64(0), [0] * 4),
        (choose, [choose] * 4),
        ({"a": "whole", "b": None}, ["whole", "whole", None, None]),
        ({"a": {"x": 1, "y": None}, "b": "flat"}, [1, None, "flat", "flat"]),
        ({"a": choose, "b": [0, "flat"]}, [choose, choose, 0, "flat"]),
    ],
    ids=[
        *("default", "word", "dimension", "numpy", "callable"),
        *("subtrees", "leaves", "callables"),
    ],
)
def test_cuts_spread_over_the_leaves_below_them(cuts, expected):
    assert broadcast_cuts(cuts, TREE, flatten(TREE, "tree")) == expected


def test_cuts_skip_what_is_set_aside():
    tree = {"a": [np.ones(1), None, float0(2)], "b": float0(1), "c": np.ones(1)}
    cuts = {"a": "flat", "b": 0, "c": "whole"}
    assert broadcast_cuts(cuts, tree, flatten(tree, "tree")) == ["flat", "whole"]


def test_tree_of_cuts_may_be_of_a_type_that_can_be_called():
    """A module of cuts is a tree, not one callable for all leaves."""
    tree = Layer(np.ones(1), np.ones(1))
    cuts = Layer("flat", "whole")
    assert broadcast_cuts(cuts, tree, flatten(tree, "tree")) == ["flat", "whole"]


@pytest.mark.parametrize(
    ("cuts", "found"),
    [
        ({"a": 0}, "cuts has no entry for the leaf ['b'][0]"),
        ({"a": 0, "b": 0, "c": 0}, "cuts has an entry ['c'], which the tree does not"),
        ({"a": 0, "b": [0]}, "cuts has no entry for the leaf ['b'][1]"),
        ({"a": 0, "b": [0, [0]]}, "cuts has an entry ['b'][1][0], which the tree does"),
        ({"a": 0, "b": (0, 0)}, "different types at key path"),
        ([0, 0], "cuts has an entry [0], which the tree does not have"),
    ],
    ids=["missing", "surplus", "short", "deep", "container", "list"],
)
def test_cuts_that_are_no_prefix_name_the_entry(cuts, found):
    with pytest.raises(ValueError) as caught:
        broadcast_cuts(cuts, TREE, flatten(TREE, "tree"))
    message = str(caught.value)
    assert "cuts must be a pytree prefix of the tree, but" in message
    assert found in message
    assert "Give one cut (None, 'flat', 'whole', a dimension or a callable)" in message


# What the planner is told.


@pytest.mark.parametrize(
    ("leaf", "policy", "into", "dtype", "shard_dtype"),
    [
        ("float32", {}, None, "float32", "float32"),
        ("bfloat16", {"comm_dtype": "float32"}, None, "bfloat16", "bfloat16"),
        ("bfloat16", {"shard_dtype": "float32"}, None, "bfloat16", "float32"),
        ("bfloat16", {}, "float32", "bfloat16", "float32"),
        ("float32", {"shard_dtype": "float32"}, "float32", "float32", "float32"),
        ("int8", {"comm_dtype": "bfloat16"}, None, "bfloat16", "bfloat16"),
        (
            *("int8", {"comm_dtype": "bfloat16", "shard_dtype": "float32"}, None),
            *("bfloat16", "float32"),
        ),
        ("complex64", {"comm_dtype": "bfloat16"}, None, "complex64", "complex64"),
        ("complex64", {"shard_dtype": "float64"}, None, "complex64", "complex128"),
        ("float32", {"shard_dtype": "complex64"}, None, "float32", "float32"),
    ],
)
def test_stored_dtype_is_that_of_into_then_of_the_policy_then_of_the_leaf(
    leaf, policy, into, dtype, shard_dtype
):
    tree = flatten([shape(8, dtype=leaf)], "tree", shapes_suffice=True)
    spec = leaf_spec(
        tree.leaves[0],
        cut_leaf(None, "", (8,), 2),
        Policy(**policy),
        into_dtype=into,
    )
    assert (spec.dtype, spec.shard_dtype) == (dtype, shard_dtype)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_64_bit_dtypes_need_64_bit_mode(dtype):
    with pytest.raises(
        TypeError, match=f"the shard is {dtype}, which JAX would narrow"
    ):
        check_width(dtype, "the shard")
    with jax.enable_x64(True):
        check_width(dtype, "the shard")


@pytest.mark.parametrize("dtype", [None, "float32", "complex64", "int64"])
def test_other_dtypes_need_no_mode(dtype):
    check_width(dtype, "the shard")


# make_plan.


def test_plan_of_shapes_is_the_plan_of_arrays():
    arrays = {"w": jnp.ones((8, 3)), "b": jnp.ones(5, jnp.bfloat16)}
    structs = jax.eval_shape(lambda: arrays)
    assert jaxzero.make_plan(arrays, 4) == jaxzero.make_plan(structs, 4)


def test_plan_takes_cuts_and_policy():
    tree = {"w": shape(8, 3), "b": shape(5)}
    policy = Policy(comm_dtype="bfloat16", op="sum")
    plan = jaxzero.make_plan(tree, 4, policy, {"w": 1, "b": "whole"})
    assert [leaf.path for leaf in plan.leaves] == ["['b']", "['w']"]
    assert [leaf.cut.layout for leaf in plan.leaves] == ["whole", "dim=1"]
    assert {bucket.comm_dtype for bucket in plan.buckets} == {"bfloat16"}
    assert plan.divisor == 1.0


@pytest.mark.parametrize(("transport", "like"), [("auto", "nccl"), ("xla", "xla")])
def test_plan_has_the_limits_of_its_transport(transport, like):
    ours = jaxzero.make_plan({}, 4, Policy(transport=transport)).limits
    assert ours == jaxzero.make_plan({}, 4, Policy(transport=like)).limits


def test_plan_takes_integers_of_other_types():
    assert jaxzero.make_plan({}, np.int64(4)).group_size == 4
