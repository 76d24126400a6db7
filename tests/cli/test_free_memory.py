from pathlib import Path

import pytest

from jaxzero._cli import free_memory
from jaxzero._cli.free_memory import free_host_bytes


def test_it_is_found_without_proc_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = free_host_bytes()
    assert free is not None and free > 1 << 20
    monkeypatch.setattr(free_memory, "Path", lambda _: tmp_path / "none")
    other = free_host_bytes()
    assert other is not None and free / 20 < other < 20 * free
