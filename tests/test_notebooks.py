"""The notebooks are committed as they ran, and still run.

`STORE_NOTEBOOKS=1 pytest tests/test_notebooks.py` runs them and keeps the new outputs.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MOST_BYTES = 400_000
MOST_BYTES_OF_PICTURE = 80_000
LONGEST_SECONDS = 180  # of one cell

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: Any) -> str:
    return "".join(cell["source"])


def text(cell: Any) -> str:
    """Returns what a cell printed and the text of its value."""
    parts = []
    for output in cell["outputs"]:
        parts.append(output.get("text", ""))
        if "image/png" not in output.get("data", {}):
            parts.append(output.get("data", {}).get("text/plain", ""))
    return "".join("".join(part) for part in parts)


def has_picture(cell: Any) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell["outputs"])


def pictures(notebook: Any) -> Iterator[str]:
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            yield from filter(None, [output.get("data", {}).get("image/png")])


def wrote_to_stderr(cell: Any) -> bool:
    return any(output.get("name") == "stderr" for output in cell["outputs"])


def test_there_are_five() -> None:
    assert len(NOTEBOOKS) == 5


@each
def test_cells_have_names_that_stay(path: Path) -> None:
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert names == [f"cell-{number:02}" for number in range(len(names))]


@each
def test_outputs_are_those_of_one_run_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(read(path))
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell["outputs"]:
            assert output["output_type"] != "error", source(cell)
        assert not wrote_to_stderr(cell), source(cell)


@each
def test_it_says_nothing_of_the_machine_that_ran_it(path: Path) -> None:
    notebook = read(path)
    assert path.stat().st_size < MOST_BYTES
    for picture in pictures(notebook):
        assert len(picture) < MOST_BYTES_OF_PICTURE
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert "execution" not in cell["metadata"]
        shown = source(cell) + (text(cell) if cell["cell_type"] == "code" else "")
        assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|work|var)/", shown), shown


@each
def test_every_picture_is_explained(path: Path) -> None:
    cells = read(path)["cells"]
    drawn = [
        i
        for i, cell in enumerate(cells)
        if cell["cell_type"] == "code" and has_picture(cell)
    ]
    assert drawn
    for i in drawn:
        assert source(cells[i + 1]).startswith("*Figure"), source(cells[i])


@each
def test_its_results_are_checked(path: Path) -> None:
    assert any("assert" in source(cell) for cell in code_cells(read(path)))


@each
def test_links_lead_somewhere(path: Path) -> None:
    prose = "\n".join(
        source(cell) for cell in read(path)["cells"] if cell["cell_type"] == "markdown"
    )
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    assert links
    for link in links:
        assert (path.parent / link).exists(), link


@pytest.mark.slow
@each
def test_it_runs_and_prints_what_it_printed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("XLA_FLAGS", "MPLBACKEND"):  # the kernel inherits them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IPYTHONDIR", os.fspath(tmp_path / "ipython"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    shutil.copy(path, tmp_path)
    notebook = nbformat.read(tmp_path / path.name, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=LONGEST_SECONDS,
        record_timing=False,
        resources={"metadata": {"path": os.fspath(tmp_path)}},
    ).execute()
    if os.environ.get("STORE_NOTEBOOKS"):
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        return
    for before, now in zip(code_cells(read(path)), code_cells(notebook), strict=True):
        assert not wrote_to_stderr(now), text(now)
        if "varies" not in before["metadata"].get("tags", []):
            assert text(now) == text(before), source(before)
            assert has_picture(now) == has_picture(before)
