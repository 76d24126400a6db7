"""What the answer must be: NumPy in float64, sharing no code with jaxzero.

Trees are pytrees of NumPy arrays; `None` is an empty subtree. A cut is None (rows
where dimension 0 divides by the number of ranks, else flat), "flat", "whole" or the
number of a dimension; `cuts` is one cut for all leaves, or a tree of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

Tree = Any
Cut = str | int | None

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
"""Distance from 1 to the next number; complex dtypes have that of their parts."""


def wide(array: Any) -> np.ndarray:
    """Returns an array in float64, or complex128 if it is complex."""
    array = np.asarray(array)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def reduce(
    grads_per_rank: Sequence[Tree],
    op: str = "mean",
    divide_by: float | None = None,
    into: Tree | None = None,
) -> Tree:
    """Returns the full reduced tree in float64.

    Args:
      grads_per_rank: one tree per contributing rank, replicas included.
      op: "mean" or "sum".
      divide_by: replaces the divisor of `op`.
      into: full (unsharded) tree that the result is added to.
    """
    count = len(grads_per_rank) if op == "mean" else 1
    divisor = count if divide_by is None else divide_by
    total = jax.tree.map(lambda *leaves: sum(map(wide, leaves)), *grads_per_rank)
    reduced = jax.tree.map(lambda leaf: leaf / divisor, total)
    if into is None:
        return reduced
    return jax.tree.map(lambda old, new: wide(old) + new, into, reduced)


def shard(full: Tree, ranks: int, rank: int, cuts: Any = None) -> Tree:
    """Returns the zero-padded shard that one rank owns of every leaf."""
    return _map_cuts(lambda cut, x: shard_leaf(x, ranks, rank, cut), cuts, full)


def shards(full: Tree, ranks: int, cuts: Any = None) -> Tree:
    """Returns all ranks' shards side by side: what `shard_map` puts together.

    They are laid along the cut dimension (0 for flat). A "whole" leaf is itself.
    """

    def side_by_side(cut: Cut, leaf: np.ndarray) -> np.ndarray:
        if cut == "whole":
            return leaf
        pieces = [shard_leaf(leaf, ranks, rank, cut) for rank in range(ranks)]
        return np.concatenate(pieces, axis=_dim(cut, leaf))

    return _map_cuts(side_by_side, cuts, full)


def shard_leaf(full: np.ndarray, ranks: int, rank: int, cut: Cut = None) -> np.ndarray:
    """Returns the zero-padded shard that one rank owns of one leaf."""
    full = np.asarray(full)
    if cut == "whole":
        return full
    if cut == "flat" or (cut is None and not _has_even_rows(full.shape, ranks)):
        full = full.reshape(-1)
        dim = 0
    else:
        dim = _dim(cut, full)
    chunk = math.ceil(full.shape[dim] / ranks)
    pad = [(0, 0)] * full.ndim
    pad[dim] = (0, chunk * ranks - full.shape[dim])
    return np.take(
        np.pad(full, pad), np.arange(rank * chunk, (rank + 1) * chunk), axis=dim
    )


def gather(shards_per_rank: Sequence[Tree], like: Tree, cuts: Any = None) -> Tree:
    """Returns the full tree that the ranks' shards are pieces of.

    Args:
      shards_per_rank: one tree of shards per rank, in rank order.
      like: tree of arrays (or anything with a shape) in true shape.
      cuts: as for `shard`.
    """

    def join(cut: Cut, true: Any, *pieces: np.ndarray) -> np.ndarray:
        if cut == "whole":
            return pieces[0]
        shape = tuple(true.shape)
        if cut == "flat" or (cut is None and not _has_even_rows(shape, len(pieces))):
            return np.concatenate(pieces)[: math.prod(shape)].reshape(shape)
        dim = _dim(cut, true)
        return np.take(np.concatenate(pieces, dim), np.arange(shape[dim]), axis=dim)

    return _map_cuts(join, cuts, like, *shards_per_rank)


def global_norm(full: Tree) -> float:
    """Returns the L2 norm over all elements of all leaves."""
    squares = [np.sum(np.abs(wide(leaf)) ** 2) for leaf in jax.tree.leaves(full)]
    return float(np.sqrt(np.sum(squares)))


def all_finite(full: Tree) -> bool:
    """Says whether no element of any leaf is an infinity or NaN."""
    return all(bool(np.all(np.isfinite(wide(x)))) for x in jax.tree.leaves(full))


def stored(full: Tree, dtype: Any) -> Tree:
    """Returns the tree rounded to a dtype, once."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(_dtype(dtype)), full)


