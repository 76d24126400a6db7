"""L2 norm of arrays that are spread over ranks, with its derivative."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxzero._axis import Axis, mask_to_first, varying

Arrays = Sequence[jax.Array]


def norm_function(
    axis: Axis, once: Sequence[tuple[str, ...]]
) -> Callable[[Arrays], jax.Array]:
    """Returns the norm, with its derivative, of leaves that count once along axes.

    Norms travel as a power of two and a sum of squares in its units, so that none
    overflows, and sums of whole numbers are exact whatever the number of ranks.
    """

    @jax.custom_jvp
    def norm(values: Arrays) -> jax.Array:
        split = [
            mask_to_first(axis, _measured(value), names) if names else _measured(value)
            for value, names in zip(values, once, strict=True)
            if names != axis.names
        ]
        whole = [
            _measured(value)
            for value, names in zip(values, once, strict=True)
            if names == axis.names
        ]
        nothing = [jnp.zeros(2, values[0].dtype)]
        mine = stack(
            axis,
            [_combined(stack(axis, pairs or nothing)) for pairs in (split, whole)],
        )
        row = jnp.arange(axis.group_size, dtype=jnp.int32) == axis.rank()
        everyone = lax.psum(
            jnp.where(row[:, None, None], mine, jnp.zeros_like(mine)), axis.names
        )
        # Copies of whole leaves are equal, so those of the first rank stand for all.
        total = _combined(jnp.concatenate([everyone[:, 0], everyone[:1, 1]]))
        return total[0] * jnp.sqrt(total[1])

    @norm.defjvp
    def derivative(
        primals: tuple[Arrays], tangents: tuple[Arrays]
    ) -> tuple[jax.Array, jax.Array]:
        # Not that of the square root, which is infinite for a tree of zeros.
        (values,), (changes,) = primals, tangents
        total = norm(values)
        divisor = jnp.where(total == 0, jnp.ones_like(total), total)
        parts = [
            jnp.sum(divided(value, divisor) * change) / _ranks(names)
            for value, change, names in zip(values, changes, once, strict=True)
        ]
        return total, lax.psum(jnp.sum(stack(axis, parts)), axis.names)

    def _ranks(names: tuple[str, ...]) -> int:
        return math.prod(lax.axis_size(name) for name in names)

    return norm


def divided(value: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns the value over a scalar of its dtype, also where 1 / norm vanishes.

    XLA multiplies by the reciprocal, and that of the largest numbers is flushed to 0.
    """
    shrink = jnp.where(norm > 1, jnp.full_like(norm, 0.25), jnp.ones_like(norm))
    return (value * shrink) / (norm * shrink)


def _measured(value: jax.Array) -> jax.Array:
    """Returns a power of two near the largest number, and the sum of squares in it.

    The first is zero if all numbers are, and huge if one is not finite.
    """
    # Ends at which the reciprocal of the unit is finite and not flushed to zero.
    least, most = jnp.finfo(value.dtype).minexp, -jnp.finfo(value.dtype).minexp
    largest = jnp.max(jnp.abs(value))
    exponent = jnp.frexp(largest)[1] - 1
    exponent = jnp.where(jnp.isfinite(largest), exponent, most)
    unit = jnp.ldexp(jnp.ones((), value.dtype), jnp.clip(exponent, least, most))
    scale = jnp.where(largest == 0, jnp.zeros_like(unit), unit)
    return jnp.stack([scale, jnp.sum(jnp.square(value / unit))])


def _combined(pairs: jax.Array) -> jax.Array:
    """Returns one pair, as of `_measured`, for all of an array (count, 2) of them."""
    scale = jnp.max(pairs[:, 0])
    ratios = pairs[:, 0] / jnp.where(scale == 0, jnp.ones_like(scale), scale)
    return jnp.stack([scale, jnp.sum(pairs[:, 1] * jnp.square(ratios))])


def stack(axis: Axis, values: Arrays) -> jax.Array:
    """Stacks arrays, typed as varying over the axis and all that one varies over."""
    names = frozenset(axis.names).union(*(varying(value) for value in values))
    return jnp.stack([axis.lift(value, names) for value in values])
