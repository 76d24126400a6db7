"""Checkpoints in true shapes: out of one mesh, into another."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training
from conftest import MakeMesh
from jax.sharding import PartitionSpec as P

from jaxzero import LossScale, Policy, zero3

CUTS = {"in": 1, "blocks": None, "out": "whole", "bias": None}
BEFORE, AFTER = 3, 3
KEY = 5
SCALE = LossScale(initial=8.0, growth_interval=2)
OPTIMIZERS: dict[str, Any] = {
    "adam": optax.adam(1e-2),
    "multi": optax.MultiSteps(
        optax.adam(1e-2, mu_dtype=jnp.bfloat16), 2
    ).gradient_transformation(),
}

Tree = Any


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def mixed_dtypes(params: Tree) -> Tree:
    """Returns the model with some parameters in bfloat16."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["blocks"])
    return params | {"blocks": half}


def init(key: jax.Array) -> Tree:
    return mixed_dtypes(training.init_stacked(key))


def loss(params: Tree, batch: Tree) -> jax.Array:
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params["blocks"])
    return training.loss_stacked(params | {"blocks": wide}, batch)


def make(mesh: Any, optimizer: str = "adam", **options: Any) -> Any:
    """Returns a run with every kind of cut, stacked layers and a loss scale."""
    return zero3(
        training.loss_stacked,
        OPTIMIZERS[optimizer],
        mesh,
        **{"cuts": CUTS, "stacked": "blocks", "loss_scale": SCALE} | options,
    )


def copies(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)


