"""Shows types as the sources name them: `PyTree`, not the `Any` that it stands for."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from sphinx.application import Sphinx

import jaxzero

TYPES = ("AxisName", "CutTree", "Globs", "LossFn", "Optimizer", "PyTree")
"""Names of types that the page `types` explains."""

FORWARD = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")
"""How Sphinx writes such a name inside a union."""

DOTTED = re.compile(r"(?<![\w.])(\w+(?:\.\w+)+)")


def functions() -> Iterator[Callable[..., Any]]:
    """Yields the public functions and the methods of public classes."""
    for name, value in vars(jaxzero).items():
        if name.startswith("_"):
            continue
        if isinstance(value, FunctionType):
            yield value
        elif inspect.isclass(value):
            for method, function in vars(value).items():
                if isinstance(function, FunctionType) and method[0] != "_":
                    yield function


def source_annotations(function: Callable[..., Any]) -> dict[str, str]:
    """Returns a function's annotations as they are written."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function} is no plain function")
    signature = tree.args
    arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    arguments += [arg for arg in (signature.vararg, signature.kwarg) if arg]
    written = {arg.arg: arg.annotation for arg in arguments if arg.annotation}
    if tree.returns:
        written["return"] = tree.returns
    return {name: ast.unparse(node).strip("'") for name, node in written.items()}


def keep_source_annotations(app: Sphinx) -> None:
    """Replaces annotations by their text, as `from __future__` would have done."""
    for function in functions():
        function.__annotations__ = source_annotations(function)


def names_in_unions(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Writes the names of types inside unions as elsewhere."""
    return (
        signature and FORWARD.sub(r"\1", signature),
        returned and FORWARD.sub(r"\1", returned),
    )


def type_beside_name(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Moves the type of an attribute from a line of its own behind its name."""
    moved: list[str] = []
    head = 0
    for line in lines:
        if line.startswith(".. attribute::"):
            head = len(moved)
        if line.startswith("   :type: "):
            moved.insert(head + 1, DOTTED.sub(r"~\1", line))
        else:
            moved.append(line)
    lines[:] = moved


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects them; `type_beside_name` after napoleon has made attributes."""
    app.connect("builder-inited", keep_source_annotations)
    app.connect("autodoc-process-signature", names_in_unions)
    app.connect("autodoc-process-docstring", type_beside_name, priority=900)
    app.config.autodoc_type_aliases = {name: name for name in TYPES}
    return {"parallel_read_safe": True, "parallel_write_safe": True}
