"""make_layout: from parameters and options to their layout."""

import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jaxzero._cut import CutOption, CutTree, cut_leaf
from jaxzero._dtypes import check_summable, dtype_name, like_kind
from jaxzero._policy import Policy
from jaxzero._train.layout import Group, Layout, LeafLayout
from jaxzero._tree import Leaf, PyTree, broadcast_cuts, check_width, flatten

Globs = str | Sequence[str]


def make_layout(
    like: PyTree,
    names: tuple[str, ...],
    group_size: int,
    *,
    policy: Policy,
    cuts: CutTree = None,
    layers: Globs = (),
    stacked: Globs = (),
) -> Layout:
    """Returns the layout of a tree of parameters.

    Args:
      like: the parameters, or their shapes and dtypes.
      names: mesh axes to shard over.
      group_size: ranks along them.
      policy: `shard_dtype` is the dtype of the shards, `min_shard_numel` the size from
        which leaves are cut.
      cuts: as for `shard_grads`; for a stacked leaf, the cut of each layer.
      layers: globs of key paths ("blocks/*"); each subtree is one layer.
      stacked: globs of key paths; each subtree is layers stacked along dimension 0.

    Raises:
      ValueError: for a glob without a match, or a stacked leaf without layers.
      TypeError: for a leaf that is no array of floating-point numbers.
    """
    flat = flatten(like, "params", shapes_suffice=True)
    options = broadcast_cuts(cuts, like, flat)
    found = _groups(like, layers, stacked)
    top, treedef = jax.tree_util.tree_flatten_with_path(
        like, is_leaf=lambda path, _: path in found, is_leaf_takes_path=True
    )
    with_keys, whole_treedef = jax.tree_util.tree_flatten_with_path(like)
    if len(with_keys) != len(flat.leaves):
        raise TypeError("params hold float0 leaves, which are no parameters.")
    leaves: list[LeafLayout] = []
    entries: list[int | Group] = []
    for path, node in top:
        begin = len(leaves)
        is_stacked = found.get(path, False)
        subtree, subtreedef = jax.tree.flatten(node)
        for _ in subtree:
            index = len(leaves)
            leaves.append(
                _leaf_layout(
                    with_keys[index][0],
                    flat.leaves[index],
                    options[index],
                    group_size,
                    policy,
                    is_stacked,
                )
            )
        entries.append(
            Group(treedef=subtreedef, begin=begin, end=len(leaves), stacked=is_stacked)
            if path in found
            else begin
        )
    _check_stacks(leaves, [e for e in entries if isinstance(e, Group)])
    return Layout(
        names=names,
        group_size=group_size,
        treedef=whole_treedef,
        leaves=tuple(leaves),
        top=treedef,
        entries=tuple(entries),
    )


def glob_name(keys: Any) -> str:
    """Returns a key path as globs match it: "blocks/0/w"."""
    return keystr(keys, simple=True, separator="/")


def _groups(like: PyTree, layers: Globs, stacked: Globs) -> dict[Any, bool]:
    """Returns the key paths of all groups, and whether each is stacked."""
    globs = [(glob, False) for glob in _as_tuple(layers)]
    globs += [(glob, True) for glob in _as_tuple(stacked)]
    found: dict[Any, bool] = {}
    leaves = jax.tree_util.tree_leaves_with_path(like)
    for leaf_path, _ in leaves:
        for end in range(1, len(leaf_path) + 1):
            name = glob_name(leaf_path[:end])
            # Parts are matched one by one: "*" stands for one key, not several.
            hits = [is_stacked for glob, is_stacked in globs if _matches(name, glob)]
            if hits:
                found[leaf_path[:end]] = hits[0]
                break
    for glob, _ in globs:
        _check_glob(glob, [path for path, _ in leaves], found)
    return found


def _check_glob(
    glob: str, leaf_paths: Sequence[tuple[Any, ...]], found: dict[Any, bool]
) -> None:
    """Refuses a glob that names no group."""
    if any(_matches(glob_name(path), glob) for path in found):
        return
    example = glob_name(leaf_paths[0]) if leaf_paths else ""
    for path in leaf_paths:
        for end in range(1, len(path) + 1):
            if _matches(glob_name(path[:end]), glob):
                raise ValueError(
                    f"layers or stacked names {glob!r}, but {glob_name(path[:end])!r} "
                    f"lies inside a layer that another glob names; expected layers "
                    f"that do not overlap. Leave one of the two out."
                )
    raise ValueError(
        f"layers or stacked names {glob!r}, but no subtree of params has such "
        f"a key path; expected a glob over names like {example!r}. Write one "
        f"'*' for each key that varies, such as 'blocks/*'."
    )


def _as_tuple(globs: Globs) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)


def _matches(name: str, glob: str) -> bool:
    parts, patterns = name.split("/"), glob.split("/")
    return len(parts) == len(patterns) and all(
        map(fnmatch.fnmatchcase, parts, patterns)
    )


def _leaf_layout(
    keys: tuple[Any, ...],
    leaf: Leaf,
    option: CutOption,
    group_size: int,
    policy: Policy,
    is_stacked: bool,
) -> LeafLayout:
    if np.dtype(leaf.dtype).kind in "biu":
        raise TypeError(
            f"params leaf {leaf.path} has dtype {leaf.dtype}, which has no gradient; "
            f"expected floating-point numbers. Take it out of params (for example "
            f"with equinox.partition) and close over it."
        )
    # NumPy's arrays are float64 unless asked; JAX takes them as float32.
    given = dtype_name(jax.dtypes.canonicalize_dtype(leaf.value.dtype))
    dtype = check_summable(given, leaf.path, policy.comm_dtype)
    stored = dtype
    if policy.shard_dtype is not None:
        stored = like_kind(dtype, policy.shard_dtype, leaf.path, "shard_dtype")
    check_width(stored, f"the shard of leaf {leaf.path}")
    shape = leaf.shape
    if is_stacked and not shape:
        raise ValueError(
            f"params leaf {leaf.path} is a scalar, but stacked says that it holds "
            f"one entry per layer; expected at least one dimension. Name the subtree "
            f"in layers, or leave this leaf out of it."
        )
    unit = shape[1:] if is_stacked else shape
    if callable(option):
        option = option(leaf.path, unit)
    by_layers = len(unit) > 2 and unit[1] % group_size == 0
    if option is None and by_layers and math.prod(unit) >= policy.min_shard_numel:
        # A loss may scan over it: each layer has shards of its own.
        option = 1
    cut = cut_leaf(option, leaf.path, unit, group_size, policy.min_shard_numel)
    return LeafLayout(
        keys=tuple(keys),
        shape=shape,
        dtype=given,
        stored=stored,
        # Resolved, so that it says the same without this path and policy.
        option="whole" if cut.layout == "whole" else option,
        cut=cut,
        layers=shape[0] if is_stacked else None,
    )


def _check_stacks(leaves: Sequence[LeafLayout], groups: Sequence[Group]) -> None:
    for group in groups:
        if not group.stacked:
            continue
        members = leaves[group.begin : group.end]
        for leaf in members:
            if leaf.layers != members[0].layers:
                raise ValueError(
                    f"params leaf {leaf.path} stacks {leaf.layers} layers, but "
                    f"{members[0].path} stacks {members[0].layers}; expected the same "
                    f"number along dimension 0 of every leaf of a stacked subtree. "
                    f"Stack the layers with jax.vmap or jnp.stack."
                )
