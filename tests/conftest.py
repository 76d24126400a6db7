"""Eight CPU devices for every test, unless the environment asks for others.

`JAXZERO_TEST_PLATFORM=cuda` runs the tests on GPUs. The processes of a multi-process
run get their devices from whoever started them.
"""

import os

PLATFORM = os.environ.get("JAXZERO_TEST_PLATFORM", "cpu")
MULTI_PROCESS = (
    "JAXZERO_PROCESS_ID" in os.environ
    or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
)

if not MULTI_PROCESS:
    # Both are read when jax is imported or its backend starts, so they come first.
    os.environ.setdefault("JAX_PLATFORMS", PLATFORM)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "")
            + " --xla_force_host_platform_device_count=8"
        ).strip()
    if PLATFORM == "cpu":
        # A third of all time would go into optimizing programs that run once.
        os.environ["XLA_FLAGS"] += (
            " --xla_backend_optimization_level=0"
            " --xla_llvm_disable_expensive_passes=true"
        )

import collections  # noqa: E402
import math  # noqa: E402
import zlib  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

MakeMesh = Callable[..., Mesh]

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all but some rows of a test with the mark `sampled` as slow.

    Which rows are left is arbitrary, so that they do not follow the order of the
    parameters, but always the same.
    """
    tests: dict[tuple[str, int], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            tests[item.nodeid.split("[")[0], mark.args[0]].append(item)
    for (_, count), rows in tests.items():
        rows.sort(key=lambda row: zlib.crc32(row.nodeid.encode()))
        for row in rows[count:]:
            row.add_marker("slow")


@pytest.fixture(scope="session")
def make_mesh() -> MakeMesh:
    """Returns a function `(shape, names="data", kind="auto", order=None) -> Mesh`.

    `names` is a name or a tuple of them, `kind` is "auto" or "explicit", and `order`
    a permutation of the devices. A test that needs more devices than there are is
    skipped.
    """

    def make(
        shape: int | Sequence[int],
        names: str | tuple[str, ...] = "data",
        kind: str = "auto",
        order: Sequence[int] | None = None,
    ) -> Mesh:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        names = (names,) if isinstance(names, str) else names
        needed = math.prod(shape)
        devices = jax.devices()
        if len(devices) < needed:
            pytest.skip(f"needs {needed} devices, {len(devices)} here")
        chosen = [devices[i] for i in (range(needed) if order is None else order)]
        axis_type = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
        return Mesh(
            np.array(chosen).reshape(shape), names, axis_types=(axis_type,) * len(names)
        )

    return make


@pytest.fixture
def mesh8(make_mesh: MakeMesh) -> Mesh:
    """A mesh of 8 devices along the axis "data"."""
    return make_mesh(8)


@pytest.fixture
def x64() -> Iterator[None]:
    """Switches JAX to 64-bit mode for one test."""
    with jax.enable_x64(True):
        yield
