"""Linear operations that bring their own transpose."""

from collections.abc import Callable
from typing import Any, Protocol

import jax


class Linear(Protocol):
    """An operation that is linear in its operands."""

    def run(self, *operands: Any) -> Any:
        """Returns the result."""

    def transpose(self, cotangents: Any) -> tuple[Any, ...]:
        """Returns the cotangents of the operands from those of the result."""


def differentiable(operation: Linear) -> Callable[..., Any]:
    """Returns `operation.run`, whose VJP is `operation.transpose`."""
    run = jax.custom_vjp(operation.run)

    def forward(*operands: Any) -> tuple[Any, None]:
        return run(*operands), None

    def backward(_: None, cotangents: Any) -> tuple[Any, ...]:
        return operation.transpose(cotangents)

    run.defvjp(forward, backward)
    return run
