"""Tests of the CUDA module.

Those marked `gpu` need a device. Alone they run on one rank; to run them on several,
also of one GPU:

    python -m jaxzero launch -n 4 --platform cuda -- pytest tests/cuda -m gpu

The others compile for a GPU that need not be there.
"""

import jax
import pytest
from multihost.spmd import Spmd

from jaxzero.distributed import exit_on_failure, initialize, started_by

_STATUS = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Stops a rank at its first failure, because the others wait for it."""
    if started_by():
        config.option.maxfail = 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remembers how the tests went, for `pytest_unconfigure`."""
    session.config.stash[_STATUS] = int(exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends a rank whose tests failed without waiting for the others."""
    if started_by():
        exit_on_failure(config.stash.get(_STATUS, 0))


@pytest.fixture(scope="session")
def gpu() -> None:
    """Joins the other ranks, if any, or skips without a GPU."""
    if started_by():
        initialize()
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU and JAXZERO_TEST_PLATFORM=cuda")


@pytest.fixture(scope="session")
def spmd(gpu: None) -> Spmd:
    """All GPUs along the axis "data"."""
    return Spmd((jax.device_count(),), ("data",))


@pytest.fixture(scope="session")
def hybrid(gpu: None) -> Spmd:
    """All GPUs along the axes "replica", of size 2, and "data"."""
    if jax.device_count() % 2:
        pytest.skip(f"needs an even number of GPUs, not {jax.device_count()}")
    return Spmd((2, jax.device_count() // 2), ("replica", "data"))
