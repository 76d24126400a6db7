"""Tests that every rank of a `jax.distributed` job runs alike.

Started with `python -m jaxzero launch -n 4 -- pytest tests/multihost` on one
machine or `srun pytest tests/multihost` on a cluster; otherwise all are skipped. Each
rank runs every test, in the same order, and checks what its own devices hold.

Leaves are small on purpose: between processes, XLA:CPU's reduce-scatter may return
wrong tails for leaves of several MiB. See: https://github.com/jax-ml/jax/issues/40830
"""

from collections.abc import Iterator

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
    """Ends a Slurm task whose tests failed without waiting for the others.

    The launcher sees to that itself.
    """
    if started_by() == "slurm":
        exit_on_failure(config.stash.get(_STATUS, 0))


@pytest.fixture(scope="session", autouse=True)
def joined() -> None:
    """Joins the other ranks, or skips."""
    if started_by() is None:
        pytest.skip("needs several processes: python -m jaxzero launch, or srun")
    initialize()


@pytest.fixture(scope="session", autouse=True)
def exact_products() -> Iterator[None]:
    """GPUs would round the operands of products to TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def standard_promotion() -> Iterator[None]:
    """Lets optimizers mix dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def several(joined: None) -> None:
    """Skips what needs processes that differ."""
    if jax.process_count() == 1:
        pytest.skip("needs several processes")


@pytest.fixture(scope="session")
def spmd(joined: None) -> Spmd:
    """All devices along the axis "data"."""
    return Spmd((jax.device_count(),), ("data",))


@pytest.fixture(scope="session")
def hybrid(joined: None) -> Spmd:
    """All devices along the axes "replica", of size 2, and "data"."""
    if jax.device_count() % 2:
        pytest.skip(f"needs an even number of devices, not {jax.device_count()}")
    return Spmd((2, jax.device_count() // 2), ("replica", "data"))
