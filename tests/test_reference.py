"""The pages of docs/ name all that is public, once, and their examples run.

Those of the pages in Markdown run in tests/test_docs.py.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import jaxzero
import jaxzero.distributed
from jaxzero.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst")])
DIRECTIVE = re.compile(r"^\.\. (?:py:data|auto\w+):: ([\w.]+)", re.MULTILINE)
RST_BLOCK = re.compile(
    r"^( *)\.\. code-block:: python\n\n((?:\1   .*\n|\n)+)", re.MULTILINE
)


def public(module: Any) -> list[str]:
    return [
        f"{module.__name__}.{name}"
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]


def described() -> list[str]:
    found = []
    for page in PAGES:
        for name in DIRECTIVE.findall(page.read_text()):
            found.append(name if name.startswith("jaxzero") else f"jaxzero.{name}")
    return found


def python_blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        if page.suffix == ".rst"
        for number, block in enumerate(
            textwrap.dedent(block) for _, block in RST_BLOCK.findall(page.read_text())
        )
    ]


def run(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", public(jaxzero) + public(jaxzero.distributed))
def test_a_public_name_is_described_once(name: str) -> None:
    assert described().count(name) == 1


@pytest.mark.parametrize("name", sorted(set(described())))
def test_a_described_name_exists(name: str) -> None:
    module, _, last = name.rpartition(".")
    if module == "jaxzero" and last == "distributed":
        return
    assert hasattr(importlib.import_module(module), last)


def test_a_described_name_is_public() -> None:
    private = [name for name in described() if "._" in name]
    assert not private


@pytest.mark.parametrize("block", python_blocks())
def test_an_example_prints_what_its_comment_says(block: str) -> None:
    promised = re.findall(r"print\(.*\)  # (.*)", block)
    assert promised
    assert run("-c", block).splitlines() == promised


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_other_code(page: Path) -> None:
    if page.suffix == ".rst":
        text = RST_BLOCK.sub("", page.read_text())
        other = r"code-block|literalinclude|>>>|^(?! *\.\. ).*::$"
        assert not re.search(other, text, re.MULTILINE)
    else:
        kinds = re.findall(r"^ *```(\S+)", page.read_text(), re.MULTILINE)
        assert set(kinds) <= {"python", "sh", "{toctree}", "{include}"}


def test_there_are_examples() -> None:
    assert len(python_blocks()) > 3


def test_every_document_is_a_page() -> None:
    included = set()
    for page in PAGES:
        for path in re.findall(r"```\{include\} (\S+)", page.read_text()):
            included.add((page.parent / path).resolve())
    documents = {*ROOT.glob("*.md"), ROOT / "benchmarks/README.md"}
    assert included == documents


@pytest.mark.slow
def test_the_reference_is_made_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(package)
    doctrees, pages = tmp_path / "doctrees", tmp_path / "html"
    run("-m", "sphinx", "-q", "-W", "-d", f"{doctrees}", "docs", f"{pages}")
    commands = (pages / "commands.html").read_text()
    for command in COMMANDS:
        assert f"usage: python -m jaxzero {command}" in commands
    assert 'href="policy.html#jaxzero.Policy"' in (pages / "step.html").read_text()
