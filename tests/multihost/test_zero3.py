"""zero3 between processes: batches, checkpoints, and processes that do not agree."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multihost.spmd import Spmd, assert_alike, everyones

import jaxzero
from jaxzero import Policy

optax = pytest.importorskip("optax")
pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS = 20
SECONDS = 30
"""Until all processes know that they do not agree; a hang takes minutes."""

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def expected(spmd: Spmd) -> Any:
    """The unsharded run, on a device of this process."""
    with jax.default_device(jax.local_devices()[0]):
        return training.unsharded(
            training.loss,
            optax.adamw(1e-2),
            training.init(jax.random.key(7)),
            training.batches(STEPS),
        )


def make(spmd: Spmd, **options: Any) -> Any:
    replicate = "replica" if "replica" in spmd.mesh.axis_names else None
    return jaxzero.zero3(
        training.loss,
        optax.adamw(1e-2),
        spmd.mesh,
        replicate_axis=replicate,
        **options,
    )


def start(zero: Any) -> Any:
    return zero.init(training.init, jax.random.key(7))


def of_processes(zero: Any, batch: Any) -> Any:
    """Returns a batch of which each process gives what its own devices need."""

    def place(leaf: np.ndarray) -> jax.Array:
        spread = zero.batch_sharding
        where = spread.addressable_devices_indices_map(leaf.shape).values()
        own = sorted({(index[0].start or 0, index[0].stop) for index in where})
        local = np.concatenate([leaf[begin:end] for begin, end in own])
        return jax.make_array_from_process_local_data(spread, local, leaf.shape)

    return jax.tree.map(place, batch)


def test_batches_are_the_same_however_they_are_built(
    hybrid: Spmd, expected: Any
) -> None:
    steps = STEPS if jax.default_backend() == "gpu" else 5  # slow on CPUs
    curves = []
    for build in (lambda zero, batch: batch, of_processes):
        zero = make(hybrid, layers="blocks/*", min_shard_numel=10)
        data = [build(zero, batch) for batch in training.batches(steps)]
        curve, _ = training.sharded(zero, start(zero), data)
        curves.append(curve)
    np.testing.assert_allclose(curves[0], expected[0][:steps], rtol=1e-3)
    assert curves[0] == curves[1]
    assert_alike(curves)


@pytest.mark.usefixtures("several")
def test_batches_that_differ_between_processes_are_refused(spmd: Spmd) -> None:
    zero = make(spmd)
    state = start(zero)
    (own,) = training.batches(1, seed=jax.process_index())
    with pytest.raises(ValueError, match="batch_sharding"):
        zero.step(state, own)


@pytest.mark.usefixtures("several")
def test_all_processes_refuse_a_batch_that_is_empty_on_one(spmd: Spmd) -> None:
    zero = make(spmd)
    state = start(zero)
    (batch,) = training.batches(1)
    own = jax.tree.map(lambda leaf: leaf[: len(leaf) * jax.process_index()], batch)
    with pytest.raises(ValueError, match="batch_sharding"):
        zero.evaluate(state, own, uneven=True)
    start(zero)  # compares again, so no process is a turn behind


@pytest.mark.parametrize("numpy", [False, True], ids=["arrays", "numpy"])
def test_a_checkpoint_continues_on_another_mesh(
    spmd: Spmd, hybrid: Spmd, expected: Any, numpy: bool
) -> None:
    data = training.batches(6)
    first, second = make(spmd), make(hybrid, layers="blocks/*")
    _, state = training.sharded(first, start(first), data[:3])
    saved = first.export_state(state)
    if numpy:
        saved = multihost_utils.process_allgather(saved, tiled=True)
    curve, state = training.sharded(second, second.import_state(saved), data[3:6])
    np.testing.assert_allclose(curve, expected[0][3:6], rtol=1e-3)
    assert int(state.step) == 6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_may_be_arrays_of_several_processes(
    spmd: Spmd, kind: AxisType
) -> None:
    zero = make(spmd)
    born = start(zero)
    given = zero.export_state(born)["params"]
    # Devices in another order, arrays of one process, and of none.
    turned = Mesh(spmd.mesh.devices[::-1], ("data",), axis_types=(kind,))
    given["in"] = jax.device_put(given["in"], NamedSharding(turned, P()))
    out = multihost_utils.process_allgather(given["out"], tiled=True)
    given["out"] = jnp.asarray(out)
    given["bias"] = np.float32(0)
    state = zero.init(given)
    for found, right in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(born.params), strict=True
    ):
        assert found.sharding == right.sharding
        for mine, its in zip(
            found.addressable_shards, right.addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(mine.data, its.data)
    # The step donates the state, and what was given stays.
    zero.step(state, training.batches(1)[0])
    arrays = [leaf for leaf in jax.tree.leaves(given) if isinstance(leaf, jax.Array)]
    assert not any(leaf.is_deleted() for leaf in arrays)


def test_leaves_that_are_no_arrays_of_numbers(spmd: Spmd) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        noise = jax.random.normal(batch["key"], (3,))
        own = jax.vmap(jax.random.normal)(batch["keys"])
        return jnp.sum(params["w"] * noise) * jnp.mean(own) * batch["factor"]

    zero = jaxzero.zero3(loss, optax.sgd(1.0), spmd.mesh)
    state = zero.init({"w": np.ones(3, np.float32)})
    key = jax.random.key(3)
    keys = jax.random.split(key, 2 * spmd.ranks)
    batch = {"key": key, "keys": keys, "factor": 0.5}
    _, metrics = zero.step(state, batch)
    want = jnp.sum(jax.random.normal(key, (3,))) * 0.5
    want *= jnp.mean(jax.vmap(jax.random.normal)(keys))
    np.testing.assert_allclose(float(metrics.loss), float(want), rtol=1e-5)


def test_leaves_that_go_whole_and_a_batch_that_is_uneven(spmd: Spmd) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"].sum(0) * batch["weights"].sum()) * params["w"][0]

    zero = jaxzero.zero3(
        loss, optax.sgd(1.0), spmd.mesh, batch_dims={"x": 1, "weights": None}
    )
    state = zero.init({"w": np.ones(3, np.float32)})
    for surplus in (0, 1):
        x = np.arange(3 * (2 * spmd.ranks + surplus), dtype=np.float32).reshape(3, -1)
        batch = {"x": x, "weights": np.float32([1, 2])}
        found = zero.evaluate(state, batch, uneven=bool(surplus))
        np.testing.assert_allclose(found, 3 * x.sum(0).mean(), rtol=1e-6)


DIFFERENCES: dict[str, Any] = {
    "shape": {"params": {"w": np.ones((6, 3), np.float32)}},
    "leaf": {"params": {"w": np.ones((5, 3), np.float32), "b": np.ones(2)}},
    "dtype": {"params": {"w": np.ones((5, 3), np.float16)}},
    "name": {"params": {"v": np.ones((5, 3), np.float32)}},
    "integers": {"params": {"w": np.ones((5, 3), np.int32)}},
    "cuts": {"cuts": "flat"},
    "layers": {"layers": "w"},
    "no match": {"layers": "blocks/*"},
    "policy": {"policy": Policy(bucket_bytes=100)},
    "accumulate": {"accumulate": 2},
    "skipping": {"skip_nonfinite": True},
}


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("what", DIFFERENCES)
def test_processes_that_differ_are_told_so(spmd: Spmd, what: str) -> None:
    odd = jax.process_index() == jax.process_count() - 1
    options = dict(DIFFERENCES[what]) if odd else {}
    params = options.pop("params", {"w": np.ones((5, 3), np.float32)})
    zero = make(spmd, **options)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="other parameter shapes"):
        zero.init(params)
    assert time.monotonic() - begin < SECONDS
    # None is left behind in the comparison.
    assert everyones(3) == [3] * jax.process_count()


@jax.tree_util.register_pytree_node_class
class Module:
    """A module that knows its activation, a function of each process's own."""

    def __init__(self, w: Any, activation: Callable[..., Any]) -> None:
        self.w = w
        self.activation = activation

    def tree_flatten(self) -> Any:
        return (self.w,), self.activation

    @classmethod
    def tree_unflatten(cls, activation: Any, children: Any) -> "Module":
        return cls(children[0], activation)


@pytest.mark.parametrize("layers", [(), "layer"])
def test_functions_inside_modules_are_no_difference(spmd: Spmd, layers: Any) -> None:
    # Addresses of functions differ between processes.
    ballast = [object() for _ in range(1000 * jax.process_index())]

    def activation(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) if ballast is not None else x

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(own: Module, x: jax.Array) -> jax.Array:
            return own.activation(x @ own.w)

        return jnp.mean(jaxzero.gathered(layer)(params["layer"], batch))

    zero = jaxzero.zero3(loss, optax.sgd(0.1), spmd.mesh, layers=layers)
    state = zero.init({"layer": Module(np.eye(5, dtype=np.float32), activation)})
    batch = np.ones((2 * spmd.ranks, 5), np.float32)
    state, metrics = zero.step(state, batch)
    np.testing.assert_allclose(float(metrics.loss), np.tanh(1), rtol=1e-5)
