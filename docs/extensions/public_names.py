"""Shows objects under their public names, wherever they are defined."""

from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import jaxzero


def public_target(target: str) -> str | None:
    """Returns the public name of what is defined in a private module.

    Args:
      target: such as ``jaxzero._policy.Policy``.

    Returns:
      Such as ``jaxzero.Policy``; None where there is no public name.
    """
    module, _, name = target.rpartition(".")
    if module.startswith("jaxzero._") and hasattr(jaxzero, name):
        return f"jaxzero.{name}"
    return None


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
