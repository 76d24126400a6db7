"""Which leaves of an optimizer's state belong to which parameter."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MakeMesh

from jaxzero import zero3
from jaxzero._make_layout import make_layout
from jaxzero._train.optimizer_layout import match_leaves

RANKS = 4


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """Parameters whose key paths are attributes, as those of modules."""

    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Encoder:
    """A model with parts that are named as the moments of Adam are."""

    weight: Any
    bias: Any
    mu: Layer
    nu: Layer


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def owners(optimizer: Any, params: Any) -> dict[str, str | None]:
    """Returns the path of each state leaf's parameter, found by shards' shapes."""
    layout = make_layout(params, "data", mesh={"data": RANKS})
    shards = layout.unflatten([array(*leaf.shard_shape) for leaf in layout.leaves])
    state = jax.eval_shape(optimizer.init, shards)
    found = match_leaves(state, layout.leaves, lambda leaf: leaf.shard_shape)
    return {
        jax.tree_util.keystr(keys): owner and owner.path
        for (keys, _), owner in zip(
            jax.tree_util.tree_leaves_with_path(state), found, strict=True
        )
    }


def test_moments_belong_to_the_parameter_that_their_path_ends_with() -> None:
    found = owners(optax.adam(1.0), {"a": [array(8, 3), array(5)], "b": array()})
    assert found == {
        "[0].count": None,
        "[0].mu['a'][0]": "['a'][0]",
        "[0].mu['a'][1]": "['a'][1]",
        "[0].mu['b']": "['b']",
        "[0].nu['a'][0]": "['a'][0]",
        "[0].nu['a'][1]": "['a'][1]",
        "[0].nu['b']": "['b']",
    }


def test_a_lone_array_and_a_wrapped_optimizer() -> None:
    wrapped = optax.inject_hyperparams(optax.adam)(learning_rate=1.0)
    found = owners(optax.MultiSteps(wrapped, 2), array(5))
    moments = {path: owner for path, owner in found.items() if owner}
    assert set(moments) == {
        ".inner_opt_state.inner_state[0].mu",
        ".inner_opt_state.inner_state[0].nu",
        ".acc_grads",
    }


def test_parts_of_a_model_that_are_named_as_moments() -> None:
    """All shards are alike, so shapes tell nothing; true shapes differ."""
    model = Encoder(
        weight=array(2, 3),
        bias=array(5),
        mu=Layer(weight=array(6), bias=array(7)),
        nu=Layer(weight=array(3, 2), bias=array(1, 7)),
    )
    found = owners(optax.adam(1.0), model)
    for moment in ("mu", "nu"):
        for path in (".weight", ".bias", ".mu.weight", ".mu.bias", ".nu.weight"):
            assert found[f"[0].{moment}{path}"] == path


def test_masked_parts_have_no_moments() -> None:
    params = {"w": array(8), "b": array(3)}
    adam = optax.masked(optax.adam(1.0), {"w": True, "b": False})
    assert set(owners(adam, params).values()) == {None, "['w']"}
    label = {"w": "adam", "b": "sgd"}
    several = optax.multi_transform(
        {"adam": optax.adam(1.0), "sgd": optax.sgd(1.0, 0.9)}, label
    )
    found = owners(several, params)
    assert found[".inner_states['adam'].inner_state[0].mu['w']"] == "['w']"
    assert found[".inner_states['sgd'].inner_state[0].trace['b']"] == "['b']"


def test_a_hyperparameter_named_as_a_parameter_is_none() -> None:
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=1.0)
    found = owners(adam, {"learning_rate": array(8), "b1": array()})
    assert found[".hyperparams['learning_rate']"] is None
    assert found[".inner_state[0].mu['learning_rate']"] == "['learning_rate']"
    # A scalar's shard has one element, so it has another shape.
    assert found[".hyperparams['b1']"] is None


def rows_of(shape: Any) -> optax.GradientTransformation:
    """Returns an optimizer that keeps a number per row, as factored ones do."""

    def init(params: Any) -> Any:
        return {"per_row": jax.tree.map(shape, params)}

    return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


def test_what_differs_by_rank_must_be_a_moment(make_mesh: MakeMesh) -> None:
    params = {"w": np.ones((8, 3), np.float32)}

    def start(optimizer: Any) -> Any:
        zero = zero3(lambda p, b: jnp.mean(p["w"]), optimizer, make_mesh(RANKS))
        return zero.init(params)

    with pytest.raises(ValueError, match=r"\['per_row'\]\['w'\].*\(2,\).*by rank"):
        start(rows_of(lambda leaf: leaf[:, 0]))
    # Numbers that are the same on every rank may have any shape.
    state = start(rows_of(lambda leaf: jnp.zeros(leaf.shape[1])))
    assert state.opt_state["per_row"]["w"].sharding.is_fully_replicated
