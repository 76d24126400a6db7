"""Checkpoints of orbax, restored on another number of devices."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import training
from conftest import MakeMesh
from flax import nnx
from orbax.checkpoint import v1

from jaxzero import LossScale, Policy, zero3

BEFORE, AFTER = 2, 2
KEY = 5
CUTS = {"in": 1, "blocks": None, "out": "whole", "bias": None}
POLICY = Policy(shard_dtype="float32")
ADAM = optax.adam(1e-2, mu_dtype=jnp.bfloat16)

Tree = Any


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Modules and optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def init(key: jax.Array) -> Tree:
    """Returns parameters of two dtypes, whose shards all are float32."""
    params = training.init_stacked(key)
    return params | {"out": params["out"].astype(jnp.bfloat16)}


def loss(params: Tree, batch: Tree) -> jax.Array:
    out = params["out"].astype(jnp.float32)
    return training.loss_stacked(params | {"out": out}, batch)


def make(mesh: Any, **options: Any) -> Any:
    """Returns a run with every kind of cut, stacked layers and a loss scale."""
    return zero3(
        loss,
        ADAM,
        mesh,
        cuts=CUTS,
        stacked="blocks",
        policy=POLICY,
        loss_scale=LossScale(initial=8.0, growth_interval=3),
        **options,
    )


@pytest.fixture(scope="module")
def saved(
    make_mesh: MakeMesh, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tree, training.Curve]:
    """Returns where checkpoints of 8 devices are, what is in them, and what follows."""
    zero = make(make_mesh(8, kind="explicit"))
    data = training.batches(BEFORE + AFTER)
    _, state = training.sharded(zero, zero.init(init, jax.random.key(KEY)), data[:2])
    exported = zero.export_state(state)
    folder = tmp_path_factory.mktemp("orbax")
    v1.save(folder / "v1", exported)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "standard", exported)
        # The next step donates the state while its export is being written.
        curve, _ = training.sharded(zero, state, data[2:])
    return folder, jax.tree.map(np.asarray, exported), curve


def restore_standard(path: Path, template: Tree) -> Tree:
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, template)


MESHES: dict[str, Any] = {
    "6": ((6,), "data", "explicit", {}),
    "3": ((3,), "data", "auto", {}),
    "1": ((1,), "data", "explicit", {}),
    "2x3": ((2, 3), ("replica", "data"), "auto", {"replicate_axis": "replica"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_training_continues_on_another_mesh(
    make_mesh: MakeMesh, saved: Any, mesh: str
) -> None:
    folder, exported, want = saved
    shape, names, kind, options = MESHES[mesh]
    zero = make(make_mesh(shape, names, kind), **options)
    template = zero.export_template(init, jax.random.key(0))
    restored = v1.load(folder / "v1", template)
    for leaf, like in zip(
        jax.tree.leaves(restored), jax.tree.leaves(template), strict=True
    ):
        assert leaf.sharding == like.sharding
    state = zero.import_state(restored, like=jax.eval_shape(init, jax.random.key(0)))
    again = zero.export_state(state)
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(exported), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    data = training.batches(BEFORE + AFTER)[BEFORE:]
    found, state = training.sharded(zero, state, data)
    # A gradient in bfloat16 and moments of it round on each device anew.
    np.testing.assert_allclose(found, want, rtol=2e-2)
    assert float(state.loss_scale.scale) == 16.0


def test_the_standard_checkpointer(make_mesh: MakeMesh, saved: Any) -> None:
    folder, exported, _ = saved
    zero = make(make_mesh(3, kind="explicit"))
    template = zero.export_template(init, jax.random.key(0))
    restored = restore_standard(folder / "standard", template)
    assert jax.tree.structure(restored) == jax.tree.structure(exported)
    again = zero.export_state(zero.import_state(restored))
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(exported), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")
def test_a_restore_without_a_template(make_mesh: MakeMesh, saved: Any) -> None:
    """Named tuples come back as dicts, on the devices that they were saved from."""
    folder, exported, _ = saved
    restored = v1.load(folder / "v1")
    assert isinstance(restored["opt_state"][0], dict)
    zero = make(make_mesh(3))
    again = zero.export_state(zero.import_state(restored))
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(exported), strict=True):
        np.testing.assert_array_equal(one, two)


def eqx_model(key: jax.Array) -> Tree:
    return eqx.nn.Linear(5, "scalar", use_bias=False, key=key)


def nnx_model(key: jax.Array) -> Tree:
    return nnx.state(nnx.Linear(5, 1, rngs=nnx.Rngs(key)))


@pytest.mark.parametrize("model", [eqx_model, nnx_model])
def test_modules(make_mesh: MakeMesh, tmp_path: Path, model: Any) -> None:
    """Their arrays alone are saved; the template says which module they form."""

    def sum_of_squares(params: Tree, batch: Tree) -> jax.Array:
        weights = jax.tree.leaves(params)
        return jnp.mean(batch["x"]) * sum(jnp.sum(w * w) for w in weights)

    zero = zero3(sum_of_squares, optax.adam(1e-2), make_mesh(4))
    state, _ = zero.step(zero.init(model, jax.random.key(0)), training.batches(1)[0])
    v1.save(tmp_path / "state", zero.export_state(state))
    other = zero3(sum_of_squares, optax.adam(1e-2), make_mesh(3, kind="explicit"))
    template = other.export_template(model, jax.random.key(0))
    moved = other.import_state(v1.load(tmp_path / "state", template))
    assert jax.tree.structure(moved.opt_state) == jax.tree.structure(state.opt_state)
    for one, two in zip(
        jax.tree.leaves(other.export_state(moved)),
        jax.tree.leaves(zero.export_state(state)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)
