"""Unlinks folders of the repository, which the documents name and have no page."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx


def unlink_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Leaves the text of a link to a folder; a missing file stays a warning."""
    page = Path(app.srcdir, app.env.docname)
    for link in list(doctree.findall(pending_xref)):
        if link["reftype"] == "myst" and (page.parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects it."""
    app.connect("doctree-read", unlink_folders)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
