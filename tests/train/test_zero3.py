"""zero3 against the same steps on one device."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training
from conftest import MakeMesh

import jaxzero
from jaxzero import LossScale, Policy, zero3
from jaxzero._train.programs import birth

STEPS = 50
KEY = 7

MODELS: dict[str, Any] = {
    "plain": (training.init, training.loss, {}),
    "layers": (training.init, training.loss, {"layers": "blocks/*"}),
    "stacked": (training.init_stacked, training.loss_stacked, {"stacked": "blocks"}),
}
MESHES: dict[str, Any] = {
    "1": ((1,), "data", {}),
    "3": ((3,), "data", {}),
    "4": ((4,), "data", {}),
    "8": ((8,), "data", {}),
    "2x4": ((2, 4), ("replica", "data"), {"replicate_axis": "replica"}),
    "2x1": ((2, 1), ("replica", "data"), {"replicate_axis": "replica"}),
    "tuple": ((2, 2), ("a", "b"), {"axis_name": ("b", "a")}),
}


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def expected() -> Callable[[float | None], Any]:
    """Returns the unsharded curve and parameters, computed once per clip norm."""
    known: dict[float | None, Any] = {}

    def get(clip_norm: float | None = None) -> Any:
        if clip_norm not in known:
            known[clip_norm] = training.unsharded(
                training.loss,
                optax.adamw(1e-2),
                training.init(jax.random.key(KEY)),
                training.batches(STEPS),
                clip_norm,
            )
        return known[clip_norm]

    return get


def run(
    make_mesh: MakeMesh,
    mesh: str,
    model: str = "plain",
    *,
    kind: str = "explicit",
    steps: int = STEPS,
    **options: Any,
) -> tuple[training.Curve, Any, Any]:
    shape, names, axes = MESHES[mesh]
    init, loss, layering = MODELS[model]
    zero = zero3(
        loss,
        optax.adamw(1e-2),
        make_mesh(shape, names, kind),
        **{"axis_name": "data"} | axes | layering | options,
    )
    state = zero.init(init, jax.random.key(KEY))
    curve, state = training.sharded(zero, state, training.batches(steps))
    return curve, state, zero


def unstacked(params: Any) -> Any:
    """Returns stacked layers as a list."""
    blocks = params["blocks"]
    if isinstance(blocks, dict):
        count = len(blocks["b"])
        blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(count)]
    return params | {"blocks": blocks}


def assert_same(found: Any, want: Any, rtol: float) -> None:
    curve, state, zero = found
    want_curve, want_params = want
    np.testing.assert_allclose(curve, want_curve[: len(curve)], rtol=rtol)
    if len(curve) == len(want_curve):
        params = jax.device_get(zero.export_state(state)["params"])
        for one, other in zip(
            jax.tree.leaves(unstacked(params)),
            jax.tree.leaves(want_params),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        ("1", "plain"),
        ("3", "stacked"),
        ("4", "layers"),
        ("8", "plain"),
        ("8", "stacked"),
        ("2x4", "plain"),
        ("2x4", "layers"),
    ],
)
def test_training_equals_the_unsharded_run(
    make_mesh: MakeMesh, expected: Any, mesh: str, model: str
) -> None:
    assert_same(run(make_mesh, mesh, model), expected(), 2e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mesh", "model", "sync"),
    [
        ("4", "plain", "each"),
        ("4", "plain", "last"),
        ("4", "layers", "each"),
        ("2x4", "stacked", "each"),
        ("2x4", "plain", "last"),
        ("2x4", "layers", "replicas_last"),
        ("2x4", "plain", "replicas_last"),
        ("2x1", "stacked", "replicas_last"),
        ("2x1", "plain", "each"),
    ],
)
def test_microbatches_equal_the_unsharded_run(
    make_mesh: MakeMesh, expected: Any, mesh: str, model: str, sync: Any
) -> None:
    found = run(make_mesh, mesh, model, accumulate=3, sync=sync, steps=8)
    assert_same(found, expected(), 2e-4)


@pytest.mark.parametrize(
    ("mesh", "model", "sync"),
    [
        ("tuple", "plain", "each"),
        ("tuple", "layers", "each"),
        ("2x4", "stacked", "replicas_last"),
    ],
)
def test_clipping_sees_the_norm_of_all_ranks(
    make_mesh: MakeMesh, expected: Any, mesh: str, model: str, sync: Any
) -> None:
    found = run(
        make_mesh, mesh, model, sync=sync, clip_norm=0.1, accumulate=2, steps=20
    )
    assert_same(found, expected(0.1), 2e-4)


def test_a_limit_far_below_the_norm_leaves_the_direction(make_mesh: MakeMesh) -> None:
    """Their quotient alone is no float32."""
    zero = zero3(overflowing, optax.sgd(1e20), make_mesh(4), clip_norm=1e-20)
    state = zero.init({"w": np.zeros(4, np.float32), "s": np.float32(0)})
    state, _ = zero.step(state, {"g": np.full((4, 4), 1e28, np.float32)})
    np.testing.assert_allclose(state.params["w"], np.full(4, -0.5), rtol=1e-5)


CUTS = {"in": 1, "blocks": None, "out": "whole", "bias": "whole"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "kind", "options"),
    [
        ("layers", "auto", {"cuts": "flat"}),
        ("plain", "explicit", {"cuts": CUTS}),
        ("stacked", "auto", {"cuts": CUTS}),
        ("plain", "auto", {"min_shard_numel": 10}),
        ("layers", "explicit", {"min_shard_numel": 10}),
        ("stacked", "explicit", {"min_shard_numel": 10}),
        ("plain", "auto", {"policy": Policy(bucket_bytes=64)}),
        ("layers", "auto", {"policy": Policy(reduction="float32", direct_bytes=0)}),
        ("plain", "explicit", {"policy": Policy(shard_dtype="float32")}),
    ],
)
def test_layouts_do_not_change_the_result(
    make_mesh: MakeMesh, expected: Any, model: str, options: Any, kind: str
) -> None:
    found = run(make_mesh, "3", model, kind=kind, steps=6, **options)
    assert_same(found, expected(), 2e-4)


@pytest.mark.parametrize(
    ("model", "policy", "rtol"),
    [
        # Gradients rounded to 8 (11) bits move parameters a little in every step.
        ("plain", Policy(comm_dtype="bfloat16"), 3e-2),
        ("layers", Policy(comm_dtype="bfloat16"), 3e-2),
        ("stacked", Policy(comm_dtype="float16"), 5e-3),
    ],
)
def test_a_16_bit_wire_costs_its_rounding(
    make_mesh: MakeMesh, expected: Any, model: str, policy: Policy, rtol: float
) -> None:
    found = run(make_mesh, "4", model, policy=policy, accumulate=2, steps=20)
    assert_same(found, expected(), rtol)


@pytest.mark.parametrize("model", ["plain", "layers"])
def test_float16_with_a_loss_scale(
    make_mesh: MakeMesh, expected: Any, model: str
) -> None:
    policy = Policy(compute_dtype="float16", shard_dtype="float32")
    found = run(
        make_mesh, "4", model, policy=policy, loss_scale=LossScale(initial=2.0**10)
    )
    assert_same((found[0][:20], *found[1:]), expected(), 3e-2)
    assert int(found[1].step) == STEPS


def overflowing(params: Any, batch: Any) -> jax.Array:
    """A loss whose gradient is `batch["g"]`, over a model of two leaves."""
    return jnp.mean(batch["g"] @ params["w"]) + params["s"] * 0


def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(
    make_mesh: MakeMesh,
) -> None:
    scaling = LossScale(initial=8.0, growth_interval=2)
    zero = zero3(overflowing, optax.adam(0.1), make_mesh(4), loss_scale=scaling)
    state = zero.init({"w": np.ones(6, np.float32), "s": np.float32(0)})
    good = {"g": np.ones((8, 6), np.float32)}
    bad = {"g": np.ones((8, 6), np.float32)}
    bad["g"][5, 2] = np.inf
    state, metrics = zero.step(state, good)
    assert not bool(metrics.skipped)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = zero.step(state, bad)
    after = jax.device_get((state.params, state.opt_state))
    assert bool(metrics.skipped)
    assert float(metrics.loss_scale) == 8.0
    assert float(state.loss_scale.scale) == 4.0
    assert int(state.step) == 1
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    for _ in range(2):
        state, metrics = zero.step(state, good)
    assert float(state.loss_scale.scale) == 8.0
    assert int(state.step) == 3
    np.testing.assert_allclose(float(metrics.grad_norm), math.sqrt(6), rtol=1e-6)


@pytest.mark.parametrize("skip", [False, True])
def test_without_a_loss_scale_skipping_is_an_option(
    make_mesh: MakeMesh, skip: bool
) -> None:
    zero = zero3(overflowing, optax.sgd(0.1), make_mesh(2), skip_nonfinite=skip)
    state = zero.init({"w": np.ones(6, np.float32), "s": np.float32(0)})
    bad = {"g": np.full((4, 6), np.nan, np.float32)}
    state, metrics = zero.step(state, bad)
    assert bool(metrics.skipped) == skip
    assert np.isfinite(np.asarray(state.params["w"])[:6]).all() == skip


def test_auxiliary_results_are_means(make_mesh: MakeMesh) -> None:
    def loss(params: Any, batch: Any) -> Any:
        value = jnp.mean(batch["x"]) * params["w"][0]
        return value, {"mean": jnp.mean(batch["x"]), "count": jnp.int32(3)}

    mesh = make_mesh((2, 2), ("replica", "data"))
    zero = zero3(
        loss,
        optax.sgd(0.1),
        mesh,
        replicate_axis="replica",
        accumulate=2,
        has_aux=True,
    )
    state = zero.init({"w": np.ones(3, np.float32)})
    x = np.arange(16, dtype=np.float32)
    state, metrics = zero.step(state, {"x": x})
    assert float(metrics.aux["mean"]) == x.mean()
    assert float(metrics.aux["count"]) == 3.0
    assert float(metrics.loss) == x.mean()


@pytest.mark.parametrize(
    ("policy", "divisor"),
    [(Policy(op="sum"), 1.0), (Policy(divide_by=5.0), 5.0), (Policy(), 8.0)],
)
@pytest.mark.parametrize("layers", [(), "w"])
def test_the_policy_scales_loss_and_gradient_alike(
    make_mesh: MakeMesh, policy: Policy, divisor: float, layers: Any
) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        w = jaxzero.gathered(lambda w: w)(params["w"])
        return jnp.mean(batch["x"]) * jnp.sum(w)

    zero = zero3(
        loss, optax.sgd(1.0), make_mesh(4), policy=policy, accumulate=2, layers=layers
    )
    state = zero.init({"w": np.zeros(3, np.float32)})
    x = np.arange(8, dtype=np.float32)
    state, metrics = zero.step(state, {"x": x})
    np.testing.assert_allclose(
        np.asarray(state.params["w"])[:3], -x.sum() / divisor, rtol=1e-6
    )
    np.testing.assert_allclose(
        float(metrics.grad_norm), x.sum() / divisor * math.sqrt(3), rtol=1e-6
    )


def test_a_random_key_goes_to_every_device(make_mesh: MakeMesh) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        noise = jax.random.normal(batch["key"], (3,))
        return jnp.mean(batch["x"]) * jnp.sum(params["w"] * noise)

    zero = zero3(loss, optax.sgd(1.0), make_mesh(4), accumulate=2)
    state = zero.init({"w": np.zeros(3, np.float32)})
    key = jax.random.key(3)
    state, _ = zero.step(state, {"x": np.ones(8, np.float32), "key": key})
    want = -np.asarray(jax.random.normal(key, (3,)))
    np.testing.assert_allclose(np.asarray(state.params["w"])[:3], want, rtol=1e-6)


def test_each_device_holds_its_part_of_the_state(make_mesh: MakeMesh) -> None:
    zero = zero3(training.loss, optax.adam(1e-2), make_mesh(8))
    like = jax.eval_shape(training.init, jax.random.key(0))
    full = 3 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    state = zero.init(training.init, jax.random.key(0))
    held = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves((state.params, state.opt_state))
    )
    padding = 3 * 4 * len(jax.tree.leaves(like))
    assert full / 8 <= held <= full / 8 + padding + 8


def deep(width: int, layers: int) -> tuple[Any, Any]:
    """Returns the initialiser and loss of a deep model without much beside layers."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, layers)
        return {"blocks": [{"w": jax.random.normal(k, (width, width))} for k in keys]}

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = batch["x"]
        for layer in params["blocks"]:
            hidden = jaxzero.gathered(lambda p, h: jnp.tanh(h @ p["w"]))(layer, hidden)
        return jnp.mean(hidden)

    return init, loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_layer_at_a_time_exists_in_full(
    make_mesh: MakeMesh, accumulate: int
) -> None:
    width, layers = 256, 32
    init, loss = deep(width, layers)
    one = 4 * width * width

    def temp(**options: Any) -> int:
        zero = zero3(
            loss, optax.sgd(0.1), make_mesh(8), accumulate=accumulate, **options
        )
        state = zero.abstract_state(init, jax.random.key(0))
        batch = {"x": jax.ShapeDtypeStruct((16, width), jnp.float32)}
        analysis = zero.lower(state, batch).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    shards = layers * one // 8
    # One layer, its gradient, what is sent and received of it; with accumulation also
    # the accumulators.
    limit = 4 * one + (accumulate > 1) * 2 * shards
    assert temp(layers="blocks/*") < limit
    # Sixteenths of the parameters, where nothing is named.
    assert temp() < layers * one / 2


