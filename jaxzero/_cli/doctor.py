"""``python -m jaxzero doctor``: what is installed, what works, how to fix the rest."""

import argparse
import collections
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import _ffi
from jaxzero._cli.arguments import Parser
from jaxzero._transports import choose

DESCRIPTION = """\
Reports versions, devices, native modules, libnccl and the transport that is used, then
reduce-scatters and gathers a small tree over all local devices and compares the result
with NumPy. Below each problem stands what to do about it.
"""

EPILOG = """\
exit codes: 0 all is well; 1 a problem or a failed self-test; 2 wrong arguments
"""

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
SHOWN_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS")
VARIABLES_IF_SET = re.compile(r"NCCL_\w+|CUDA_VISIBLE_DEVICES|JAXZERO_DEBUG")
HOPPER = 9.0
LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler"
MAX_ERROR_LENGTH = 400

REINSTALL = (
    "reinstall jaxzero (pip install --force-reinstall --no-deps jaxzero); in a folder"
    " with its source, use pip install -e . (see BUILD.md)"
)
BUILD_CUDA = (
    "install nvcc 13 and nvidia-nccl-cu13, then build with JAXZERO_CUDA=on"
    " (see BUILD.md)"
)
INSTALL_PLUGIN = "pip install 'jax[cuda13]'"
CHECK_GPU = (
    "read what JAX printed about its CUDA plugin; see that nvidia-smi lists the GPU,"
    " that CUDA_VISIBLE_DEVICES does not hide it, and that jax, jaxlib and the plugin"
    " have one version"
)
CHECK_PLATFORMS = "unset JAX_PLATFORMS, or install the JAX plugin for the platform"
ONE_LIBNCCL = (
    "leave one copy, that of JAX's CUDA plugin: take the others out of LD_LIBRARY_PATH"
    " and LD_PRELOAD, and import no other package that brings its own"
)
AFTER_CUDA_FAILURE = (
    "set NCCL_DEBUG=INFO and run this again; until it passes, use"
    " Policy(transport='xla')"
)
REPORT = "please report this whole output, together with how jaxzero was installed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of the report; with a fix, it is a problem."""

    key: str
    value: str
    fix: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that JAX sees here, and whether there is an NVIDIA GPU at all."""

    devices: tuple[Any, ...]
    error: str | None
    has_gpu: bool

    @property
    def cuda_devices(self) -> tuple[Any, ...]:
        """The devices that the CUDA module serves."""
        return tuple(filter(_is_cuda, self.devices))


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(
        prog="python -m jaxzero doctor",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    facts = []
    for fact in examine():
        facts.append(fact)
        if not options.json:
            # At once: a later check may take long, or the process with it.
            print(_text(fact), flush=True)
    if options.json:
        print(json.dumps(_summary(facts)))
    return int(any(fact.fix for fact in facts))


def examine() -> Iterator[Fact]:
    """Makes every check; none of them can keep the others from being made."""
    yield from _guarded("versions", _versions)
    machine = _machine()
    yield from _guarded("CUDA plugin", _plugin, machine)
    yield from _guarded("devices", _devices, machine)
    yield from _guarded("CPU module", _cpu_module)
    yield from _guarded("CUDA module", _cuda_module, machine)
    yield from _guarded("transport", _transport)
    yield from _guarded("environment", _environment)
    yield from _guarded("latency hiding scheduler", _latency_hiding, machine)
    # XLA loads libnccl for its first collective, which is this one.
    tested = list(_guarded("self-test", _self_test, machine))
    yield from _guarded("libnccl", _libnccl, machine)
    yield from tested


def _guarded(
    key: str, check: Callable[..., Iterable[Fact]], *arguments: Any
) -> Iterator[Fact]:
    try:
        yield from check(*arguments)
    except Exception as error:
        yield Fact(key=key, value=_one_line(error), fix=REPORT)


def _text(fact: Fact) -> str:
    line = f"{fact.key}: {fact.value}"
    return line if fact.fix is None else f"{line}\n  fix: {fact.fix}"


def _summary(facts: Sequence[Fact]) -> dict[str, Any]:
    problems = [dataclasses.asdict(fact) for fact in facts if fact.fix is not None]
    return {
        "ok": not problems,
        "facts": {fact.key: fact.value for fact in facts},
        "problems": problems,
    }


def _one_line(error: Exception) -> str:
    # Not every error has a text.
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[:MAX_ERROR_LENGTH]}..."


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Fact]:
    for package in ("jaxzero", "jax", "jaxlib"):
        yield Fact(key=package, value=_version(package) or "not installed as a package")
    yield Fact(key="Python", value=platform.python_version())
    yield Fact(key="NumPy", value=np.__version__)


def _machine() -> Machine:
    devices: tuple[Any, ...] = ()
    error = None
    try:
        devices = tuple(jax.local_devices())
    except Exception as caught:
        error = _one_line(caught)
    return Machine(
        devices=devices,
        error=error,
        has_gpu=any(map(_is_cuda, devices)) or _has_nvidia_driver(),
    )


def _is_cuda(device: Any) -> bool:
    # AMD's GPUs have the same platform name.
    version = str(device.client.platform_version).lower()
    return device.platform == "gpu" and "rocm" not in version


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia").exists() or bool(shutil.which("nvidia-smi"))


def _installed_plugins() -> list[str]:
    found = ((plugin, _version(plugin)) for plugin in PLUGINS)
    return [f"{plugin} {version}" for plugin, version in found if version]


def _plugin(machine: Machine) -> Iterator[Fact]:
    plugins = ", ".join(_installed_plugins())
    # Devices are proof enough: the plugin may come without package metadata.
    is_missing = not plugins and machine.has_gpu and not machine.cuda_devices
    yield Fact(
        key="CUDA plugin",
        value=plugins or "not installed",
        fix=INSTALL_PLUGIN if is_missing else None,
    )


def _devices(machine: Machine) -> Iterator[Fact]:
    if machine.error is not None:
        value = f"JAX cannot list them: {machine.error}"
        yield Fact(key="devices", value=value, fix=CHECK_PLATFORMS)
        return
    platforms = sorted({device.platform for device in machine.devices})
    yield Fact(key="platform", value=", ".join(platforms))
    names = collections.Counter(map(_device_name, machine.devices))
    value = ", ".join(f"{count} x {name}" for name, count in names.items())
    fix = None
    if machine.has_gpu and not machine.cuda_devices:
        if jax.config.jax_platforms:
            value += " (JAX_PLATFORMS leaves out the NVIDIA GPU)"
        else:
            value += " (JAX does not see the NVIDIA GPU)"
            # Without a plugin that is its consequence, and no second problem.
            fix = CHECK_GPU if _installed_plugins() else None
    yield Fact(key="devices", value=value, fix=fix)


def _device_name(device: Any) -> str:
    capability = getattr(device, "compute_capability", None)
    name = str(device.device_kind)
    return f"{name} (compute capability {capability})" if capability else name


def _cpu_module() -> Iterator[Fact]:
    try:
        module = importlib.import_module("jaxzero._cpu")
    except ImportError as error:
        yield Fact(key="CPU module", value=_one_line(error), fix=REINSTALL)
        return
    yield Fact(key="CPU module", value=f"ok, {module.__file__}")


def _cuda_module(machine: Machine) -> Iterator[Fact]:
    key = "CUDA module"
    obstacle = _ffi.cuda_obstacle()
    if importlib.util.find_spec("jaxzero._cuda") is None:
        fix = BUILD_CUDA if machine.has_gpu else None
        yield Fact(key=key, value=f"none: {obstacle}", fix=fix)
        return
    try:
        module = importlib.import_module("jaxzero._cuda")
    except ImportError as error:
        yield Fact(key=key, value=_one_line(error), fix=BUILD_CUDA)
        return
    cuda = module.cuda_version
    unused = "" if obstacle is None else f"; unused: {obstacle}"
    yield Fact(
        key=key,
        value=f"ok, {module.__file__}, built with CUDA {cuda // 1000}"
        f".{cuda % 1000 // 10} and the headers of NCCL"
        f" {_nccl_version(module.nccl_header_version)}"
        f" for architectures {module.architectures}{unused}",
    )


def _transport() -> Iterator[Fact]:
    choice = choose(jaxzero.Policy())
    names = " or ".join(choice.names)
    yield Fact(key="transport", value=f"{names} ({choice.reason})")


def _environment() -> Iterator[Fact]:
    further = sorted(filter(VARIABLES_IF_SET.fullmatch, os.environ))
    for name in (*SHOWN_VARIABLES, *further):
        # Joined: a value may hold line breaks.
        value = " ".join(os.environ.get(name, "").split())
        yield Fact(key=name, value=value or "not set")


def _latency_hiding(machine: Machine) -> Iterator[Fact]:
    if not any(_is_before_hopper(device) for device in machine.cuda_devices):
        return
    value = (
        f"off by default on GPUs before Hopper; XLA_FLAGS={LATENCY_HIDING}=true also"
        " puts XLA's own collectives on the stream of jaxzero's"
    )
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, setting = flag.partition("=")
        if name == LATENCY_HIDING:
            is_on = setting.lower() in ("", "1", "true")
            value = "on (XLA_FLAGS)" if is_on else "off (XLA_FLAGS)"
    yield Fact(key="latency hiding scheduler", value=value)


def _is_before_hopper(device: Any) -> bool:
    return float(getattr(device, "compute_capability", HOPPER)) < HOPPER


def _libnccl(machine: Machine) -> Iterator[Fact]:
    count = len(machine.cuda_devices)
    if count == 0:
        return
    key = "libnccl"
    copies = _mapped_libnccl(Path("/proc/self/maps").read_text())
    if copies:
        value = ", ".join(f"{_loaded_version(path)} at {path}" for path in copies)
        fix = None if len(copies) == 1 else ONE_LIBNCCL
        yield Fact(key=key, value=value, fix=fix)
    elif count == 1:
        yield Fact(key=key, value="not loaded (one device needs none)")
    else:
        yield Fact(key=key, value="not loaded by XLA", fix=INSTALL_PLUGIN)


def _mapped_libnccl(maps: str) -> list[str]:
    """Returns the copies of libnccl in a process's memory map."""
    # address, permissions, offset, device, inode, and the path if there is one
    paths = {path for line in maps.splitlines() for path in line.split(maxsplit=5)[5:]}
    name = re.compile(r"libnccl\.so[.\d]*")
    return sorted(path for path in paths if name.fullmatch(path.rpartition("/")[2]))


