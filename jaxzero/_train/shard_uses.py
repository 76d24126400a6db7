"""Where a loss function computes with shards of a layer in place of its parameters."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxzero._axis import RETYPES
from jaxzero._gathered import GATHERED
from jaxzero._tree import PyTree

MOVES = RETYPES | {
    "copy",
    "copy_p",
    "dynamic_slice",
    "gather",  # of an index that `vmap` has batched
    "reshape",
    "slice",
    "squeeze",
    "stop_gradient",
}
"""Primitives that choose a layer, or hand it on, and compute nothing."""

ALONGSIDE = "optimization_barrier"
"""The primitive that hands on several values."""

_Path = str | None
"""The leaf whose shard a value is, if it is one."""


def check_shard_uses(
    fn: Callable[[list[PyTree]], Any], groups: list[PyTree], paths: Sequence[str]
) -> None:
    """Refuses a loss function that computes with shards, such as their norm.

    A shard looks like an array to functions of trees, but is a part of a parameter, so
    that the result would be a part of the right one.

    Args:
      fn: the loss function, of the shards alone.
      groups: the shards.
      paths: per leaf of `groups`, its key path.

    Raises:
      TypeError: naming the leaf and what was computed with it.
    """

    def arrays(groups: list[PyTree]) -> list[Any]:
        return [x for x in jax.tree.leaves(fn(groups)) if isinstance(x, jax.Array)]

    jaxpr = jax.make_jaxpr(arrays)(groups).jaxpr
    results = _follow(jaxpr, paths)
    if any(results):
        raise _refusal(results, "its result")


def _follow(jaxpr: Any, paths: Sequence[_Path]) -> list[_Path]:
    """Returns which of the results are shards."""
    known: dict[Any, _Path] = dict(zip(jaxpr.invars, paths, strict=True))
    for eqn in jaxpr.eqns:
        # What is a literal has no hash.
        inputs = [None if hasattr(v, "val") else known.get(v) for v in eqn.invars]
        if any(inputs) and GATHERED not in str(eqn.source_info.name_stack):
            known |= zip(eqn.outvars, _outputs(eqn, inputs), strict=True)
    return [None if hasattr(v, "val") else known.get(v) for v in jaxpr.outvars]


def _outputs(eqn: Any, inputs: list[_Path]) -> list[_Path]:
    name = eqn.primitive.name
    if name == ALONGSIDE:
        return inputs
    # Not a shard that says where to slice.
    if name in MOVES and inputs[0]:
        return inputs[:1]
    inner = list(_inner_jaxprs(eqn))
    found = [_follow(jaxpr, _last(inputs, len(jaxpr.invars))) for jaxpr in inner]
    if not found or any(len(outputs) != len(eqn.outvars) for outputs in found):
        raise _refusal(inputs, name)
    outputs = [next(filter(None, paths), None) for paths in zip(*found, strict=True)]
    if name == "scan" and any(outputs):
        # A carry that becomes a shard is not followed into the next turn.
        raise _refusal(outputs, name)
    return outputs


def _last(inputs: list[_Path], count: int) -> list[_Path]:
    """Returns the inputs of an inner program, which are the last of the outer."""
    return inputs[len(inputs) - count :]


def _inner_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _refusal(paths: Sequence[_Path], use: str) -> TypeError:
    path = next(path for path in paths if path)
    return TypeError(
        f"zero3: loss_fn uses params leaf {path} in {use!r}, but layers or stacked "
        f"names it, so that it is a shard there; expected a use of the full parameter. "
        f"Use it inside a function wrapped by jaxzero.gathered, or in apply_layers; "
        f"where a term needs all parameters, such as their norm, name no layers."
    )
