"""Finds optimizers that do not treat elements alike, of which a rank sees a part only.

`optax.clip_by_global_norm` on shards would clip by the norm of the shards of one rank:
another result on every number of ranks, and no error. So the optimizer's program is
searched for numbers that come from a reduction over shards and were not summed over
the ranks since. And `optax.contrib.muon` would take a matrix that is cut flat for a
vector: so the program is compared with the one for true shapes.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxzero._axis import RETYPES, aval_varies
from jaxzero._tree import PyTree, path_name

REDUCTIONS = frozenset(
    "argmax argmin cholesky conv_general_dilated cumlogsumexp cummax cummin cumprod "
    "cumsum dot_general dynamic_slice eig eigh fft gather householder_product lu qr "
    "reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
    "reduce_xor rev schur slice sort svd top_k triangular_solve".split()
)
"""Primitives whose results depend on more than one element, or on its position."""

DRAWS = frozenset("random_bits random_gamma rng_bit_generator rng_uniform".split())
"""Primitives of which every rank would draw the same numbers for its shard."""

POSITIONS = "iota"
"""The primitive that counts positions, which begin anew in the shard of every rank."""

MEETINGS = frozenset(
    "all_gather all_gather_invariant all_to_all pmax pmin psum psum2 psum_invariant "
    "reduce_scatter".split()
)
"""Primitives after which ranks agree, or hold what others had."""

RESHAPES = RETYPES | frozenset(
    "broadcast_in_dim convert_element_type copy expand_dims reshape squeeze".split()
)
"""Primitives that change the type of elements, not what is computed of them."""


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
        # Positions in a leaf that every rank has whole are those of one device.
        if culprit not in (None, _COUNTED):
            raise ValueError(
                f"zero3: the optimizer computes {_result_name(keys)} with {culprit} "
                f"on shards; each rank sees 1/N of a leaf, so the result would "
                f"depend on the number of ranks. Use clip_norm= or "
                f"jaxzero.clip_by_global_norm in place of optax.clip_by_global_norm, "
                f"skip_nonfinite=True in place of optax.apply_if_finite, and "
                f"optimizers that treat elements alike (adam, adamw, lion, sgd, ...)."
            )


def check_any_shape(
    on_shards: Any, on_leaves: Any, shard_results: PyTree, leaf_results: PyTree
) -> None:
    """Refuses an optimizer that treats a shard unlike its leaf, for its shape.

    Args:
      on_shards: the program of its update, as for `check_elementwise`.
      on_leaves: the same, traced for leaves in true shape.
      shard_results: what the first returns, for the message.
      leaf_results: what the second returns.

    Raises:
      ValueError: naming a result.
    """
    mine = _signatures(on_shards, range(len(on_shards.invars)))
    true = _signatures(on_leaves, range(len(on_leaves.invars)))
    expected = dict(
        zip(
            [keys for keys, _ in jax.tree_util.tree_leaves_with_path(leaf_results)],
            true,
            strict=True,
        )
    )
    paths = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(shard_results)]
    for keys, signature in zip(paths, mine, strict=True):
        if expected.get(keys) != signature:
            raise ValueError(
                f"zero3: the optimizer computes {_result_name(keys)} from a shard in "
                f"another way than from a leaf in true shape; expected one that does "
                f"not look at shapes, because a leaf that is cut flat has one "
                f"dimension. Choose leaves by their key paths, not by ndim; or give "
                f"leaves a cut that keeps their dimensions, with padding (cuts=lambda "
                f"path, shape: 0 if len(shape) > 1 else None); or use an optimizer "
                f"that treats elements alike, not one for matrices (muon, shampoo)."
            )


def _result_name(keys: tuple[Any, ...]) -> str:
    """Returns how a message calls a leaf of (updates, state)."""
    rest = path_name(keys[1:])
    if keys[0] == jax.tree_util.SequenceKey(0):
        return f"the update of leaf {rest}"
    return f"leaf {rest} of its state"


def _signatures(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """Returns hashes of how results are computed, whatever the shapes on the way."""
    known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(var: Any) -> int:
        if _is_literal(var):
            return hash(str(var.val) if np.ndim(var.val) == 0 else "literal")
        return known.get(var, hash("constant"))

    for eqn in jaxpr.eqns:
        operands = [of(var) for var in eqn.invars]
        parts = [
            _signatures(inner, _last(operands, len(inner.invars)))
            for inner in _inner_jaxprs(eqn)
        ]
        if eqn.primitive.name in RESHAPES:
            results = operands[: len(eqn.outvars)]
        elif [len(part) for part in parts] == [len(eqn.outvars)]:
            # A call is what it calls.
            results = parts[0]
        else:
            whole = hash((eqn.primitive.name, *operands, *map(tuple, parts)))
            results = [hash((whole, i)) for i in range(len(eqn.outvars))]
        known |= zip(eqn.outvars, results, strict=True)
    return [of(var) for var in jaxpr.outvars]


def _last(operands: list[int], count: int) -> list[int]:
    """Returns the operands of an inner program, which are the last of the outer."""
    if count > len(operands):
        return [hash(tuple(operands))] * count
    return operands[len(operands) - count :]


_Taint = str | None
"""The reduction that a value comes from, if ranks did not meet since."""

_COUNTED = "positions"
"""Taint of positions that did not meet a shard: all ranks have the same."""


def _trace(jaxpr: Any, taints: Sequence[_Taint], names: frozenset[str]) -> list[_Taint]:
    known: dict[Any, _Taint] = dict(zip(jaxpr.invars, taints, strict=True))

    def of(var: Any) -> _Taint:
        return None if _is_literal(var) else known.get(var)

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
    if primitive in DRAWS and any(map(_has_elements, eqn.outvars)):
        return [primitive] * count
    if primitive == POSITIONS:
        return [_COUNTED] * count
    inner = list(_inner_jaxprs(eqn))
    if not inner:
        taint = primitive if _spreads_one(eqn, names) else _first(inputs)
        if taint == _COUNTED and primitive not in RETYPES:
            return [_counted(var, names) for var in eqn.outvars]
        return [taint] * count
    found = [_through(jaxpr, inputs, names) for jaxpr in inner]
    if all(len(outputs) == count for outputs in found):
        return [_first(outputs) for outputs in zip(*found, strict=True)]
    return [_first(taint for outputs in found for taint in outputs)] * count


def _spreads_one(eqn: Any, names: frozenset[str]) -> bool:
    """Says whether a shard of one element, such as of a scalar, meets many others.

    Only one rank has the element, and others have padding or another element.
    """
    if eqn.primitive.name in ("concatenate", "pad"):
        return False
    most = max((math.prod(var.aval.shape) for var in eqn.outvars), default=0)
    return most > 1 and any(
        _has_elements(var)
        and math.prod(var.aval.shape) == 1
        and aval_varies(var.aval, names)
        for var in eqn.invars
    )


def _counted(var: Any, names: frozenset[str]) -> _Taint:
    """Returns the taint of a value that positions went into."""
    if aval_varies(var.aval, names):
        return POSITIONS
    # A number that all ranks have may come from anywhere, such as from a table.
    return _COUNTED if _has_elements(var) else None


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


def _is_literal(var: Any) -> bool:
    # By its value: the class is in jax.extend, which takes long to import.
    return hasattr(var, "val")


def _first(taints: Iterable[_Taint]) -> _Taint:
    found = [taint for taint in taints if taint is not None]
    return next(
        (taint for taint in found if taint != _COUNTED), next(iter(found), None)
    )
