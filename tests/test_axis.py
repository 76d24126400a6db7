"""Ranks, groups and varying types, as the surrounding shard_map gives them."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._axis import (
    axis_names,
    bind_axis,
    check_not_auto_sharded,
    mask_to_first,
    varying,
)

KINDS = pytest.mark.parametrize("kind", ["auto", "explicit"])
CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])


def inside(mesh: Any, function: Any, *, check_vma: bool = True) -> Any:
    """Runs a function of no argument under shard_map; returns what it returned."""
    seen = []

    def one() -> tuple[()]:
        seen.append(function())
        return ()

    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=(), out_specs=(), check_vma=check_vma
    )
    jax.eval_shape(jax.jit(mapped))
    return seen[-1]


# Binding.


@KINDS
@CHECKS
@pytest.mark.parametrize("ranks", [1, 3, 8], ids=lambda n: f"n{n}")
def test_axis_knows_its_size_and_whether_values_are_typed(
    make_mesh, ranks, kind, check_vma
):
    axis = inside(
        make_mesh(ranks, kind=kind),
        lambda: bind_axis("data", None, "shard_grads"),
        check_vma=check_vma,
    )
    assert (axis.names, axis.replicate) == (("data",), ())
    assert (axis.group_size, axis.replicas) == (ranks, 1)
    assert axis.typed == check_vma


@pytest.mark.parametrize(
    ("names", "replicate", "group_size", "replicas"),
    [
        ("x", None, 2, 1),
        (("y", "x"), None, 6, 1),
        (("x", "y", "z"), None, 6, 1),
        ("y", "x", 3, 2),
        ("x", ("y", "z"), 2, 3),
        ("z", None, 1, 1),
    ],
)
def test_sizes_are_products_over_named_axes(
    make_mesh, names, replicate, group_size, replicas
):
    axis = inside(
        make_mesh((2, 3, 1), ("x", "y", "z")),
        lambda: bind_axis(names, replicate, "shard_grads"),
    )
    assert (axis.group_size, axis.replicas) == (group_size, replicas)
    assert axis.all_names == axis.names + axis.replicate


@KINDS
def test_axis_is_bound_in_a_partly_manual_shard_map(make_mesh, kind):
    def one() -> tuple[()]:
        assert bind_axis("data", None, "shard_grads").group_size == 4
        with pytest.raises(ValueError, match=r"'model' is not bound .*'data'\)"):
            bind_axis("model", None, "shard_grads")
        return ()

    mapped = jax.shard_map(
        one,
        mesh=make_mesh((4, 2), ("data", "model"), kind=kind),
        in_specs=(),
        out_specs=(),
        axis_names={"data"},
    )
    jax.eval_shape(jax.jit(mapped))


def test_axis_is_not_bound_outside():
    with pytest.raises(
        ValueError, match=r"'data' is not bound .* \(bound here: none\)"
    ):
        bind_axis("data", None, "shard_grads")


def test_mesh_of_the_context_binds_nothing(mesh8):
    with (
        jax.set_mesh(mesh8),
        pytest.raises(ValueError, match=r"is not bound by a shard_map"),
    ):
        bind_axis("data", None, "shard_grads")


@pytest.mark.parametrize(
    ("names", "replicate", "expected"),
    [
        ("x", None, (("x",), ())),
        (("x",), None, (("x",), ())),
        (("y", "x"), "z", (("y", "x"), ("z",))),
    ],
)
def test_names_become_tuples(names, replicate, expected):
    assert axis_names(names, replicate, "shard_grads") == expected


@pytest.mark.parametrize(
    ("names", "replicate", "error", "message"),
    [
        (("x", "x"), None, ValueError, "'x' is named twice in axis_name=('x', 'x');"),
        ("x", "x", ValueError, "axis_name='x' and replicate_axis='x'; name each"),
        (("x", "y"), ("z", "y"), ValueError, "axis 'y' is named twice"),
        ((), None, TypeError, "axis_name=(); expected the name of a mesh axis"),
        (["x"], None, TypeError, "axis_name=['x']; expected the name"),
        ("x", (), TypeError, "replicate_axis=(); expected the name"),
        (None, None, TypeError, "axis_name=None; expected the name"),
    ],
)
def test_names_that_are_refused(names, replicate, error, message):
    with pytest.raises(error) as caught:
        axis_names(names, replicate, "shard_grads")
    assert str(caught.value).startswith("shard_grads: ")
    assert message in str(caught.value)


# Ranks and groups.


def ranks_of(mesh: Any, names: Any) -> np.ndarray:
    """Returns the rank along `names` of each device, in mesh order."""
    mapped = jax.shard_map(
        lambda: bind_axis(names, None, "shard_grads").rank()[None],
        mesh=mesh,
        in_specs=(),
        out_specs=P(mesh.axis_names),
    )
    return np.asarray(jax.jit(mapped)()).reshape(mesh.devices.shape)


@pytest.mark.parametrize("names", list(itertools.permutations(("x", "y"))))
def test_rank_counts_the_last_named_axis_fastest(make_mesh, names):
    mesh = make_mesh((2, 3), ("x", "y"))
    expected = np.arange(6).reshape([mesh.shape[name] for name in names])
    if names == ("y", "x"):
        expected = expected.T
    np.testing.assert_array_equal(ranks_of(mesh, names), expected)


NAMES = [("x",), ("y",), ("z",), ("y", "x"), ("x", "z"), ("z", "y", "x")]


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_replica_groups_list_devices_by_rank(make_mesh, names):
    """Every device is in one group, at the position of its rank."""
    mesh = make_mesh((2, 2, 2), ("x", "y", "z"))
    groups = inside(
        mesh, lambda: bind_axis(names, None, "shard_grads").replica_groups(names)
    )
    assert groups.dtype == np.int64
    assert sorted(groups.reshape(-1)) == list(range(8))
    rank = ranks_of(mesh, names).reshape(-1)
    place = np.stack(np.unravel_index(np.arange(8), mesh.devices.shape), axis=1)
    others = [i for i, name in enumerate(mesh.axis_names) if name not in names]
    for group in groups:
        np.testing.assert_array_equal(rank[group], np.arange(2 ** len(names)))
        assert len({tuple(place[device, others]) for device in group}) == 1


# Varying types.


@KINDS
def test_unvarying_axes_are_read_off_the_type(make_mesh, kind):
    mesh = make_mesh((2, 4), ("x", "y"), kind=kind)

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        axis = bind_axis("y", "x", "shard_grads")
        assert varying(a) == {"x"} and varying(b) == {"x", "y"}
        assert axis.unvarying_axes(a) == ("y",)
        assert axis.unvarying_axes(b) == ()
        assert axis.unvarying_axes(np.ones(1, np.float32)) == ("y", "x")
        return b

    specs = (P("x"), P(("x", "y")))
    mapped = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=specs[1])
    arguments = [
        jax.device_put(np.ones(n, np.float32), NamedSharding(mesh, spec))
        for n, spec in zip((2, 8), specs, strict=True)
    ]
    jax.eval_shape(jax.jit(mapped), *arguments)


def test_nothing_is_known_equal_without_types(make_mesh):
    def known() -> tuple[str, ...]:
        axis = bind_axis("data", None, "shard_grads")
        return axis.unvarying_axes(jnp.ones(1, jnp.float32))

    assert inside(make_mesh(4), known, check_vma=False) == ()
    assert inside(make_mesh(4), known) == ("data",)


@CHECKS
def test_lift_adds_what_is_missing(make_mesh, check_vma):
    def lifted() -> tuple[frozenset[str], ...]:
        axis = bind_axis("y", None, "shard_grads")
        once = axis.lift(jnp.ones(1, jnp.float32), ("y",))
        return varying(once), varying(axis.lift(once, ("x", "y")))

    found = inside(make_mesh((2, 2), ("x", "y")), lifted, check_vma=check_vma)
    expected = ({"y"}, {"x", "y"}) if check_vma else (set(), set())
    assert found == expected


@KINDS
@CHECKS
def test_result_type_varies_as_asked(make_mesh, kind, check_vma):
    """A call's result without it would pass for equal on all ranks."""

    def result() -> Any:
        axis = bind_axis("data", None, "shard_grads")
        return axis.result((3, 2), "bfloat16", ("data",))

    found = inside(make_mesh(4, kind=kind), result, check_vma=check_vma)
    assert (found.shape, found.dtype) == ((3, 2), jnp.bfloat16)
    assert (found.manual_axis_type is not None) == check_vma
    if check_vma:
        assert found.manual_axis_type.varying == {"data"}


