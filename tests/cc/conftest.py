import pytest


@pytest.fixture(autouse=True)
def _x64(x64: None) -> None:
    """64-bit leaves are part of most tests of the native calls."""