def tolerance(ranks: int, *dtypes: Any) -> dict[str, float]:
    """Returns `rtol` and `atol` for data of magnitude about 1.

    One rounding for the cast to the wire, one for each addition of `ranks` numbers,
    one for the scale and one for the cast to the stored dtype, each at most half the
    epsilon of the coarsest dtype on the way: leaf, comm, shard (or `into`). The
    absolute part covers sums whose terms cancel.
    """
    epsilon = max(EPSILON[_real_name(dtype)] for dtype in dtypes)
    bound = (ranks + 3) * epsilon / 2
    return {"rtol": bound, "atol": bound}


def assert_close(
    actual: Tree, expected: Tree, ranks: int, *dtypes: Any, scale: float = 1.0
) -> None:
    """Asserts that two trees agree in structure, shapes and, to rounding, values.

    Args:
      actual: tree from jaxzero.
      expected: tree from this file.
      ranks: number of contributions that were added.
      *dtypes: every dtype on the way, see `tolerance`.
      scale: magnitude of the data that was added.
    """
    allowed = tolerance(ranks, *dtypes)
    allowed["atol"] *= scale
    _compare(actual, expected, lambda a, b: np.testing.assert_allclose(a, b, **allowed))


def assert_same(actual: Tree, expected: Tree) -> None:
    """Asserts that two trees agree in structure, shapes and bit for bit in values.

    For data that every dtype on the way holds exactly; dtypes are not compared.
    """
    _compare(actual, expected, np.testing.assert_array_equal)


def integers(
    tree_of_shapes: Tree, rank: int, *, dtype: Any = "float32", limit: int = 8
) -> Tree:
    """Returns a tree of whole numbers in [-limit, limit], different on every rank.

    Sums of them are exact in every dtype up to about 256 / limit ranks (bfloat16
    holds whole numbers to 256), so the order of additions cannot matter.

    Args:
      tree_of_shapes: pytree whose leaves are shape tuples.
      rank: seeds the numbers, together with the leaf's position.
      dtype: dtype of all leaves.
      limit: largest magnitude.
    """
    leaves, treedef = jax.tree.flatten(
        tree_of_shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    return jax.tree.unflatten(
        treedef,
        [
            np.random.default_rng([index, rank])
            .integers(-limit, limit, shape, endpoint=True)
            .astype(_dtype(dtype))
            for index, shape in enumerate(leaves)
        ],
    )


def _compare(actual: Tree, expected: Tree, check: Callable[..., None]) -> None:
    found, structure = jax.tree_util.tree_flatten_with_path(actual)
    wanted, wanted_structure = jax.tree.flatten(expected)
    assert structure == wanted_structure, f"{structure} is not {wanted_structure}"
    for (path, value), want in zip(found, wanted, strict=True):
        name = f"leaf {jax.tree_util.keystr(path)}"
        value, want = np.asarray(value), np.asarray(want)
        assert value.shape == want.shape, f"{name}: {value.shape} is not {want.shape}"
        try:
            check(wide(value), wide(want))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def _map_cuts(function: Callable[..., Any], cuts: Any, tree: Tree, *more: Tree) -> Tree:
    leaves, treedef = jax.tree.flatten(tree)
    if cuts is None or isinstance(cuts, str | int):
        options = [cuts] * len(leaves)
    else:
        options = jax.tree.leaves(cuts, is_leaf=lambda cut: cut is None)
    columns = [leaves, *(jax.tree.leaves(other) for other in more)]
    return jax.tree.unflatten(
        treedef,
        [function(*row) for row in zip(options, *columns, strict=True)],
    )


def _has_even_rows(shape: tuple[int, ...], ranks: int) -> bool:
    return bool(shape) and 0 not in shape and shape[0] % ranks == 0


def _dim(cut: Cut, leaf: Any) -> int:
    return cut % len(leaf.shape) if isinstance(cut, int) else 0


def _dtype(dtype: Any) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _real_name(dtype: Any) -> str:
    name = _dtype(dtype).name
    return {"complex64": "float32", "complex128": "float64"}.get(name, name)