def test_shard_varies_over_shard_axes_unless_whole(make_mesh):
    axis = inside(
        make_mesh((2, 2, 2), ("x", "y", "z")),
        lambda: bind_axis("x", "y", "shard_grads"),
    )
    assert axis.shard_axes(False, ()) == {"x"}
    assert axis.shard_axes(True, ()) == frozenset()
    assert axis.shard_axes(False, ("z",)) == {"x", "z"}
    assert axis.shard_axes(True, ("z",)) == {"z"}


@CHECKS
@pytest.mark.parametrize("names", [("y",), ("x",), ("x", "y")], ids="-".join)
def test_masked_value_is_on_the_first_rank_only(make_mesh, names, check_vma):
    """So the sum over the axes along which it was equal is itself."""
    mesh = make_mesh((2, 3), ("x", "y"))

    def one() -> jax.Array:
        axis = bind_axis(("x", "y"), None, "shard_grads")
        return mask_to_first(axis, jnp.full(1, 5.0, jnp.float32), names)

    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=(), out_specs=P(("x", "y")), check_vma=check_vma
    )
    values = np.asarray(jax.jit(mapped)()).reshape(2, 3)
    expected = np.full((2, 3), 5.0)
    if "x" in names:
        expected[1:] = 0
    if "y" in names:
        expected[:, 1:] = 0
    np.testing.assert_array_equal(values, expected)


def test_masked_value_keeps_nan_and_infinity_to_the_first_rank(make_mesh):
    """A product with zero would spread NaN to every rank."""
    mapped = jax.shard_map(
        lambda: mask_to_first(
            bind_axis("data", None, "shard_grads"), jnp.full(1, jnp.inf), ("data",)
        ),
        mesh=make_mesh(3),
        in_specs=(),
        out_specs=P("data"),
    )
    np.testing.assert_array_equal(jax.jit(mapped)(), [np.inf, 0, 0])


# Axes of the compiler: the refusals are in test_errors.py.


def test_explicit_axis_that_the_leaf_does_not_use_is_no_obstacle(make_mesh):
    mesh = make_mesh((4, 2), ("data", "model"), kind="explicit")

    def one(x: jax.Array) -> jax.Array:
        check_not_auto_sharded("leaf ['w']", x, "shard_grads")
        return x

    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    x = jax.device_put(np.ones((4, 2), np.float32), NamedSharding(mesh, P("data")))
    jax.eval_shape(jax.jit(mapped), x)


def test_axis_of_the_compiler_of_size_1_is_no_obstacle(make_mesh):
    mesh = make_mesh((4, 1), ("data", "model"))

    def one(x: jax.Array) -> jax.Array:
        check_not_auto_sharded("leaf ['w']", x, "shard_grads")
        return x

    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    jax.eval_shape(jax.jit(mapped), np.ones((4, 2), np.float32))
