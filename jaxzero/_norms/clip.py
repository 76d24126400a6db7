"""clip_by_global_norm: one limit for the norm of a tree that is spread over ranks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, AxisName, bind_axis
from jaxzero._cut import CutTree
from jaxzero._empty import empty_as_constants
from jaxzero._layout import Layout
from jaxzero._norms.global_norm import tree_norm
from jaxzero._norms.scaled_sum import divided
from jaxzero._numbers import finite_number
from jaxzero._tree import Leaf, PyTree, flatten


class GradientTransformation(NamedTuple):
    """An optimizer step in the form that `optax.chain` takes.

    Attributes:
      init: from parameters to a state.
      update: from updates, state and parameters to new updates and a new state.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def clip_by_global_norm(
    max_norm: float,
    axis_name: AxisName | Layout,
    *,
    like: PyTree | None = None,
    cuts: CutTree = None,
) -> GradientTransformation:
    """Scales shards so that the norm of the whole tree is at most `max_norm`.

    What `optax.clip_by_global_norm` does to the unsharded tree, for use in
    `optax.chain` inside `jax.shard_map` over the axis. Trees whose norm is below the
    limit, or zero, stay as they are, bit for bit. An infinite or NaN norm does not
    raise; see `all_finite`.

    Args:
      max_norm: the limit, a finite number above 0 known at trace time.
      axis_name: as for `global_norm`.
      like: as for `global_norm`; needed where it is.
      cuts: as for `global_norm`.

    Returns:
      A pair of functions `init` and `update`. `update` returns shards in the dtypes
      it is given, and raises what `global_norm` raises.

    Raises:
      ValueError: for a limit that is not finite or not above 0.
      TypeError: for a limit that is no number known at trace time.

    Example:
      >>> import jax, jax.numpy as jnp, jaxzero
      >>> from jax.sharding import PartitionSpec as P
      >>> clip = jaxzero.clip_by_global_norm(1.0, "data")
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> clipped = jax.shard_map(
      ...     lambda g: clip.update(g, clip.init(g))[0],
      ...     mesh=mesh, in_specs=P("data"), out_specs=P("data"),
      ... )
      >>> tree = {"w": jnp.full(4, 8.0)}
      >>> print(jax.jit(clipped)(jaxzero.shard_params(tree, mesh, "data"))["w"])
      [0.5 0.5 0.5 0.5]
    """
    limit = checked_limit(
        "clip_by_global_norm: max_norm",
        max_norm,
        "To leave gradients unclipped, leave the transform out.",
    )

    def init(params: PyTree) -> PyTree:
        del params
        return ()

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        del params
        call = "clip_by_global_norm"
        norm = tree_norm(updates, axis_name, like, cuts, call)
        names = axis_name.names if isinstance(axis_name, Layout) else axis_name
        axis = bind_axis(names, None, call)
        flat = flatten(updates, "tree")
        clipped = [_clipped_leaf(axis, leaf, norm, limit) for leaf in flat.leaves]
        return flat.rebuild(clipped), state

    return GradientTransformation(init, update)


def checked_limit(what: str, value: Any, fix: str) -> float:
    """Returns the limit of a norm, a finite number above 0."""
    expected = "a finite number above 0"
    number = finite_number(what, value, expected, fix)
    if number <= 0:
        raise ValueError(f"{what}={value!r}; expected {expected}. {fix}")
    return number


def clipped(value: jax.Array, norm: jax.Array, limit: float) -> jax.Array:
    """Returns an array of a tree whose norm is to be at most `limit`.

    Args:
      value: one leaf, or a shard of it.
      norm: norm of the whole tree, in the dtype to compute in at least.
      limit: the largest norm.
    """
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(value.real.dtype, norm.dtype)
    norm = norm.astype(wide)
    fits = norm < limit
    # The branch that is not taken must not divide by zero, for its derivative's sake.
    divisor = jnp.where(fits, jnp.ones_like(norm), norm)

    def scaled(part: jax.Array) -> jax.Array:
        # Divided first: limit / norm alone may underflow.
        unit = divided(part.astype(wide), divisor)
        return (unit * jnp.asarray(limit, wide)).astype(part.dtype)

    if jnp.iscomplexobj(value):
        # By parts, because a complex division squares the divisor.
        small = lax.complex(scaled(value.real), scaled(value.imag))
    else:
        small = scaled(value)
    return jnp.where(fits, value, small)


def _clipped_leaf(axis: Axis, leaf: Leaf, norm: jax.Array, limit: float) -> jax.Array:
    value = empty_as_constants(axis, jnp.asarray(leaf.value))
    return clipped(value, norm, limit)
