"""What bad input says: the leaf, what was found, what was expected, and the way out.

Everything is refused while tracing, from shapes and dtypes alone, so that all ranks
raise alike; most of these tests only trace.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import Policy

Tree = Any


@contextlib.contextmanager
def refused(
    error: type[Exception],
    *,
    leaf: str = "",
    found: str,
    expected: str,
    way_out: str,
) -> Iterator[None]:
    """Asserts that the block raises an error whose message has all four parts."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    for part in (leaf, found, expected, way_out):
        assert part in message
    assert "  " not in message.replace("\n    ", "")


def trace(mesh: Mesh, function: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Traces the function of one rank, given the same tree on every rank."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P("data"))
    return jax.eval_shape(mapped, tree)


def trace_shard_grads(mesh: Mesh, tree: Tree, **options: Any) -> Tree:
    return trace(mesh, lambda g: jaxzero.shard_grads(g, "data", **options), tree)


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture
def mesh(make_mesh) -> Mesh:
    """A mesh of 4 devices along the axis "data"."""
    return make_mesh(4)


GRADS = {"w": shape(8, 3), "b": shape(5)}
FIX = (
    "Call it inside a shard_map over that axis, under jit:\n"
    "    step = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...))\n"
    "    # and inside f: jaxzero.{call}(..., {axis!r})"
)


# The axis.


@pytest.mark.parametrize("call", ["shard_grads", "gather_params"])
def test_unbound_axis_shows_the_two_lines_that_bind_it(call):
    tree = {"w": np.ones(4, np.float32)}
    like = (tree,) if call == "gather_params" else ()
    with refused(
        ValueError,
        found=f"{call}: axis 'data' is not bound",
        expected="by a shard_map (bound here: none)",
        way_out=FIX.format(call=call, axis="data"),
    ):
        getattr(jaxzero, call)(tree, *like, "data")


def test_another_axis_than_the_bound_one_lists_the_bound_one(mesh):
    with refused(
        ValueError,
        found="axis 'model' is not bound",
        expected="bound here: 'data'",
        way_out=FIX.format(call="shard_grads", axis="model"),
    ):
        trace(mesh, lambda g: jaxzero.shard_grads(g, "model"), GRADS)


def test_unbound_replicate_axis(mesh):
    with refused(
        ValueError,
        found="axis 'replica' is not bound",
        expected="bound here: 'data'",
        way_out="Call it inside a shard_map over that axis",
    ):
        trace_shard_grads(mesh, GRADS, replicate_axis="replica")


def test_axis_of_a_vmap_is_no_mesh_axis():
    with refused(
        ValueError,
        found="axis 'data' is not bound",
        expected="by a shard_map",
        way_out=FIX.format(call="shard_grads", axis="data"),
    ):
        jax.vmap(lambda g: jaxzero.shard_grads(g, "data"), axis_name="data")(
            np.ones((4, 4), np.float32)
        )


@pytest.mark.parametrize("name", [["data"], (), 0, ("data", 1)], ids=repr)
def test_axis_name_of_another_type(mesh, name):
    with refused(
        TypeError,
        found=f"shard_grads: axis_name={name!r}",
        expected="the name of a mesh axis",
        way_out="non-empty tuple of names",
    ):
        trace(mesh, lambda g: jaxzero.shard_grads(g, name), GRADS)


def test_axis_named_twice(mesh):
    with refused(
        ValueError,
        found="axis 'data' is named twice in axis_name=('data', 'data')",
        expected="each axis once",
        way_out="name each axis once",
    ):
        trace(mesh, lambda g: jaxzero.shard_grads(g, ("data", "data")), GRADS)


def test_axis_named_as_shard_and_replicate_axis(mesh):
    with refused(
        ValueError,
        found="named twice in axis_name='data' and replicate_axis='data'",
        expected="each axis once",
        way_out="name each axis once",
    ):
        trace_shard_grads(mesh, GRADS, replicate_axis="data")


# A partly manual shard_map.


def partly_manual(
    make_mesh: Any, kind: str, function: Callable[[Tree], Tree]
) -> tuple[Any, Tree]:
    """Returns a function that is manual over "data" only, and its argument."""
    mesh = make_mesh((4, 2), ("data", "model"), kind=kind)
    sharding = NamedSharding(mesh, P(None, "model"))
    tree = {"w": jax.device_put(np.ones((4, 2), np.float32), sharding)}
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(), out_specs=P("data"), axis_names={"data"}
    )
    return mapped, tree