def flat(tree: Tree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(keys): leaf
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_equal(one: Tree, other: Tree) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(flat(one).items(), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.fixture(scope="module")
def expected() -> Callable[[str], list[float]]:
    """Returns the losses of the unsharded run, computed once per optimizer."""
    known: dict[str, list[float]] = {}

    def get(optimizer: str = "adam") -> list[float]:
        if optimizer not in known:
            curve, _ = training.unsharded(
                training.loss_stacked,
                OPTIMIZERS[optimizer],
                training.init_stacked(jax.random.key(KEY)),
                training.batches(BEFORE + AFTER),
            )
            known[optimizer] = [loss for loss, _ in curve]
        return known[optimizer]

    return get


@pytest.fixture(scope="module")
def saved(make_mesh: MakeMesh) -> Callable[[str], Any]:
    """Returns the state after some steps on 8 devices, once per optimizer."""
    known: dict[str, Any] = {}

    def get(optimizer: str = "adam") -> Any:
        if optimizer not in known:
            zero = make(make_mesh(8, kind="explicit"), optimizer)
            state = zero.init(training.init_stacked, jax.random.key(KEY))
            _, state = training.sharded(zero, state, training.batches(BEFORE))
            known[optimizer] = zero.export_state(state)
        return known[optimizer]

    return get


MESHES: dict[str, Any] = {
    "8": ((8,), "data", "auto", {}),
    "6": ((6,), "data", "explicit", {}),
    "3": ((3,), "data", "auto", {}),
    "1": ((1,), "data", "explicit", {}),
    "2x3": ((2, 3), ("replica", "data"), "explicit", {"replicate_axis": "replica"}),
    "2x2": ((2, 2), ("a", "b"), "auto", {"axis_name": ("b", "a")}),
}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=pytest.mark.slow if mesh in ("8", "6", "2x2") else ())
        for mesh in MESHES
    ],
)
def test_training_continues_on_another_mesh(
    make_mesh: MakeMesh, saved: Any, expected: Any, mesh: str
) -> None:
    shape, names, kind, options = MESHES[mesh]
    zero = make(make_mesh(shape, names, kind), **options)
    state = zero.import_state(saved())
    assert int(state.step) == BEFORE
    rest = training.batches(BEFORE + AFTER)[BEFORE:]
    curve, state = training.sharded(zero, state, rest)
    np.testing.assert_allclose(
        [loss for loss, _ in curve], expected()[BEFORE:], rtol=2e-4
    )
    assert float(state.loss_scale.scale) == 8.0 * 2 ** ((BEFORE + AFTER) // 2)
    assert int(state.opt_state[0].count) == BEFORE + AFTER


@pytest.mark.parametrize("ranks", [6, 3, 1])
def test_ten_elements_on_other_numbers_of_ranks(
    make_mesh: MakeMesh, ranks: int
) -> None:
    """Shards are padded for 8 and 3 ranks; padding does not shift what is loaded."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return jnp.mean(jnp.square(batch["x"] @ params - batch["y"]))

    random = np.random.default_rng(0)
    x = random.normal(size=(24, 10)).astype(np.float32)
    data = [{"x": x + i, "y": x.sum(1)} for i in range(6)]
    params = random.normal(size=10).astype(np.float32)
    adam = optax.adam(0.1)
    want, want_params = training.unsharded(loss, adam, jnp.asarray(params), data)

    first = zero3(loss, adam, make_mesh(8))
    _, state = training.sharded(first, first.init(params), data[:3])
    exported = first.export_state(state)
    assert exported["params"].shape == (10,)
    second = zero3(loss, adam, make_mesh(ranks))
    curve, state = training.sharded(second, second.import_state(exported), data[3:])
    np.testing.assert_allclose(curve, want[3:], rtol=1e-4)
    np.testing.assert_allclose(
        second.export_state(state)["params"], want_params, rtol=1e-4, atol=1e-5
    )


def test_numpy_arrays_go_in(make_mesh: MakeMesh, saved: Any, expected: Any) -> None:
    host = copies(saved("multi"))
    kept = copies(host)
    zero = make(make_mesh(3), "multi")
    state = zero.import_state(host)
    assert state.opt_state.inner_opt_state[0].mu["in"].dtype == jnp.bfloat16
    rest = training.batches(BEFORE + AFTER)[BEFORE:]
    curve, _ = training.sharded(zero, state, rest)
    # Moments in bfloat16 round what summation order changes.
    np.testing.assert_allclose(
        [loss for loss, _ in curve], expected("multi")[BEFORE:], rtol=1e-2
    )
    assert_equal(host, kept)


def test_what_goes_in_comes_out(make_mesh: MakeMesh, saved: Any) -> None:
    for ranks in (8, 3):
        zero = make(make_mesh(ranks))
        assert_equal(zero.export_state(zero.import_state(saved())), copies(saved()))


def test_shards_wider_than_parameters(make_mesh: MakeMesh) -> None:
    policy = Policy(shard_dtype="float32")
    data = training.batches(4)

    def make(ranks: int) -> Any:
        return zero3(
            loss,
            optax.adam(1e-2),
            make_mesh(ranks),
            policy=policy,
            cuts=CUTS,
            stacked="blocks",
        )

    eight, three = make(8), make(3)
    state = eight.init(init, jax.random.key(KEY))
    _, state = training.sharded(eight, state, data[:2])
    exported = eight.export_state(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(exported["params"])} == {
        jnp.dtype("float32")
    }
    like = jax.eval_shape(init, jax.random.key(KEY))
    moved = three.import_state(exported, like=like)
    found, _ = training.sharded(three, moved, data[2:])
    want, state = training.sharded(eight, state, data[2:])
    # Gradients of other parts of a batch are rounded to bfloat16.
    np.testing.assert_allclose(found, want, rtol=2e-2)
    assert three.abstract_state(init, jax.random.key(0)).layout == moved.layout


def test_small_leaves_that_stay_whole(make_mesh: MakeMesh, saved: Any) -> None:
    zero = make(make_mesh(4), policy=Policy(min_shard_numel=20), cuts=None)
    state = zero.import_state(saved())
    assert_equal(zero.export_state(state), copies(saved()))
    assert state.params["out"].sharding.spec == P()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_memory_is_not_shared(make_mesh: MakeMesh, saved: Any, kind: str) -> None:
    """Steps donate their state, which must leave what was exported alone."""
    zero = make(make_mesh(8, kind=kind))
    state = zero.import_state(saved())
    exported = zero.export_state(state)
    again = zero.import_state(exported)
    batch = training.batches(1)[0]
    for one in (state, again):
        jax.block_until_ready(zero.step(one, batch))
    assert_equal(copies(exported), copies(saved()))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_template_is_that_of_the_export(make_mesh: MakeMesh, kind: str) -> None:
    zero = make(make_mesh(3, kind=kind), "multi")
    state = zero.init(training.init_stacked, jax.random.key(KEY))
    exported = zero.export_state(state)
    template = zero.export_template(training.init_stacked, jax.random.key(KEY))
    assert jax.tree.structure(exported) == jax.tree.structure(template)
    for (path, leaf), like in zip(
        flat(exported).items(), jax.tree.leaves(template), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype), path
        assert leaf.sharding == like.sharding, path


def test_only_moments_are_spread(make_mesh: MakeMesh, saved: Any) -> None:
    zero = make(make_mesh(3))
    state = zero.import_state(saved())
    adam = state.opt_state[0]
    assert adam.count.sharding.spec == P()
    assert adam.mu["in"].sharding == state.params["in"].sharding
    assert adam.mu["in"].sharding.spec == P(None, "data")
    assert adam.nu["blocks"]["w"].sharding.spec == P(None, "data")
    # In true shape along the first dimension that divides, else whole.
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, zero.export_state(state))
    assert specs["opt_state"][0].mu["in"] == P(None, "data")
    assert specs["params"]["blocks"]["w"] == P("data")
    assert specs["params"]["bias"] == specs["opt_state"][0].count == P()


def test_names_count_where_containers_were_lost(
    make_mesh: MakeMesh, saved: Any
) -> None:
    """As a checkpoint library leaves them: dicts, sorted, in place of named tuples."""

    def plain(node: Any) -> Any:
        if hasattr(node, "_asdict"):
            node = node._asdict()
        if isinstance(node, dict):
            return {key: plain(node[key]) for key in sorted(node)}
        return [plain(child) for child in node] if type(node) is tuple else node

    zero = make(make_mesh(3), "multi")
    host = copies(saved("multi"))
    lost = plain(host)
    assert list(lost["opt_state"]) == sorted(lost["opt_state"])
    assert list(lost["opt_state"]) != list(host["opt_state"]._fields)
    assert_equal(zero.export_state(zero.import_state(lost)), host)


def test_a_state_without_a_loss_scale_starts_one(
    make_mesh: MakeMesh, saved: Any
) -> None:
    without = {part: saved()[part] for part in ("step", "params", "opt_state")}
    state = make(make_mesh(2)).import_state(without)
    assert float(state.loss_scale.scale) == SCALE.initial
    state = make(make_mesh(2), loss_scale=None).import_state(saved())
    assert state.loss_scale is None


@pytest.mark.parametrize("part", ["kept", "left out"])
def test_another_optimizer_starts_anew(
    make_mesh: MakeMesh, saved: Any, part: str
) -> None:
    exported = saved() if part == "kept" else without(saved(), "opt_state")
    data = training.batches(BEFORE + AFTER)[BEFORE:]
    lion = optax.lion(optax.linear_schedule(1e-2, 0.0, 2 * AFTER))
    want, want_params = training.unsharded(
        training.loss_stacked, lion, copies(exported["params"]), data
    )
    zero = zero3(training.loss_stacked, lion, make_mesh(3), stacked="blocks")
    state = zero.import_state(exported, reset_optimizer=True)
    assert int(state.step) == BEFORE
    curve, state = training.sharded(zero, state, data)
    np.testing.assert_allclose(curve, want, rtol=2e-4)
    for one, other in zip(
        jax.tree.leaves(zero.export_state(state)["params"]),
        jax.tree.leaves(want_params),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    assert int(state.step) == BEFORE + AFTER


def test_an_optimizer_that_starts_anew_keeps_the_loss_scale(
    make_mesh: MakeMesh, saved: Any
) -> None:
    kept = make(make_mesh(2)).import_state(saved(), reset_optimizer=True)
    assert float(kept.loss_scale.scale) == float(saved()["loss_scale"].scale) != 8.0
    assert not np.any(kept.opt_state[0].mu["in"])


def narrower(exported: Tree) -> Tree:
    return exported | {"params": exported["params"] | {"in": np.ones((5, 4))}}


def of_a_model_with(exported: Tree, name: str) -> Tree:
    adam, *rest = exported["opt_state"]
    moments = {n: getattr(adam, n) | {name: np.ones(3)} for n in ("mu", "nu")}
    return exported | {"opt_state": (adam._replace(**moments), *rest)}


def without(tree: Tree, name: str) -> Tree:
    return {key: value for key, value in tree.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "like", "words"),
    [
        (lambda e: without(e, "params"), False, ("'params'", "export_state")),
        (lambda e: without(e, "opt_state"), False, ("opt_state[0].count", "no leaf")),
        (lambda e: without(e, "step"), False, ("leaf step", "no leaf")),
        (lambda e: e["params"], False, ("'params'", "'bias'")),
        (jax.tree.leaves, False, ("'params'", "list")),
        (narrower, True, ("params['in']", "(5, 4)", "(5, 6)")),
        (narrower, False, ("opt_state[0].mu['in']", "(5, 6)", "(5, 4)")),
        (
            lambda e: of_a_model_with(e, "head"),
            False,
            ("opt_state[0].mu['head']", "expected none", "reset_optimizer=True"),
        ),
        (
            lambda e: e | {"params": without(e["params"], "out")},
            True,
            ("params['out']", "(6,)"),
        ),
        (
            lambda e: e | {"params": e["params"] | {"in": np.ones((5, 6)) * 2j}},
            True,
            ("params['in']", "complex", "float32"),
        ),
        (lambda e: e | {"step": np.float32(1.5)}, False, ("step", "float32", "int32")),
        (
            lambda e: e | {"opt_state": optax.sgd(0.1, 0.9).init(e["params"])},
            False,
            ("opt_state[0].count", "reset_optimizer=True"),
        ),
        (
            lambda e: e | {"opt_state": optax.lion(0.1).init(e["params"])},
            False,
            ("opt_state[0].nu['bias']", "reset_optimizer=True"),
        ),
    ],
)
def test_states_that_do_not_fit_are_refused(
    make_mesh: MakeMesh, saved: Any, spoil: Any, like: bool, words: tuple[str, ...]
) -> None:
    zero = make(make_mesh(2), cuts=None)
    shapes = jax.eval_shape(training.init_stacked, jax.random.key(0))
    with pytest.raises(ValueError) as error:
        zero.import_state(spoil(saved()), like=shapes if like else None)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the programs that XLA has compiled; grows."""
    names: list[str] = []

    def listen(event: str, duration: float, **of: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(of["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_second_time_nothing_compiles(
    make_mesh: MakeMesh, compiled: list[str], kind: str
) -> None:
    # No other test has this width.
    mesh, width = make_mesh(3, kind=kind), {"auto": 31, "explicit": 37}[kind]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return jnp.mean(batch @ params["w"])

    zero = zero3(loss, optax.adam(0.1), mesh, loss_scale=SCALE)
    found = []
    for scale in (1.0, 2.0):
        state = zero.init({"w": jnp.full(width, scale)})
        exported = zero.export_state(state)
        again = zero.import_state(exported)
        host = zero.import_state(jax.device_get(exported))
        for one in (state, exported, again, host):
            shown = one["params"] if isinstance(one, dict) else one.params
            np.testing.assert_array_equal(np.asarray(shown["w"])[:width], scale)
        found.append(list(compiled))
        compiled.clear()
    first, second = found
    assert len(first) >= 3
    assert not second
