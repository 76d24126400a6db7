"""apply_layers: each layer is gathered while the one before it computes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, bind_axis, varying
from jaxzero._cut import cut_leaf
from jaxzero._gathered import Shards, gather
from jaxzero._layer_passes import (
    backward_list,
    backward_stacked,
    forward_list,
    forward_stacked,
    take,
)
from jaxzero._layer_turns import Turns
from jaxzero._tree import PyTree

Layer = Callable[[PyTree, Any], Any]


def apply_layers(fn: Layer, layers: PyTree, carry: PyTree) -> PyTree:
    """Applies layers in order; sharded ones exist in full only around their turn.

    For the subtrees that `zero3(..., layers=..., stacked=...)` names. Parameters of a
    layer are gathered while the layer before computes, in forward and backward, and
    its gradients are reduced while the next layer of the backward pass computes
    (with `Policy(overlap=False)` one after the other). Activations inside a layer are
    computed again in the backward pass; what goes from layer to layer is kept.

    Given full parameters, as on one device, it is the plain loop or `lax.scan`.

    Args:
      fn: (params of one layer, carry) -> carry, of the same shapes and dtypes. It may
        close over what all layers share, such as a mask or a random key.
      layers: a sequence with the parameters of each layer, alike in structure and
        shapes, or a pytree of them stacked along dimension 0.
      carry: pytree of arrays that goes through the layers.

    Returns:
      The carry after the last layer.

    Raises:
      ValueError: if there are no layers, or they are not alike.

    Example:
      >>> import jax.numpy as jnp, jaxzero
      >>> layers = [{"w": jnp.eye(2) * 2}, {"w": jnp.eye(2) * 3}]
      >>> out = jaxzero.apply_layers(lambda p, x: x @ p["w"], layers, jnp.ones((1, 2)))
      >>> print(out)
      [[6. 6.]]
    """
    is_list = isinstance(layers, Sequence)
    nodes: list[Any] = list(layers) if is_list else [layers]
    if not nodes:
        raise ValueError("apply_layers: there are no layers; expected at least one.")
    if not isinstance(nodes[0], Shards):
        return _plain(fn, layers, carry, is_list)
    recipe = nodes[0].recipe
    _check_alike(nodes)
    axis = bind_axis(recipe.axis_name, recipe.replicate_axis, "apply_layers")
    carry = _lifted(axis, nodes, carry)
    if not is_list:
        _check_stacked(nodes[0], axis.group_size)
    shards = [node.tree for node in nodes] if is_list else nodes[0].tree
    first = shards[0] if is_list else take(shards, 0)
    closed, consts = _closed(fn, gather(Shards(first, recipe)), carry)
    # What fn closes over may need a gradient too, or has none, such as a mask or a key.
    smooth = [_has_gradient(const) for const in consts]

    def turns(fixed: list[Any]) -> Turns:
        def layer(full: PyTree, carry: PyTree, *shared: Any) -> PyTree:
            parts = {True: iter(shared), False: iter(fixed)}
            return closed([next(parts[part]) for part in smooth], full, carry)

        return Turns(layer, recipe, axis.group_size * axis.replicas)

    forward: Any = forward_list if is_list else forward_stacked
    backward: Any = backward_list if is_list else backward_stacked

    @jax.custom_vjp
    def run(shards: PyTree, carry: PyTree, shared: list[Any], fixed: list[Any]) -> Any:
        return forward(turns(fixed), shards, carry, shared)[0]

    def run_forward(
        shards: PyTree, carry: PyTree, shared: list[Any], fixed: list[Any]
    ) -> Any:
        result, saved = forward(turns(fixed), shards, carry, shared)
        return result, (shards, saved, shared, fixed)

    def run_backward(kept: Any, cotangent: PyTree) -> Any:
        *rest, fixed = kept
        return *backward(turns(fixed), *rest, cotangent), None

    run.defvjp(run_forward, run_backward)
    shared = [const for const, part in zip(consts, smooth, strict=True) if part]
    fixed = [const for const, part in zip(consts, smooth, strict=True) if not part]
    return run(shards, carry, shared, fixed)


def _closed(fn: Layer, params: PyTree, carry: PyTree) -> tuple[Any, list[Any]]:
    """Returns fn as a function of all that it closes over, and its values.

    `jax.closure_convert` leaves out what has no gradient.
    """
    traced, result = jax.make_jaxpr(fn, return_shape=True)(params, carry)
    structure = jax.tree.structure(result)

    def closed(consts: list[Any], params: PyTree, carry: PyTree) -> PyTree:
        leaves = jax.tree.leaves((params, carry))
        return jax.tree.unflatten(
            structure, jax.core.eval_jaxpr(traced.jaxpr, consts, *leaves)
        )

    return closed, list(traced.consts)


def _has_gradient(const: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(const), jnp.inexact))


def _plain(fn: Layer, layers: PyTree, carry: PyTree, is_list: bool) -> PyTree:
    if is_list:
        for params in layers:
            carry = fn(params, carry)
        return carry
    carry, _ = lax.scan(lambda carry, params: (fn(params, carry), None), carry, layers)
    return carry


def _check_stacked(node: Shards, group_size: int) -> None:
    """Refuses what zero3 took for a single layer."""
    recipe = node.recipe
    for leaf, (shape, _), cut in zip(
        jax.tree.leaves(node.tree), recipe.like, recipe.cuts, strict=True
    ):
        one = cut_leaf(cut, "", shape, group_size)
        if leaf.ndim == len(one.shard_shape):
            raise ValueError(
                "apply_layers: zero3 was told that these params are one layer; "
                "expected a list of layers, or layers stacked along dimension 0. Name "
                "the entries of a list, layers='blocks/*' in place of 'blocks'; name "
                "stacked layers by stacked= in place of layers=; and call a "
                "jaxzero.gathered function for a single layer."
            )


def _check_alike(nodes: Sequence[Any]) -> None:
    for i, node in enumerate(nodes):
        if (
            not isinstance(node, Shards)
            or node.recipe != nodes[0].recipe
            or str(jax.tree.structure(node)) != str(jax.tree.structure(nodes[0]))
        ):
            raise ValueError(
                f"apply_layers: layer {i} differs from layer 0 in structure, shapes, "
                f"dtypes or cuts; expected layers that are alike, all named by layers= "
                f"of zero3. Call a jaxzero.gathered function for each layer instead."
            )


def _lifted(axis: Axis, nodes: Sequence[Shards], carry: PyTree) -> PyTree:
    """Types the carry as varying over all that a layer's result varies over."""
    if not axis.typed:
        return carry
    names = frozenset(axis.all_names)
    for leaf in jax.tree.leaves((nodes, carry)):
        names |= varying(leaf)
    return jax.tree.map(lambda leaf: axis.lift(jnp.asarray(leaf), names), carry)
