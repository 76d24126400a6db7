"""The programs of `benchmarks/` find what they share with `bench`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("name", ["cpu", "gpu", "overlap"])
def test_program_starts(name: str) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--help"],
        # They import each other, so their folder must stay on the path.
        env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--save" in done.stdout
