"""make_layout: from a tree and options to its layout."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import keystr

from jaxzero._axis import Axis, AxisName, axis_names, bind_axis, mesh_sizes
from jaxzero._cut import CutOption, CutTree, cut_stored_leaf
from jaxzero._layout import Group, Layout, LeafLayout
from jaxzero._numbers import whole_number
from jaxzero._tree import Leaf, PyTree, broadcast_cuts, flatten

Globs = str | Sequence[str]


def make_layout(
    like: PyTree,
    axis_name: AxisName,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    replicate_axis: AxisName | None = None,
    cuts: CutTree = None,
    min_shard_numel: int = 0,
    layers: Globs = (),
    stacked: Globs = (),
) -> Layout:
    """Says once how a tree is spread over mesh axes.

    Functions that take leaves apart or put them together take the layout in place of
    an axis, so that all of them agree.

    A leaf of n elements over N ranks becomes, unless `cuts` says otherwise, rows
    `[r * d0/N, (r + 1) * d0/N)` where dimension 0 divides by N, else elements
    `[r * c, (r + 1) * c)` of the flattened leaf, c = ceil(n / N), zero-padded. Scalars
    of integers or booleans stay whole.

    Args:
      like: pytree with the true shapes and dtypes: parameters, or
        `jax.eval_shape(init, key)`.
      axis_name: mesh axis, or tuple of axes in rank order, to shard over.
      mesh: the mesh, or the sizes of its axes by name, such as `{"data": 8}`. None
        takes the mesh of the surrounding `shard_map`.
      replicate_axis: axis or axes along which shards are copies (hybrid sharding).
      cuts: pytree prefix of None, `"flat"`, `"whole"` (kept on every rank and
        all-reduced), the number of a dimension (padded where N does not divide it),
        or a callable (path, shape) that returns one of these, such as
        `lambda path, shape: "whole" if "norm" in path else None`. For a stacked
        leaf, the cut of each layer.
      min_shard_numel: leaves with fewer elements, and no cut of their own, stay whole.
      layers: globs of key paths (`"blocks/*"`); each subtree is one layer.
      stacked: globs of key paths; each subtree is layers stacked along dimension 0.

    Raises:
      ValueError: for an axis that the mesh does not have or that is named twice, a cut
        that does not fit, or a glob without a match.
      TypeError: for a leaf that is no array, or a size that is no whole number.

    Example:
      >>> import jax, jaxzero
      >>> like = {"w": jax.ShapeDtypeStruct((8, 4), "float32")}
      >>> layout = jaxzero.make_layout(like, "data", mesh={"data": 4})
      >>> layout.leaves[0].shard_shape
      (2, 4)
    """
    names, replicate = axis_names(axis_name, replicate_axis, "make_layout")
    sizes = mesh_sizes(mesh)
    for name in names + replicate:
        if name not in sizes:
            raise ValueError(
                f"make_layout: axis {name!r} is not in the mesh; expected one of its "
                f"axes {', '.join(map(repr, sizes)) or '(none)'}. Name one of them, or "
                f"give the mesh: mesh=..."
            )
    if any(_is_float0(leaf) for leaf in jax.tree.leaves(like)):
        raise TypeError(
            "make_layout: like holds float0 leaves, gradients of integers, which do "
            "not tell a dtype; expected the parameters or their jax.eval_shape."
        )
    return build_layout(
        like,
        names,
        replicate,
        sizes,
        what="like",
        cuts=cuts,
        min_shard_numel=checked_numel("make_layout", min_shard_numel),
        layers=layers,
        stacked=stacked,
    )


def bind_layout(
    given: AxisName | Layout,
    like: PyTree,
    call: str,
    *,
    what: str,
    cuts: CutTree = None,
    replicate_axis: AxisName | None = None,
) -> tuple[Axis, Layout]:
    """Returns the axis of a call in a `shard_map`, and the layout of its tree.

    Args:
      given: the layout, or the axis of one that is made here.
      like: true shapes for one that is made here.
      call: name of the public function, for messages.
      what: name of `like` in messages.
      cuts: as for `make_layout`, if the layout is made here.
      replicate_axis: likewise.

    Raises:
      ValueError: as `bind_axis` and `make_layout`, and for a layout beside options
        that it decides itself, or of a mesh of another size.
    """
    if not isinstance(given, Layout):
        axis = bind_axis(given, replicate_axis, call)
        layout = build_layout(
            like,
            axis.names,
            axis.replicate,
            mesh_sizes(None),
            what=what,
            cuts=cuts,
        )
        return axis, layout
    check_alone(call, cuts=cuts, replicate_axis=replicate_axis)
    axis = bind_axis(given.names, given.replicate or None, call)
    check_sizes(given, mesh_sizes(None), call)
    return axis, given


def check_sizes(layout: Layout, sizes: Mapping[str, int], call: str) -> None:
    """Refuses a layout that was made for another mesh.

    Args:
      layout: the layout.
      sizes: the sizes of the mesh's axes by name.
      call: name of the public function, for messages.
    """
    for name in layout.names + layout.replicate:
        if name not in sizes:
            raise ValueError(
                f"{call}: the layout has the axis {name!r}, which the mesh does not "
                f"have; expected one of {', '.join(map(repr, sizes))}. Make the layout "
                f"for this mesh: make_layout(..., mesh=mesh)."
            )
    ranks = math.prod(sizes[name] for name in layout.names)
    replicas = math.prod(sizes[name] for name in layout.replicate)
    if (ranks, replicas) != (layout.group_size, layout.replicas):
        raise ValueError(
            f"{call}: the layout is for {layout.group_size} ranks and "
            f"{layout.replicas} replicas; the mesh has {ranks} and {replicas} along "
            f"its axes. Make the layout for this mesh: make_layout(..., mesh=mesh)."
        )


def checked_numel(call: str, value: Any) -> int:
    """Returns the size from which leaves are cut.

    Args:
      call: name of the public function, for messages.
      value: as the user gave it.
    """
    numel = whole_number(f"{call}: min_shard_numel", value, "elements")
    if numel < 0:
        raise ValueError(
            f"{call}: min_shard_numel={numel}; expected at least 0 (elements)."
        )
    return numel


def check_alone(call: str, **options: Any) -> None:
    """Refuses options that a layout decides, beside one."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{call}: {name}={value!r} stands beside a layout, which decides it; "
                f"expected the layout alone. Give {name} to make_layout."
            )


