"""`import jaxzero` does nothing but define names."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import jaxzero

PUBLIC = {
    "CUSTOM_CALLS",
    "DeviceBytes",
    "GradientTransformation",
    "Layout",
    "LossScale",
    "LossScaleState",
    "MemoryEstimate",
    "Metrics",
    "ReducePlan",
    "Policy",
    "Stats",
    "TrainState",
    "Zero3",
    "all_finite",
    "apply_layers",
    "clip_by_global_norm",
    "estimate_memory",
    "gather_params",
    "gathered",
    "global_norm",
    "make_layout",
    "make_plan",
    "register",
    "shard_grads",
    "shard_params",
    "unshard_params",
    "zero3",
}


def run(program: str, **environment: str) -> str:
    """Runs a program in a fresh interpreter, away from the sources."""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_public_names():
    found = {name for name in vars(jaxzero) if not name.startswith("_")}
    modules = {"distributed"}  # bound by whoever imports it
    assert found - modules == PUBLIC
    for name in PUBLIC - {"CUSTOM_CALLS"}:
        assert getattr(jaxzero, name).__doc__


def test_version_is_that_of_the_installed_package():
    assert jaxzero.__version__ == version("jaxzero")


def test_import_loads_neither_native_code_nor_optional_packages():
    loaded = run(
        "import sys, jaxzero\n"
        "ours = ('_cpu', '_cuda', '_cli', 'distributed')\n"
        "unwanted = ('optax', 'matplotlib', 'tqdm', *('jaxzero.' + n for n in ours))\n"
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    assert loaded == "[]"


def test_import_and_planning_touch_no_device():
    """JAX refuses to change the number of devices once a backend has started."""
    program = (
        "import jax, jaxzero\n"
        "tree = {'w': jax.ShapeDtypeStruct((8, 3), 'float32')}\n"
        "assert jaxzero.make_plan(tree, 4).num_collectives == 1\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(len(jax.devices()))"
    )
    assert run(program, XLA_FLAGS="") == "3"


@pytest.mark.parametrize(
    "order",
    ["import jaxzero, jax; jax.devices()", "import jax; jax.devices(); import jaxzero"],
    ids=["before_devices", "after_devices"],
)
def test_import_works_before_and_after_the_backend_starts(order):
    program = (
        f"{order}\n"
        "import numpy as np\n"
        "mesh = jax.make_mesh((2,), ('data',))\n"
        "sharded = jaxzero.shard_params({'w': np.ones(4, np.float32)}, mesh, 'data')\n"
        "print(len(jax.devices()), *sharded['w'].sharding.spec)"
    )
    flags = "--xla_force_host_platform_device_count=2"
    assert run(program, XLA_FLAGS=flags) == "2 data"


def test_source_folder_that_was_never_installed_can_be_imported():
    program = (
        "from importlib import metadata\n"
        "def version(name):\n"
        "    raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import jaxzero\n"
        "print(jaxzero.__version__)"
    )
    assert run(program) == "0+unknown"


def test_import_takes_under_300_ms_on_top_of_jax():
    """Of the processor: on a busy machine, waiting for one says nothing of ours."""
    program = (
        "import time, jax\n"
        "start = time.process_time()\n"
        "import jaxzero\n"
        "print(time.process_time() - start)"
    )
    assert min(float(run(program)) for _ in range(3)) < 0.3


def test_import_reads_no_environment_of_ours():
    read = run(
        "import os\n"
        "class Watched(type(os.environ)):\n"
        "    seen = []\n"
        "    def __getitem__(self, key):\n"
        "        self.seen.append(key)\n"
        "        return super().__getitem__(key)\n"
        "import jax\n"
        "os.environ.__class__ = Watched\n"
        "import jaxzero\n"
        "print([key for key in Watched.seen if 'JAXZERO' in key])"
    )
    assert read == "[]"