PARTLY_MANUAL = {
    "shard_grads": lambda g: jaxzero.shard_grads(g, "data"),
    "gather_params": lambda s: jaxzero.gather_params(s, {"w": shape(16, 2)}, "data"),
}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("call", PARTLY_MANUAL)
def test_leaf_on_an_axis_of_the_compiler(make_mesh, kind, call):
    mapped, tree = partly_manual(make_mesh, kind, PARTLY_MANUAL[call])
    with refused(
        NotImplementedError,
        leaf=f"{call}: leaf ['w']",
        found="may be sharded over the mesh axes 'model'",
        expected="manual over all axes",
        way_out="drop axis_names=), or nest a shard_map over 'model'",
    ):
        jax.eval_shape(jax.jit(mapped), tree)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_accumulator_on_an_axis_of_the_compiler(make_mesh, kind):
    def step(into: Tree) -> Tree:
        grads = {"w": jnp.ones((16, 2), jnp.float32)}
        return jaxzero.shard_grads(grads, "data", into=into)

    mapped, tree = partly_manual(make_mesh, kind, step)
    with refused(
        NotImplementedError,
        leaf="leaf ['w']",
        found="may be sharded over the mesh axes 'model'",
        expected="manual over all axes",
        way_out="drop axis_names=",
    ):
        jax.eval_shape(jax.jit(mapped), tree)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_nested_shard_map_over_the_other_axis_is_a_way_out(make_mesh, kind):
    """The advice of the message holds; nothing is sent, as the leaf is empty."""
    mesh = make_mesh((4, 2), ("data", "model"), kind=kind)

    def outer(tree: Tree) -> Tree:
        inner = jax.shard_map(
            lambda g: jaxzero.shard_grads(g, "data"),
            in_specs=P(None, "model"),
            out_specs=P("model"),
            axis_names={"model"},
        )
        return inner(tree)

    mapped = jax.shard_map(
        outer, mesh=mesh, in_specs=P(), out_specs=P("data"), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "model"))
        tree = {"w": jax.device_put(np.ones((0, 2), np.float32), sharding)}
        assert jax.eval_shape(jax.jit(mapped), tree)["w"].shape == (0,)


# The gradients.


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bool", "float8_e4m3fn"])
def test_narrow_leaf_without_comm_dtype(mesh, dtype):
    tree = {"net": [shape(4), {"mask": shape(4, dtype=dtype)}]}
    with refused(
        TypeError,
        leaf="leaf ['net'][1]['mask']",
        found=f"has dtype {dtype}, whose sums would wrap or saturate",
        expected="expected one of float32, bfloat16, float16, float64, complex64",
        way_out="Policy(comm_dtype='float32')",
    ):
        trace_shard_grads(mesh, tree)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bool", "float8_e4m3fn"])
def test_narrow_leaf_is_widened_by_comm_dtype(dtype):
    policy = Policy(comm_dtype="bfloat16")
    plan = jaxzero.make_plan({"w": shape(4, dtype=dtype)}, 2, policy)
    assert plan.leaves[0].dtype == plan.leaves[0].shard_dtype == "bfloat16"


def test_random_key_leaf(mesh):
    with refused(
        TypeError,
        leaf="grads leaf ['key']",
        found="dtype key<fry>",
        expected="an array of numbers",
        way_out="jax.random.key_data",
    ):
        trace_shard_grads(mesh, {"key": jax.random.key(0)})


@pytest.mark.parametrize(
    "value", [np.array([None]), np.array(["a"])], ids=["object", "string"]
)
def test_leaf_without_numbers(value):
    with refused(
        TypeError,
        leaf="tree leaf ['w']",
        found=f"has dtype {value.dtype}",
        expected="an array of numbers",
        way_out="Take it out of the tree",
    ):
        jaxzero.make_plan({"w": value}, 2)


