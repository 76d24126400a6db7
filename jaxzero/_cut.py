"""How one leaf is cut into shards: a function of its shape, N and the option only."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxzero._dtypes import kind

Shape = tuple[int, ...]
CutOption = str | int | Callable[[str, Shape], "str | int | None"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """One leaf's layout.

    The leaf is seen as a block (outer, length, inner). Rank r owns positions
    [r * chunk, (r + 1) * chunk) of the middle dimension, zero-padded at the end.

    Attributes:
      layout: "rows", "flat", "dim=k" or "whole".
      dim: dimension that is cut in the true shape; None for flat and whole.
      outer: elements before the cut dimension.
      length: elements along it.
      inner: elements after it.
      chunk: positions per rank, ceil(length / ranks).
      ranks: ranks that the leaf is cut over; 1 for "whole".
      shard_shape: shape of one rank's shard.
      reason: why this layout was taken.
    """

    layout: str
    dim: int | None
    outer: int
    length: int
    inner: int
    chunk: int
    ranks: int
    shard_shape: Shape
    reason: str

    @property
    def shard_dim(self) -> int:
        """Dimension of the shard along which shards are laid side by side."""
        return self.dim or 0

    @property
    def whole(self) -> bool:
        """Whether every rank keeps all of it."""
        return self.layout == "whole"

    @property
    def surplus(self) -> int:
        """Positions of padding after the end, on the last ranks together."""
        return self.chunk * self.ranks - self.length

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return self.outer * self.chunk * self.inner

    @property
    def even(self) -> bool:
        """Whether no rank holds padding."""
        return not self.surplus

    @property
    def global_shape(self) -> Shape:
        """Shape of all shards laid side by side, padding included."""
        if self.whole:
            return self.shard_shape
        shape = list(self.shard_shape)
        shape[self.shard_dim] *= self.ranks
        return tuple(shape)


def cut_leaf(
    option: CutOption,
    path: str,
    shape: Shape,
    group_size: int,
    min_shard_numel: int = 0,
) -> Cut:
    """Resolves a cut option for one leaf.

    Args:
      option: None (rows where dim 0 divides, else flat), "flat", "whole", the
        number of a dimension, or a callable (path, shape) that returns one of these.
      path: key path of the leaf.
      shape: true shape of the leaf.
      group_size: number of ranks.
      min_shard_numel: leaves with fewer elements stay whole if the option is None.

    Raises:
      ValueError: for a dimension out of range or an unknown word.
      TypeError: for an option of another type.
    """
    reason = "asked for"
    if callable(option):
        option = option(path, shape)
        reason = "chosen by the callable"
    if isinstance(option, bool) or not (
        option is None or isinstance(option, str) or hasattr(option, "__index__")
    ):
        raise TypeError(
            f"the cut of leaf {path} is {option!r}; expected None, 'flat', 'whole', "
            f"the number of a dimension, or a callable (path, shape) that returns one."
        )
    if option is None:
        if math.prod(shape) < min_shard_numel:
            return _whole(
                shape, f"fewer than min_shard_numel={min_shard_numel} elements"
            )
        return _default_cut(shape, group_size)
    if option == "flat":
        return _flat(shape, group_size, reason)
    if option == "whole":
        return _whole(shape, reason)
    if isinstance(option, str):
        raise ValueError(
            f"the cut of leaf {path} is {option!r}; expected None, 'flat', 'whole', "
            f"the number of a dimension, or a callable (path, shape) that returns one."
        )
    dim = option.__index__()
    if not -len(shape) <= dim < len(shape):
        fits = f"a number from {-len(shape)} to {len(shape) - 1}, or " if shape else ""
        raise ValueError(
            f"the cut of leaf {path} is dimension {dim}, but its shape {shape} has "
            f"{len(shape)} dimensions; expected {fits}'flat' or 'whole'."
        )
    return _along(shape, dim % len(shape), group_size, reason)


def cut_stored_leaf(
    option: CutOption,
    path: str,
    shape: Shape,
    dtype: str,
    group_size: int,
    min_shard_numel: int = 0,
) -> Cut:
    """Resolves a cut option for a leaf that is stored, and need not be a gradient.

    As `cut_leaf`, but an integer or boolean scalar, such as an optimizer's count of
    steps, stays whole if the option is None: every rank reads it, and cut flat only the
    first would hold it.
    """
    if option is None and not shape and kind(dtype) == "integer or boolean":
        return _whole(shape, f"a scalar of {dtype}")
    return cut_leaf(option, path, shape, group_size, min_shard_numel)


def _default_cut(shape: Shape, group_size: int) -> Cut:
    if not shape:
        return _flat(shape, group_size, "scalar")
    if 0 in shape:
        return _flat(shape, group_size, "empty")
    if shape[0] % group_size:
        return _flat(
            shape, group_size, f"dim 0 ({shape[0]}) not divisible by {group_size}"
        )
    return _along(shape, 0, group_size, f"dim 0 ({shape[0]}) divisible by {group_size}")


def _flat(shape: Shape, group_size: int, reason: str) -> Cut:
    numel = math.prod(shape)
    chunk = -(-numel // group_size)
    return Cut(
        layout="flat",
        dim=None,
        outer=1,
        length=numel,
        inner=1,
        chunk=chunk,
        ranks=group_size,
        shard_shape=(chunk,),
        reason=reason,
    )


def _whole(shape: Shape, reason: str) -> Cut:
    on_one_rank = _flat(shape, 1, reason)
    return dataclasses.replace(on_one_rank, layout="whole", shard_shape=shape)


def _along(shape: Shape, dim: int, group_size: int, reason: str) -> Cut:
    length = shape[dim]
    chunk = -(-length // group_size)
    rows = dim == 0 and chunk * group_size == length
    return Cut(
        layout="rows" if rows else f"dim={dim}",
        dim=dim,
        outer=math.prod(shape[:dim]),
        length=length,
        inner=math.prod(shape[dim + 1 :]),
        chunk=chunk,
        ranks=group_size,
        shard_shape=shape[:dim] + (chunk,) + shape[dim + 1 :],
        reason=reason,
    )


CutTree = Any
"""A pytree prefix of `CutOption`s."""
