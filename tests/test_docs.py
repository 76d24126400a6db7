"""The documents do what they say."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxzero.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = ["README.md", "BUILD.md", *PAGES]
PYTHON_BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    )
    if not block.startswith("# train.py")  # tests/test_docs_commands.py runs it
]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "jaxzero").rglob("*.py")
    if ">>> " in path.read_text()
)


def run(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_an_example_prints_what_its_comment_says(block: str) -> None:
    promised = re.findall(r"print\(.*\)  # (.*)", block)
    assert promised
    assert run("-c", block).splitlines() == promised


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_a_first_page_has_an_example(name: str) -> None:
    assert any(name in str(block.id) for block in PYTHON_BLOCKS)


def test_the_readme_begins_with_two_lines_of_its_example() -> None:
    readme = (ROOT / "README.md").read_text()
    first = re.findall(r"```\n(.*?)```", readme.partition("```python")[0], re.DOTALL)
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (lines,) = first
    assert len(lines.splitlines()) == 2
    assert all(line in example for line in lines.splitlines())


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module: str) -> None:
    program = (
        "import doctest, importlib;"
        f"r = doctest.testmod(importlib.import_module({module!r}));"
        "assert r.attempted and not r.failed, r"
    )
    run("-c", program)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    scripts = re.findall(r"`(benchmarks/[\w./]+|\.ci/\w+)", text)
    for path in scripts:
        assert (ROOT / path).exists(), path
    for path in links:
        assert ((ROOT / name).parent / path).exists(), path


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    (extras, arguments) = re.findall(
        r"pip install -e '(\.\[test\])' && \.venv/bin/python (.*)", readme
    )[0]
    step = re.search(r"step_test\(\) \{(.*?)\n\}", (ROOT / ".ci/run").read_text(), re.S)
    assert step is not None
    assert f"-e '{extras}'" in step[1]
    assert f'/bin/python" {arguments}' in step[1]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_of_a_document_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for asked in re.findall(r"\.\[([\w,]+)\]", text):
        assert set(asked.split(",")) <= set(extras)
    for module in re.findall(r"python -m (jaxzero[\w.]*)", blocks):
        assert importlib.util.find_spec(module), module
    for command in re.findall(r"python -m jaxzero (\w+)", blocks):
        assert command in COMMANDS
    for path in re.findall(r"pytest (?:-\S+ )*(tests\S*)", blocks):
        assert (ROOT / path).exists(), path


def test_steps_of_ci_that_the_build_guide_names_exist() -> None:
    script = (ROOT / ".ci/run").read_text()
    steps = re.search(r'STEPS="(.*)"', script)
    assert steps is not None
    guide = (ROOT / "BUILD.md").read_text()
    named = re.search(r"`bash \.ci/run (\w+)`((?:,\s+`\w+`)*)", guide)
    assert named is not None
    assert [named[1], *re.findall(r"\w+", named[2])] == steps[1].split()