def test_leaf_that_is_no_array(mesh):
    with refused(
        TypeError,
        leaf="grads leaf ['name']",
        found="is of type str",
        expected="expected an array",
        way_out="Take it out of the tree",
    ):
        trace(
            mesh,
            lambda g: jaxzero.shard_grads({**g, "name": "encoder"}, "data"),
            GRADS,
        )


def test_shape_in_place_of_an_array(mesh):
    with refused(
        TypeError,
        leaf="grads leaf ['w']",
        found="is a ShapeDtypeStruct",
        expected="expected an array",
        way_out="Give the tree that it was made from",
    ):
        trace(mesh, lambda g: jaxzero.shard_grads({"w": shape(4)}, "data"), GRADS)


# 64-bit dtypes in 32-bit mode.


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (Policy(comm_dtype="float64"), "the comm_dtype of leaf ['w'] is float64"),
        (Policy(shard_dtype="float64"), "the shard of leaf ['w'] is float64"),
    ],
    ids=["comm", "shard"],
)
def test_float64_asked_for_in_32_bit_mode(mesh, policy, what):
    with refused(
        TypeError,
        leaf="['w']",
        found=what,
        expected="expects at most float32 or complex64",
        way_out="jax.config.update('jax_enable_x64', True) first, or",
    ):
        trace_shard_grads(mesh, {"w": shape(4)}, policy=policy)


def test_float64_leaf_in_32_bit_mode(mesh):
    """A NumPy array keeps its float64 until JAX would narrow it."""
    with refused(
        TypeError,
        leaf="leaf ['w']",
        found="is float64",
        expected="expects at most float32 or complex64",
        way_out="or ask for a 32-bit dtype",
    ):
        trace(mesh, lambda _: jaxzero.shard_grads({"w": np.ones(4)}, "data"), GRADS)


@pytest.mark.parametrize(
    ("like", "policy", "what"),
    [
        (shape(16, dtype="float64"), Policy(), "like leaf ['w'] is float64"),
        (
            shape(16),
            Policy(compute_dtype="float64"),
            "the compute_dtype of leaf ['w'] is float64",
        ),
    ],
    ids=["like", "compute"],
)
def test_float64_parameters_in_32_bit_mode(mesh, like, policy, what):
    with refused(
        TypeError,
        leaf="['w']",
        found=what,
        expected="expects at most float32 or complex64",
        way_out="jax.config.update('jax_enable_x64', True)",
    ):
        trace(
            mesh,
            lambda s: jaxzero.gather_params(s, {"w": like}, "data", policy=policy),
            {"w": shape(4)},
        )


@pytest.mark.usefixtures("x64")
def test_float64_in_64_bit_mode_is_taken(mesh):
    """The mode is that of the running context, not only the global one."""
    tree = {"w": shape(0, 4, dtype="float64")}
    policy = Policy(comm_dtype="float64")
    assert trace_shard_grads(mesh, tree, policy=policy)["w"].dtype == jnp.float64


# Complex leaves.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_complex_leaf_with_a_16_bit_shard_dtype(mesh, dtype):
    with refused(
        TypeError,
        leaf="['w'] of dtype complex64",
        found=f"shard_dtype='{dtype}' cannot hold",
        expected=f"no complex dtype has {dtype} components",
        way_out="Use shard_dtype='complex64', or give the leaf as two real leaves",
    ):
        trace_shard_grads(
            mesh,
            {"w": shape(4, dtype="complex64")},
            policy=Policy(shard_dtype=dtype),
        )


def test_complex_parameter_with_a_16_bit_compute_dtype(mesh):
    like = {"w": shape(16, dtype="complex64")}
    policy = Policy(compute_dtype="bfloat16")
    with refused(
        TypeError,
        leaf="['w'] of dtype complex64",
        found="compute_dtype='bfloat16' cannot hold",
        expected="no complex dtype has bfloat16 components",
        way_out="Use compute_dtype='complex64'",
    ):
        trace(
            mesh,
            lambda s: jaxzero.gather_params(s, like, "data", policy=policy),
            {"w": shape(4, dtype="complex64")},
        )