def test_parameters_are_born_sharded(make_mesh: MakeMesh) -> None:
    width, layers = 256, 16
    init, loss = deep(width, layers)
    mesh = make_mesh(8)
    zero = zero3(loss, optax.sgd(0.1), mesh)
    layout = zero.abstract_state(init, jax.random.key(0)).layout
    lowered = birth(layout, mesh, init).lower(jax.random.key(0))
    analysis = lowered.compile().memory_analysis()
    one = 4 * width * width
    assert analysis.output_size_in_bytes < layers * one / 8 * 1.05
    # A leaf at a time: what is drawn, and the random bits that it is drawn from.
    assert analysis.temp_size_in_bytes < 3 * one


def test_concrete_parameters_start_the_same_state(make_mesh: MakeMesh) -> None:
    zero = zero3(training.loss, optax.adam(1e-2), make_mesh(3))
    key = jax.random.key(KEY)
    one = zero.init(training.init, key)
    other = zero.init(jax.device_get(training.init(key)))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        assert a.sharding == b.sharding


def test_arrays_stay_on_devices(make_mesh: MakeMesh) -> None:
    zero = zero3(training.loss, optax.adam(1e-2), make_mesh(3))
    born = zero.init(training.init, jax.random.key(KEY))
    params = zero.export_state(born)["params"]
    state = zero.init(params)
    # JAX keeps with an array on several devices what it has sent to the host.
    assert all(leaf._npy_value is None for leaf in jax.tree.leaves(params))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(born), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding
    jax.block_until_ready(zero.step(state, training.batches(1)[0]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_the_state_is_donated(make_mesh: MakeMesh) -> None:
    zero = zero3(training.loss, optax.adam(1e-2), make_mesh(4))
    state = zero.init(training.init, jax.random.key(0))
    compiled = zero.lower(state, training.batches(1)[0]).compile()
    held = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= held


def test_one_program_serves_all_steps(make_mesh: MakeMesh) -> None:
    zero = zero3(training.loss, optax.adam(1e-2), make_mesh(4))
    state = zero.init(training.init, jax.random.key(0))
    state, _ = zero.step(state, training.batches(1)[0])
    for batch in training.batches(3):
        state, metrics = zero.step(state, batch)
        jax.block_until_ready(metrics)
    assert zero._step._cache_size() == 1


def refuse(make_mesh: MakeMesh, **options: Any) -> str:
    """Returns the message with which zero3 or its init refuses options."""
    mesh = options.pop("mesh", None) or make_mesh(2)
    with pytest.raises((ValueError, TypeError)) as error:
        zero3(training.loss, options.pop("optimizer", optax.sgd(0.1)), mesh, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axis_name": "model"}, ("'model'", "'data'")),
        ({"replicate_axis": "data"}, ("'data'", "twice")),
        ({"accumulate": 0}, ("accumulate=0", "at least 1")),
        ({"accumulate": 1.5}, ("accumulate=1.5", "whole number")),
        ({"sync": "never"}, ("sync='never'", "'each'", "'last'")),
        ({"sync": "replicas_last"}, ("replicate_axis", "sync='each'")),
        ({"sync": "last", "layers": "blocks/*"}, ("sync='last'", "layers")),
        ({"clip_norm": 0.0}, ("clip_norm=0.0", "above 0")),
        ({"clip_norm": math.inf}, ("clip_norm=inf", "finite")),
        ({"clip_norm": "1.0"}, ("zero3: clip_norm='1.0'", "finite number above 0")),
        ({"clip_norm": True}, ("zero3: clip_norm=True", "finite number above 0")),
        ({"clip_norm": np.True_}, ("clip_norm=np.True_", "finite number above 0")),
        ({"accumulate": np.True_}, ("accumulate=np.True_", "whole number")),
    ],
)
def test_options_at_odds_are_refused(
    make_mesh: MakeMesh, options: Any, words: tuple[str, ...]
) -> None:
    message = refuse(make_mesh, **options)
    assert all(word in message for word in words), message


def test_mesh_axes_that_are_not_named_are_refused(make_mesh: MakeMesh) -> None:
    message = refuse(make_mesh, mesh=make_mesh((2, 2), ("data", "model")))
    assert "'model'" in message and "replicate_axis" in message


@pytest.mark.parametrize(
    ("params", "options", "words"),
    [
        ({"w": np.ones(3), "n": np.arange(3)}, {}, ("['n']", "int", "gradient")),
        ({"w": "weights"}, {}, ("['w']", "str")),
        ({"w": np.ones(3)}, {"layers": "blocks/*"}, ("'blocks/*'", "'w'")),
        ({"s": np.float32(1)}, {"stacked": "s"}, ("['s']", "scalar")),
        (
            {"b": {"u": np.ones((2, 3)), "v": np.ones((4, 3))}},
            {"stacked": "b"},
            ("['b']['v']", "4", "2"),
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    make_mesh: MakeMesh, params: Any, options: Any, words: tuple[str, ...]
) -> None:
    zero = zero3(training.loss, optax.sgd(0.1), make_mesh(2), **options)
    with pytest.raises((ValueError, TypeError)) as error:
        zero.init(params)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_batch_that_does_not_split_is_refused(make_mesh: MakeMesh) -> None:
    zero = zero3(training.loss, optax.sgd(0.1), make_mesh(4), accumulate=2)
    state = zero.init(training.init, jax.random.key(0))
    batch = {"x": np.ones((12, 5), np.float32), "y": np.ones(12, np.float32)}
    with pytest.raises(ValueError, match=r"\['x'\].*\(12, 5\).*8"):
        zero.step(state, batch)


def test_a_loss_that_is_no_scalar_is_refused(make_mesh: MakeMesh) -> None:
    zero = zero3(lambda p, b: b["x"] @ p["w"], optax.sgd(0.1), make_mesh(2))
    state = zero.init({"w": np.ones(5, np.float32)})
    with pytest.raises(TypeError, match=r"float32\[4\].*real scalar"):
        zero.step(state, {"x": np.ones((8, 5), np.float32)})


def test_a_layer_that_is_not_gathered_says_so(make_mesh: MakeMesh) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"] @ params["layer"]["w"])

    zero = zero3(loss, optax.sgd(0.1), make_mesh(2), layers="layer")
    state = zero.init({"layer": {"w": np.ones(5, np.float32)}})
    with pytest.raises(TypeError, match=r"'w'.*jaxzero.gathered"):
        zero.step(state, {"x": np.ones((8, 5), np.float32)})
