"""What an optimizer may ask for beside gradients, state and parameters."""

import inspect
import re
from typing import Any

import jax

from jaxzero._train.options import Optimizer
from jaxzero._tree import PyTree


def update(
    optimizer: Optimizer,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    value: jax.Array,
    grad: PyTree,
) -> tuple[PyTree, PyTree]:
    """Returns updates and the next state, of an optimizer that may ask for more.

    Args:
      optimizer: such as `optax.GradientTransformationExtraArgs`; a plain one gets
        neither of the last two.
      grads: shards of the gradients, clipped.
      state: its state.
      params: shards of the parameters.
      value: the loss, equal on all devices.
      grad: shards of the gradients before clipping.

    Raises:
      TypeError: naming an argument that it needs and no step has.
    """
    offered: dict[str, Any] = {"value": value, "grad": grad}
    taken = inspect.signature(optimizer.update).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    extra = {k: v for k, v in offered.items() if takes_all or k in taken}
    try:
        return optimizer.update(grads, state, params, **extra)
    except TypeError as error:
        missing = re.search(r"missing \d+ required keyword-only.*?: (.*)", str(error))
        if missing is None:
            raise
        raise TypeError(
            f"zero3: the optimizer asks for {missing[1]} in its update; a step has "
            f"value, the loss, and grad, its gradient. Use one that asks for no more, "
            f"such as optax.contrib.reduce_on_plateau, and none with a line search."
        ) from error