# The accumulators.


def trace_into(mesh: Mesh, grads: Tree, into: Tree, **options: Any) -> Tree:
    def step(pair: Tree) -> Tree:
        return jaxzero.shard_grads(pair[0], "data", into=pair[1], **options)

    return trace(mesh, step, (grads, into))


INTO_GRADS = {"w": shape(8, 3), "b": shape(5)}


@pytest.mark.parametrize(
    ("into", "difference"),
    [
        ({"w": shape(2, 3)}, "into has no leaf ['b'], which grads has"),
        (
            {"w": shape(2, 3), "b": shape(2), "c": shape(2)},
            "into has a leaf ['c'], which grads does not have",
        ),
        ({"w": shape(2, 3), "b": None}, "into has no leaf ['b'], which grads has"),
        ({"w": [shape(2, 3)], "b": shape(2)}, "into has no leaf ['w'], which grads"),
    ],
    ids=["missing", "surplus", "none", "nested"],
)
def test_into_of_another_structure(mesh, into, difference):
    with refused(
        ValueError,
        leaf="leaf ['",
        found=difference,
        expected="into must have the structure of grads",
        way_out="Build it with jax.tree.map over grads",
    ):
        trace_into(mesh, INTO_GRADS, into)


def test_into_with_other_containers(mesh):
    with refused(
        ValueError,
        found="the containers differ: PyTreeDef((*,)) against PyTreeDef([*])",
        expected="into must have the structure of grads",
        way_out="Build it with jax.tree.map over grads",
    ):
        trace_into(mesh, [shape(8)], (shape(2),))


@pytest.mark.parametrize(
    ("cut", "layout", "expected"),
    [(None, "rows", (2, 3)), ("flat", "flat", (6,)), ("whole", "whole", (8, 3))],
    ids=["rows", "flat", "whole"],
)
def test_into_of_another_shape(mesh, cut, layout, expected):
    with refused(
        ValueError,
        leaf="into leaf ['w']",
        found="has shape (1, 3)",
        expected=f"expected {expected}, the shard of a gradient of shape (8, 3) "
        f"({layout} layout)",
        way_out="Start with the result of shard_grads(..., into=None)",
    ):
        trace_into(
            mesh, INTO_GRADS, {"w": shape(1, 3), "b": shape(2)}, cuts={"w": cut, "b": 0}
        )


@pytest.mark.parametrize(
    ("leaf_dtype", "into_dtype", "kind"),
    [
        ("float32", "int32", "real floating"),
        ("float32", "complex64", "real floating"),
        ("complex64", "float32", "complex"),
        ("bfloat16", "float8_e4m3fn", "real floating"),
    ],
)
def test_into_of_another_kind_of_dtype(mesh, leaf_dtype, into_dtype, kind):
    with refused(
        TypeError,
        leaf="into leaf ['w']",
        found=f"has dtype {into_dtype}, which cannot accumulate a gradient of dtype "
        f"{leaf_dtype}",
        expected=f"expected {kind} shards",
        way_out="Policy(shard_dtype=...)",
    ):
        trace_into(
            mesh,
            {"w": shape(8, dtype=leaf_dtype)},
            {"w": shape(2, dtype=into_dtype)},
        )


def test_into_against_shard_dtype(mesh):
    with refused(
        TypeError,
        leaf="into leaf ['w']",
        found="has dtype bfloat16, but Policy shard_dtype='float32'",
        expected="the result takes the dtype of into",
        way_out="make them agree or leave shard_dtype out",
    ):
        trace_into(
            mesh,
            {"w": shape(8)},
            {"w": shape(2, dtype="bfloat16")},
            policy=Policy(shard_dtype="float32"),
        )


# The cuts.


