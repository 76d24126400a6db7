"""Links names to what they mean: private paths, `policy.op`, `Stats(...)`."""

from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import jaxzero


def public_target(target: str) -> str | None:
    """Returns the public name that a text means.

    Args:
      target: a path as annotations have it (``jaxzero._policy.Policy``), a call
        (``zero3(..., layers=...)``), or an attribute of an object that is called
        like its class (``policy.op``).

    Returns:
      Such as ``jaxzero.Policy``; None where there is no public name.
    """
    path = target.partition("(")[0]
    module, _, name = path.rpartition(".")
    if module.startswith("jaxzero._"):
        path = name
    head, *rest = path.split(".")
    head = head.title() if rest else head
    return ".".join(["jaxzero", head, *rest]) if hasattr(jaxzero, head) else None


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.reference | None:
    """Links a private name, as annotations have them, to its public description."""
    target = public_target(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or target is None:
        return None
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", target, node, text
    )


def skip(
    app: Sphinx, what: str, name: str, member: Any, skipped: bool, options: Any
) -> bool | None:
    """Leaves out the fields of named tuples, which the class describes itself."""
    return True if type(member).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects both."""
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
