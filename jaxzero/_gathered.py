"""gathered: layers whose parameters exist in full only while they compute."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxzero._axis import AxisName
from jaxzero._collectives.gather_params import gather_params
from jaxzero._cut import CutTree
from jaxzero._policy import Policy
from jaxzero._tree import PyTree

GATHERED = "jaxzero_gathered"
"""Name of gathered parameters in `jax.checkpoint_policies` that go by names.

Also the scope of what may compute with shards.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a node of shards becomes parameters.

    Attributes:
      like: per leaf, true shape and dtype of one layer.
      cuts: per leaf, how it is cut.
      axis_name: mesh axes.
      replicate_axis: axes that the gradients are summed over too.
      policy: dtypes and sizes.
    """

    like: tuple[tuple[tuple[int, ...], str], ...]
    cuts: tuple[Any, ...]
    axis_name: AxisName
    replicate_axis: AxisName | None
    policy: Policy


@jax.tree_util.register_pytree_node_class
class Shards:
    """A subtree of parameters of which this rank holds its shards.

    A pytree node: `lax.scan` and indexing with `jax.tree.map` reach the shards in it.
    A function made by `gathered` takes it in place of the full parameters.
    """

    def __init__(self, tree: PyTree, recipe: Recipe) -> None:
        self.tree = tree
        self.recipe = recipe

    def tree_flatten(self) -> tuple[tuple[PyTree], Recipe]:
        return (self.tree,), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe: Recipe, children: tuple[PyTree]) -> "Shards":
        return cls(children[0], recipe)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_NOT_GATHERED.format(what=f"attribute {name!r}"))

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(_NOT_GATHERED.format(what=f"item {key!r}"))

    def __jax_array__(self) -> Any:
        # What jax.numpy asks of what is no array, where a layer is one array.
        raise TypeError(_NOT_GATHERED.format(what="an array"))


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(node: Shards, *_: Any, **__: Any) -> Any:
        raise TypeError(_NOT_GATHERED.format(what=name))

    return refuse


# Python looks for these in the class alone, so that __getattr__ does not serve. Some
# have a default that would be silently wrong: a comparison, and whether it is true.
for _name in (
    "abs add bool call complex contains divmod enter eq float floordiv ge gt index int "
    "invert iter le len lt matmul mod mul ne neg pos pow radd rdivmod rfloordiv "
    "rmatmul rmod rmul rpow rsub rtruediv setitem sub truediv"
).split():
    setattr(Shards, f"__{_name}__", _refuse(f"__{_name}__"))

_NOT_GATHERED = (
    "{what} was asked of a layer's parameters that are still sharded; expected the "
    "full ones. Wrap the function that uses them: layer = jaxzero.gathered(layer)."
)


def gathered[**P, R](
    fn: Callable[P, R], *, policy: Callable[..., bool] | None = None
) -> Callable[P, R]:
    """Makes a layer that gathers its parameters itself, in forward and backward.

    For the subtrees that `zero3(..., layers=..., stacked=...)` names. The layer is a
    `jax.checkpoint`: nothing of it is kept for the backward pass but its arguments, so
    full parameters of one layer at a time exist. In the backward pass they are
    gathered again, and the gradients are reduce-scattered as soon as they exist.

    Given full parameters, as on one device, the layer is `fn` itself.

    Args:
      fn: a function of parameters and activations.
      policy: what `jax.checkpoint` may keep beside the arguments, from
        `jax.checkpoint_policies`. Gathered parameters have the name
        `"jaxzero_gathered"` there.

    Returns:
      A function with the same arguments and results.

    Example:
      >>> import jax.numpy as jnp, jaxzero
      >>> layer = jaxzero.gathered(lambda params, x: jnp.tanh(x @ params["w"]))
      >>> layer({"w": jnp.eye(2)}, jnp.zeros((1, 2))).shape
      (1, 2)
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_shards)
        if not any(map(_is_shards, leaves)):
            return fn(*args, **kwargs)
        # What is no array, such as a flag, stays what it is.
        traced = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]

        def run(values: list[Any]) -> R:
            # Nothing else keeps the compiler from gathering all layers at the start.
            values = lax.optimization_barrier(values)
            full = list(leaves)
            for i, value in zip(traced, values, strict=True):
                full[i] = gather(value) if _is_shards(value) else value
            args, kwargs = jax.tree.unflatten(structure, full)
            return fn(*args, **kwargs)

        layer: Callable[[list[Any]], R] = jax.checkpoint(run, policy=policy)
        return layer([leaves[i] for i in traced])

    return wrapped


def gather(node: Shards) -> PyTree:
    """Returns the full parameters of one layer."""
    recipe = node.recipe
    structure = jax.tree.structure(node.tree)
    like = jax.tree.unflatten(
        structure, [jax.ShapeDtypeStruct(*leaf) for leaf in recipe.like]
    )
    cuts: CutTree = jax.tree.unflatten(structure, recipe.cuts)
    with jax.named_scope(GATHERED):
        full = gather_params(
            node.tree,
            like,
            recipe.axis_name,
            policy=recipe.policy,
            cuts=cuts,
            replicate_axis=recipe.replicate_axis,
        )
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, GATHERED), full)


def _is_shards(node: Any) -> bool:
    return isinstance(node, Shards)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Shards | jax.Array | np.ndarray)