@pytest.mark.parametrize("dim", [2, -3, 100])
def test_dimension_out_of_range(mesh, dim):
    with refused(
        ValueError,
        leaf="leaf ['w']",
        found=f"is dimension {dim}, but its shape (8, 3) has 2 dimensions",
        expected="expected a number from -2 to 1",
        way_out="or 'flat' or 'whole'",
    ):
        trace_shard_grads(mesh, GRADS, cuts={"w": dim, "b": None})


def test_dimension_of_a_scalar(mesh):
    with refused(
        ValueError,
        leaf="leaf ['s']",
        found="is dimension 0, but its shape () has 0 dimensions",
        expected="expected 'flat' or 'whole'",
        way_out="'flat' or 'whole'",
    ):
        trace_shard_grads(mesh, {"s": shape()}, cuts=0)


@pytest.mark.parametrize(
    ("cut", "error"), [("row", ValueError), (1.5, TypeError), (True, TypeError)]
)
@pytest.mark.parametrize("given", ["directly", "by a callable"])
def test_cut_of_an_unknown_kind(mesh, cut, error, given):
    cuts = {"w": cut, "b": None}
    if given == "by a callable":
        cuts["w"] = lambda path, shape: cut
    with refused(
        error,
        leaf="leaf ['w']",
        found=f"is {cut!r}",
        expected="expected None, 'flat', 'whole', the number of a dimension",
        way_out="or a callable (path, shape) that returns one",
    ):
        trace_shard_grads(mesh, GRADS, cuts=cuts)


@pytest.mark.parametrize(
    ("cuts", "difference"),
    [
        ({"w": 0}, "cuts has no entry for the leaf ['b']"),
        ({"w": 0, "b": 0, "c": 0}, "cuts has an entry ['c'], which the tree does not"),
        ({"w": {"x": 0}, "b": 0}, "cuts has an entry ['w']['x'], which the tree does"),
        ([0, 0], "cuts has an entry [0], which the tree does not have"),
    ],
    ids=["missing", "surplus", "deeper", "containers"],
)
@pytest.mark.parametrize("call", ["shard_grads", "make_plan"])
def test_cuts_that_are_no_prefix(mesh, cuts, difference, call):
    with refused(
        ValueError,
        leaf="[",
        found=difference,
        expected="cuts must be a pytree prefix of the tree",
        way_out="for the whole tree, or a tree of cuts with one for each leaf",
    ):
        if call == "shard_grads":
            trace_shard_grads(mesh, GRADS, cuts=cuts)
        else:
            jaxzero.make_plan(GRADS, 4, cuts=cuts)


# gather_params.


def trace_gather(mesh: Mesh, shards: Tree, like: Tree, **options: Any) -> Tree:
    return trace(
        mesh, lambda s: jaxzero.gather_params(s, like, "data", **options), shards
    )


@pytest.mark.parametrize(
    ("like", "layout", "expected"),
    [((8, 3), "rows", (2, 3)), ((7, 3), "flat", (6,)), ((16,), "rows", (4,))],
)
def test_like_of_another_shape(mesh, like, layout, expected):
    with refused(
        ValueError,
        leaf="shards leaf ['w']",
        found="has shape (4, 3)",
        expected=f"expected {expected}, the shard of a parameter of shape {like} over "
        f"4 ranks ({layout} layout)",
        way_out="Give the true shapes as like (jax.eval_shape of the init function)",
    ):
        trace_gather(mesh, {"w": shape(4, 3)}, {"w": shape(*like)})


def test_gather_with_other_cuts_than_the_shards_have(mesh):
    with refused(
        ValueError,
        leaf="shards leaf ['w']",
        found="has shape (4, 3)",
        expected="expected (12,)",
        way_out="and the cuts of shard_params; or the layout of both",
    ):
        trace_gather(mesh, {"w": shape(4, 3)}, {"w": shape(16, 3)}, cuts="flat")


