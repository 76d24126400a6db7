"""What a native module shows to other libraries of the process."""

import importlib.util
import shutil
import subprocess

import pytest


@pytest.mark.parametrize("module", ["_cpu", "_cuda"])
def test_only_the_entry_of_the_module_is_visible(module: str) -> None:
    """Not the C++ library's symbols, which could replace those of another copy."""
    found = importlib.util.find_spec(f"jaxzero.{module}")
    nm = shutil.which("nm")
    if found is None or found.origin is None or nm is None:
        pytest.skip(f"needs nm, and jaxzero.{module}")
    shown = subprocess.run(
        [nm, "-D", "--defined-only", found.origin],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split()[-1] for line in shown.stdout.splitlines()]
    assert names == [f"PyInit_{module}"]
