"""All turns of a list of layers, or of layers stacked along dimension 0."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._layer_turns import Turns
from jaxzero._tree import PyTree


def forward_list(
    turns: Turns, shards: list[PyTree], carry: PyTree, consts: list[Any]
) -> tuple[PyTree, list[PyTree]]:
    saved = []
    carry, first = lax.optimization_barrier((carry, shards[0]))
    full = turns.gather(first)
    for following in shards[1:]:
        saved.append(carry)
        carry, full = turns.forward(full, carry, consts, following)
    saved.append(carry)
    return turns.last_forward(full, carry, consts), saved


def backward_list(
    turns: Turns,
    shards: list[PyTree],
    saved: list[PyTree],
    consts: list[Any],
    cotangent: PyTree,
) -> tuple[list[PyTree], PyTree, list[Any]]:
    cotangent, last = lax.optimization_barrier((cotangent, shards[-1]))
    full = turns.gather(last)
    grads: list[PyTree] = []
    pending, total = None, None
    for i in reversed(range(len(shards))):
        following = shards[i - 1] if i else None
        cotangent, pending, of_consts, reduced, full = turns.backward(
            full, saved[i], consts, cotangent, pending, following, shards[i]
        )
        total = of_consts if total is None else _added(total, of_consts)
        if i + 1 < len(shards):
            grads.append(reduced)
    grads.append(turns.reduced(pending, shards[0]))
    return grads[::-1], cotangent, total or []


def forward_stacked(
    turns: Turns, shards: PyTree, carry: PyTree, consts: list[Any]
) -> tuple[PyTree, PyTree]:
    carry, first = lax.optimization_barrier((carry, take(shards, 0)))

    def turn(state: Any, index: jax.Array) -> tuple[Any, PyTree]:
        carry, full = state
        return turns.forward(full, carry, consts, take(shards, index)), carry

    state = (carry, turns.gather(first))
    (carry, full), saved = lax.scan(turn, state, jnp.arange(1, _count(shards)))
    # Not put together: that would be a copy of all.
    return turns.last_forward(full, carry, consts), (saved, carry)


def backward_stacked(
    turns: Turns,
    shards: PyTree,
    saved: tuple[PyTree, PyTree],
    consts: list[Any],
    cotangent: PyTree,
) -> tuple[PyTree, PyTree, list[Any]]:
    count = _count(shards)
    first = take(shards, 0)
    saved_before, saved_last = saved
    cotangent, last = lax.optimization_barrier((cotangent, take(shards, count - 1)))
    cotangent, pending, total, _, full = turns.backward(
        turns.gather(last),
        saved_last,
        consts,
        cotangent,
        None,
        take(shards, count - 2) if count > 1 else None,
        first,
    )
    if count == 1:
        grads = turns.reduced(pending, first)
        return jax.tree.map(lambda leaf: leaf[None], grads), cotangent, total

    def turn(state: Any, index: jax.Array) -> tuple[Any, None]:
        cotangent, full, pending, total, grads = state
        cotangent, pending, of_consts, reduced, before = turns.backward(
            full,
            take(saved_before, index),
            consts,
            cotangent,
            pending,
            take(shards, index - 1),
            first,
        )
        grads = _put(grads, index + 1, reduced)
        return (cotangent, before, pending, _added(total, of_consts), grads), None

    # Layers count - 2 to 1; the first one has none before it to gather. What is not
    # a gradient yet is a shard, so that no other memory is filled first.
    state = (cotangent, full, pending, total, shards)
    (cotangent, full, pending, total, grads), _ = lax.scan(
        turn, state, jnp.arange(1, count - 1), reverse=True
    )
    cotangent, own, of_consts, second, _ = turns.backward(
        full, take(saved_before, 0), consts, cotangent, pending, None, first
    )
    grads = _put(_put(grads, 1, second), 0, turns.reduced(own, first))
    return grads, cotangent, _added(total, of_consts)


def _count(stacked: PyTree) -> int:
    return int(jax.tree.leaves(stacked)[0].shape[0])


def take(stacked: PyTree, index: Any) -> PyTree:
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked
    )


def _put(stacked: PyTree, index: Any, layer: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf, own: lax.dynamic_update_index_in_dim(leaf, own, index, 0),
        stacked,
        layer,
    )


def _added(one: list[Any], other: list[Any]) -> list[Any]:
    total: list[Any] = jax.tree.map(jnp.add, one, other)
    return total