@pytest.mark.parametrize(
    ("like", "difference"),
    [
        ({"v": shape(16)}, "shards has no leaf ['v'], which like has"),
        ({}, "shards has a leaf ['w'], which like does not have"),
    ],
    ids=["missing", "surplus"],
)
def test_like_of_another_structure(mesh, like, difference):
    with refused(
        ValueError,
        leaf="leaf ['",
        found=difference,
        expected="shards must have the structure of like",
        way_out="Build it with jax.tree.map over like",
    ):
        trace_gather(mesh, {"w": shape(4)}, like)


@pytest.mark.parametrize(
    ("shard_dtype", "like_dtype", "kind"),
    [
        ("float32", "complex64", "complex"),
        ("complex64", "float32", "real floating"),
        ("float32", "int32", "integer or boolean"),
        ("int32", "bfloat16", "real floating"),
    ],
)
def test_like_of_another_kind_of_dtype(mesh, shard_dtype, like_dtype, kind):
    with refused(
        TypeError,
        leaf="shards leaf ['w']",
        found=f"has dtype {shard_dtype}, but like says {like_dtype}",
        expected=f"expected {kind} shards",
        way_out="Give the true dtypes as like",
    ):
        trace_gather(
            mesh,
            {"w": shape(4, dtype=shard_dtype)},
            {"w": shape(16, dtype=like_dtype)},
        )


# shard_params and unshard_params.


def test_shard_params_over_an_axis_that_the_mesh_lacks(mesh):
    with refused(
        ValueError,
        found="shard_params: axis 'model' is not in the mesh",
        expected="expected one of its axes 'data'",
        way_out="Name one of them, or make the mesh with that axis",
    ):
        jaxzero.shard_params({"w": np.ones(4)}, mesh, "model")


@pytest.mark.parametrize(
    ("name", "error"), [(("data", "data"), ValueError), ((), TypeError)]
)
def test_shard_params_checks_axis_names(mesh, name, error):
    with refused(
        error,
        found=f"axis_name={name!r}",
        expected="shard_params:",
        way_out="name",
    ):
        jaxzero.shard_params({"w": np.ones(4)}, mesh, name)


def test_unshard_params_with_another_like(mesh):
    shards = jaxzero.shard_params({"w": np.ones((8, 3), np.float32)}, mesh, "data")
    with refused(
        ValueError,
        leaf="shards leaf ['w']",
        found="has global shape (8, 3)",
        expected="expected (24,), a parameter of shape (7, 3) over N=4 ranks",
        way_out="the true shapes as like and the same cuts; or the layout of both",
    ):
        jaxzero.unshard_params(shards, {"w": shape(7, 3)})


def test_unshard_params_of_copies_on_the_host(mesh):
    shards = jaxzero.shard_params({"w": np.ones(5, np.float32)}, mesh, "data")
    with refused(
        ValueError,
        leaf="shards leaf ['w']",
        found="has global shape (8,)",
        expected="expected (5,), a parameter of shape (5,) over N=1 ranks",
        way_out="Give the arrays of shard_params (not copies on the host)",
    ):
        jaxzero.unshard_params(jax.device_get(shards), {"w": shape(5)})


# make_plan.


@pytest.mark.parametrize(
    ("group_size", "error", "expected"),
    [
        (0, ValueError, "expected at least 1 rank"),
        (-2, ValueError, "expected at least 1 rank"),
        (2.0, TypeError, "expected a whole number of ranks"),
        (True, TypeError, "expected a whole number of ranks"),
    ],
)
def test_group_size_that_is_no_number_of_ranks(group_size, error, expected):
    with refused(
        error, found=f"group_size={group_size}", expected=expected, way_out="rank"
    ):
        jaxzero.make_plan(GRADS, group_size)


# The transport.


def test_transport_that_cannot_run_here(mesh):
    if jax.default_backend() == "gpu":
        pytest.skip("it can")
    from jaxzero._ffi import cuda_obstacle

    if cuda_obstacle() is None:
        pytest.skip("this installation has the CUDA transport")
    with refused(
        NotImplementedError,
        found="Policy transport='nccl' cannot run here",
        expected=str(cuda_obstacle()),
        way_out="Use transport='xla' or 'auto'",
    ):
        trace_shard_grads(mesh, GRADS, policy=Policy(transport="nccl"))