def _loaded_version(path: str) -> str:
    """Asks the very copy that is loaded, and never loads one."""
    version = ctypes.c_int()
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    if library.ncclGetVersion(ctypes.byref(version)):
        return "unknown version"
    return _nccl_version(version.value)


def _nccl_version(code: int) -> str:
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _self_test(machine: Machine) -> Iterator[Fact]:
    key = "self-test"
    if not machine.devices:
        yield Fact(key=key, value="not run: JAX has no devices", fix=CHECK_PLATFORMS)
        return
    try:
        difference = _difference(machine.devices)
    except Exception as error:
        fix = AFTER_CUDA_FAILURE if machine.cuda_devices else REINSTALL
        yield Fact(key=key, value=_one_line(error), fix=fix)
        return
    yield Fact(key=key, value=difference or "ok", fix=REPORT if difference else None)


def _difference(devices: Sequence[Any]) -> str | None:
    """Sums, shards and gathers a tree; returns how it differs from NumPy's sum."""
    ranks = len(devices)
    # One leaf that is cut by rows, and one that is cut flat with padding.
    shapes = {"rows": (2 * ranks, 3), "flat": (2 * ranks + 1,)}
    dtypes = {"rows": jax.numpy.bfloat16, "flat": jax.numpy.float32}
    random = np.random.default_rng(0)
    # Small whole numbers: their sums are exact in any order.
    grads = {
        name: random.integers(-2, 3, (ranks, *shape)).astype(dtypes[name])
        for name, shape in shapes.items()
    }
    like = {
        name: jax.ShapeDtypeStruct(shape, dtypes[name])
        for name, shape in shapes.items()
    }
    mesh = Mesh(np.array(devices), ("rank",))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("rank"), out_specs=P("rank")
    )
    def step(grads: Any) -> tuple[Any, Any]:
        local = jax.tree.map(lambda leaf: leaf[0], grads)
        shards = jaxzero.shard_grads(local, "rank", policy=jaxzero.Policy(op="sum"))
        full = jaxzero.gather_params(shards, like, "rank")
        return shards, jax.tree.map(lambda leaf: leaf[None], full)

    shards, full = step(jax.device_put(grads, NamedSharding(mesh, P("rank"))))
    for name in shapes:
        total = grads[name].astype(np.float64).sum(0)
        found = np.asarray(shards[name], np.float64).ravel()
        expected = np.pad(total.ravel(), (0, found.size - total.size))
        wrong = np.count_nonzero(found != expected)
        if wrong:
            return f"reduce-scatter: {wrong} of {found.size} elements differ in {name}"
        wrong = np.count_nonzero(np.asarray(full[name], np.float64) != total)
        if wrong:
            return f"all-gather: {wrong} of {full[name].size} elements differ in {name}"
    return None
