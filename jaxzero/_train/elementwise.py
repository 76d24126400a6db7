"""Finds optimizers that mix the elements of a leaf, of which a rank sees a part only.

`optax.clip_by_global_norm` on shards would clip by the norm of the shards of one rank:
another result on every number of ranks, and no error. So the optimizer's program is
searched for numbers that come from a reduction over shards and were not summed over
the ranks since.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxzero._axis import aval_varies
from jaxzero._tree import PyTree, path_name

REDUCTIONS = frozenset(
    "argmax argmin conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
    "dot_general eigh householder_product lu qr reduce reduce_and reduce_max "
    "reduce_min reduce_or reduce_prod reduce_sum reduce_xor sort svd top_k "
    "triangular_solve cholesky".split()
)
MEETINGS = frozenset(
    "all_gather all_gather_invariant all_to_all pmax pmin psum psum2 psum_invariant "
    "reduce_scatter".split()
)
"""Primitives after which ranks agree, or hold what others had."""


def check_elementwise(jaxpr: Any, names: Sequence[str], results: PyTree) -> None:
    """Refuses an optimizer whose results depend on how leaves are cut.

    Args:
      jaxpr: the program of its update, as traced inside a `shard_map`.
      names: mesh axes that shards are spread over.
      results: what the program returns, for the message.

    Raises:
      ValueError: naming a result and the operation.
    """
    found = _trace(jaxpr, [None] * len(jaxpr.invars), frozenset(names))
    paths = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(results)]
    for keys, culprit in zip(paths, found, strict=True):
        if culprit is not None:
            raise ValueError(
                f"zero3: the optimizer computes {path_name(keys)} from a {culprit} "
                f"over shards; each rank sees 1/N of a leaf, so the result would "
                f"depend on the number of ranks. Use clip_norm= or "
                f"jaxzero.clip_by_global_norm in place of optax.clip_by_global_norm, "
                f"skip_nonfinite=True in place of optax.apply_if_finite, and "
                f"optimizers that treat elements alike."
            )


_Taint = str | None
"""The reduction that a value comes from, if ranks did not meet since."""


def _trace(jaxpr: Any, taints: Sequence[_Taint], names: frozenset[str]) -> list[_Taint]:
    known: dict[Any, _Taint] = dict(zip(jaxpr.invars, taints, strict=True))

    def of(var: Any) -> _Taint:
        return None if isinstance(var, Literal) else known.get(var)

    for eqn in jaxpr.eqns:
        inputs = [of(var) for var in eqn.invars]
        for var, taint in zip(eqn.outvars, _outputs(eqn, inputs, names), strict=True):
            known[var] = taint
    return [of(var) for var in jaxpr.outvars]


def _outputs(eqn: Any, inputs: list[_Taint], names: frozenset[str]) -> list[_Taint]:
    count = len(eqn.outvars)
    primitive = eqn.primitive.name
    if primitive in MEETINGS:
        return [None] * count
    if primitive in REDUCTIONS and any(
        _has_elements(var) and aval_varies(var.aval, names) for var in eqn.invars
    ):
        return [primitive] * count
    inner = list(_inner_jaxprs(eqn))
    if not inner:
        return [_first(inputs)] * count
    found = [_through(jaxpr, inputs, names) for jaxpr in inner]
    if all(len(outputs) == count for outputs in found):
        return [_first(outputs) for outputs in zip(*found, strict=True)]
    return [_first(taint for outputs in found for taint in outputs)] * count


def _through(jaxpr: Any, inputs: list[_Taint], names: frozenset[str]) -> list[_Taint]:
    """Follows taints into an inner program, whose inputs are the last of the outer."""
    count = len(jaxpr.invars)
    if count > len(inputs):
        return _trace(jaxpr, [_first(inputs)] * count, names)
    taints = inputs[len(inputs) - count :]
    # Twice, because the results of one turn of a loop are the inputs of the next.
    once = _first(_trace(jaxpr, taints, names))
    again = [taint or (once if len(inputs) != count else None) for taint in taints]
    return _trace(jaxpr, again, names)


def _inner_jaxprs(eqn: Any) -> Iterable[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _has_elements(var: Any) -> bool:
    return bool(getattr(var.aval, "ndim", 0))


def _first(taints: Iterable[_Taint]) -> _Taint:
    return next((taint for taint in taints if taint is not None), None)
