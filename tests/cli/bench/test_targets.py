"""Which targets made-up measurements meet."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]
WAYS = ("jaxzero", "jaxzero, float32 sums", "per leaf", "one group", "concatenated")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `benchmarks/targets.py`."""
    folder = Path(__file__).parents[3] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    import targets

    return targets


def measured(tree: str, *ms: float, of_flat: float = 1.0, mb: float = 500) -> list[Row]:
    """Returns rows of `bandwidth.py` with times in the order of WAYS."""
    return [
        {
            "tree": tree,
            "MB": mb,
            "ranks": 8,
            "wire": "bfloat16",
            "into": "float32",
            "how": how,
            "ms": time,
            "GB/s": 100 / time,
            "of flat": of_flat,
        }
        for how, time in zip(WAYS, ms, strict=True)
    ]


@pytest.mark.parametrize(
    ("rows", "misses"),
    [
        (measured("gpt2", 1, 2, 9, 9, 1.4), "-"),
        (measured("gpt2", 1, 2, 9, 1.2, 1.4), "1.3 x native"),
        (measured("llama", 1, 2, 1.01, 9, 9), "-"),
        (measured("llama", 1, 2, 9, 0.99, 9), "1.0 x native"),
        (measured("llama", 1, 2, 9, 9, 9, of_flat=0.94), "0.95 of flat"),
        (measured("llama", 1, 2, 9, 9, 9, of_flat=0.94, mb=256), "-"),
        (
            measured("gpt2", 1, 2, 9, 9, 1.2, of_flat=0.5),
            "0.95 of flat, 1.3 x native",
        ),
    ],
    ids=[
        "all-met",
        "grouped-is-faster",
        "not-slower",
        "slower",
        "below-flat",
        "not-large",
        "both",
    ],
)
def test_misses(program: Any, rows: list[Row], misses: str) -> None:
    (found,) = program.targets(rows, [])
    assert found["misses"] == misses


def test_ours_is_compared_with_the_fastest_native_and_with_fsdp2(program: Any) -> None:
    fsdp2 = {
        "tree": "gpt2",
        "wire": "bfloat16",
        "into": "float32",
        "how": "FSDP2",
        "ms": 3,
    }
    (row,) = program.targets(measured("gpt2", 2, 4, 9, 5, 7), [fsdp2])
    assert row["GB/s"] == 50
    assert row["float32 sums"] == 25
    assert (row["x native"], row["native"]) == (2.5, "one group")
    assert row["x FSDP2"] == 1.5


def test_the_verdict_counts_what_misses_and_what_is_not_there(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = measured("gpt2", 1, 2, 9, 9, 9) + measured("llama", 1, 2, 9, 9, 0.5)
    report = {"environment": {"commit": "abc"}, "rows": rows}
    (tmp_path / "bandwidth_8.json").write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["targets.py", str(tmp_path)])
    program.main()
    printed = capsys.readouterr().out
    assert "8 ranks: 1 of 2 rows miss a target; 10 were not measured" in printed
    saved = json.loads((tmp_path / "targets_8.json").read_text())
    assert saved["environment"] == report["environment"]
    assert [row["misses"] for row in saved["rows"]] == ["-", "1.0 x native"]
    assert saved["rows"][0]["x FSDP2"] is None


def test_a_folder_without_measurements_is_an_error(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["targets.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="no bandwidth_"):
        program.main()
