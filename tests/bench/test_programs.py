"""The programs of `benchmarks/` find what they share with `bench`."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["cpu", "gpu", "overlap"])
def test_program_starts(name: str) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--save" in done.stdout
