"""How Sphinx makes the reference: python -m sphinx -W -b html docs build/docs."""

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

import jaxzero

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "jaxzero"
version = release = jaxzero.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "command_help",
    "public_names",
    "signatures",
]

# What stands in single backticks is code, and a link where it names something here.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r"(?!jaxzero\.).*"),
    ("py:(class|exc)", r"(?!jaxzero\.).*|jaxzero\._.*"),  # those of other packages
]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

myst_heading_anchors = 2  # links to parts of a page
nb_execution_mode = "off"  # notebooks are committed with their outputs

html_theme = "furo"
html_title = f"{project} {version}"
html_domain_indices = False
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

# project/ has the files of the repository's root under their names, so that links
# between them hold.
_HERE = Path(__file__).parent
shutil.copytree(
    _HERE.parent / "notebooks", _HERE / "project/notebooks", dirs_exist_ok=True
)


def _link_to_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes links to docs/ hold, which is no folder of project/."""
    if page.startswith("project/notebooks/"):
        source[0] = source[0].replace("](../docs/", "](../../")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _link_to_pages)
