"""Which leaves of an optimizer's state are shards, and of which parameter."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxzero._cut import Shape
from jaxzero._layout import LeafLayout
from jaxzero._tree import PyTree, path_name


def match_leaves(
    state: PyTree,
    params: Sequence[LeafLayout],
    shape_of: Callable[[LeafLayout], Shape],
) -> list[LeafLayout | None]:
    """Returns for each leaf of an optimizer's state the parameter that it belongs to.

    Optimizers keep their moments in trees like that of the parameters, somewhere in
    their state, so a moment's key path ends with that of its parameter. Where several
    parameters fit (a model may have a part named "mu", too), the tree with most
    parameters in it counts. What matches no parameter, such as a step count, is the
    same on every rank.

    Args:
      state: the optimizer's state, or its shapes.
      params: the parameters.
      shape_of: the shape that a moment of a parameter has in this state.
    """
    by_keys = {leaf.keys: leaf for leaf in params}
    longest = max((len(keys) for keys in by_keys), default=0)
    # Per leaf: where a tree of moments would start, and the parameter that fits then.
    fitting: list[dict[tuple[Any, ...], LeafLayout]] = []
    for keys, value in jax.tree_util.tree_leaves_with_path(state):
        fits = {}
        for start in range(max(0, len(keys) - longest), len(keys) + 1):
            found = by_keys.get(tuple(keys[start:]))
            if found is not None and tuple(value.shape) == shape_of(found):
                fits[tuple(keys[:start])] = found
        fitting.append(fits)
    votes = Counter(start for fits in fitting for start in fits)
    return [
        fits[max(fits, key=votes.__getitem__)] if fits else None for fits in fitting
    ]


def check_replicated(
    state: PyTree, owners: Sequence[LeafLayout | None], varying: Sequence[bool]
) -> None:
    """Refuses a state with numbers that differ by rank but belong to no parameter.

    Args:
      state: the optimizer's state on one rank, or its shapes.
      owners: what `match_leaves` returns for it.
      varying: per leaf, whether its type says that it differs by rank.

    Raises:
      ValueError: naming the leaf.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(state)
    for (keys, value), owner, differs in zip(with_paths, owners, varying, strict=True):
        if differs and owner is None:
            raise ValueError(
                f"zero3: leaf {path_name(keys)} of the optimizer's state, of shape "
                f"{tuple(value.shape)}, differs by rank but has the shape of no "
                f"parameter's shard; expected one entry per parameter element, or "
                f"the same numbers on every rank. Use an optimizer that treats "
                f"elements alike (adam, adamw, lion, sgd, ...), not one that factors "
                f"or mixes them (adafactor, shampoo)."
            )
