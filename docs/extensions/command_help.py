"""The directive `command-help`: what each command prints when asked for help.

One section for each command of `python -m jaxzero`, made by its own parser, so that
the page cannot differ from the program.
"""

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import jaxzero.__main__

COLUMNS = "80"

Main = Callable[[Sequence[str]], int]


class CommandHelp(Directive):
    """Adds a section for the program itself and one for each of its commands."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Returns the sections."""
        program = jaxzero.__main__.main
        return [
            self._section("python -m jaxzero", program),
            *(
                self._section(f"python -m jaxzero {name}", program, name)
                for name in jaxzero.__main__.COMMANDS
            ),
        ]

    def _section(self, title: str, main: Main, *arguments: str) -> nodes.section:
        text = help_text(main, *arguments)
        section = nodes.section("", nodes.title(title, title))
        section += nodes.literal_block(text, text, language="text")
        section["names"].append(nodes.fully_normalize_name(title))
        self.state.document.note_implicit_target(section, section)
        return section


def help_text(main: Main, *arguments: str) -> str:
    """Returns what a command prints when asked for help, on a plain terminal.

    Args:
      main: the command; it takes arguments and returns or raises an exit code.
      arguments: what comes before ``--help``.

    Raises:
      RuntimeError: if it fails or prints nothing.
    """
    plain = {"COLUMNS": COLUMNS, "NO_COLOR": "1"}
    before = {name: os.environ.get(name) for name in plain}
    os.environ.update(plain)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                status: Any = main([*arguments, "--help"])
            except SystemExit as ended:
                status = ended.code
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    text = printed.getvalue().rstrip()
    if status or not text:
        raise RuntimeError(f"{arguments} --help ended with {status!r}: {text!r}")
    return text


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