def build_layout(
    like: PyTree,
    names: tuple[str, ...],
    replicate: tuple[str, ...],
    sizes: Mapping[str, int],
    *,
    what: str,
    cuts: CutTree = None,
    min_shard_numel: int = 0,
    layers: Globs = (),
    stacked: Globs = (),
) -> Layout:
    """Returns a layout from checked axes; see `make_layout`."""
    flat = flatten(like, what, shapes_suffice=True)
    options = iter(broadcast_cuts(cuts, like, flat))
    arrays = iter(flat.leaves)
    found = _groups(like, layers, stacked)
    top, top_treedef = jax.tree_util.tree_flatten_with_path(
        like, is_leaf=lambda path, _: path in found, is_leaf_takes_path=True
    )
    group_size = math.prod(sizes[name] for name in names)
    leaves: list[LeafLayout] = []
    entries: list[int | Group] = []
    for path, node in top:
        begin = len(leaves)
        is_stacked = found.get(path, False)
        subtree, treedef = jax.tree.flatten(node)
        for value in subtree:
            if _is_float0(value):
                continue  # set aside by `flatten`
            leaf, option = next(arrays), next(options)
            leaves.append(
                _leaf_layout(
                    leaf, option, names, group_size, min_shard_numel, is_stacked
                )
            )
        entries.append(
            Group(treedef=treedef, begin=begin, end=len(leaves), stacked=is_stacked)
            if path in found
            else begin
        )
    _check_stacks(leaves, [e for e in entries if isinstance(e, Group)])
    return Layout(
        names=names,
        replicate=replicate,
        group_size=group_size,
        replicas=math.prod(sizes[name] for name in replicate),
        treedef=flat.treedef,
        leaves=tuple(leaves),
        top=top_treedef,
        entries=tuple(entries),
    )


def _is_float0(value: Any) -> bool:
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


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
    leaf: Leaf,
    option: CutOption,
    names: tuple[str, ...],
    group_size: int,
    min_shard_numel: int,
    is_stacked: bool,
) -> LeafLayout:
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
    cut = cut_stored_leaf(
        option, leaf.path, unit, leaf.dtype, group_size, min_shard_numel
    )
    return LeafLayout(
        keys=leaf.keys,
        names=() if cut.whole else names,
        shape=shape,
        dtype=leaf.dtype,
        stored=leaf.dtype,
        # Resolved, so that it says the same whatever path and size.
        option="whole" if cut.whole else option,
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
