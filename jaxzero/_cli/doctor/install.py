"""`doctor` on what is installed: versions, native modules, transport, environment."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator

import numpy as np

import jaxzero
from jaxzero import _ffi
from jaxzero._cli.doctor.fact import REINSTALL, Fact, one_line
from jaxzero._cli.doctor.libnccl import nccl_version
from jaxzero._transports import choose

SHOWN_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS")
VARIABLES_IF_SET = re.compile(r"NCCL_\w+|CUDA_VISIBLE_DEVICES|JAXZERO_DEBUG")

BUILD_CUDA = (
    "install nvcc 13 and nvidia-nccl-cu13, then build with JAXZERO_CUDA=on"
    " (see BUILD.md)"
)


def versions() -> Iterator[Fact]:
    for package in ("jaxzero", "jax", "jaxlib"):
        value = package_version(package) or "not installed as a package"
        yield Fact(key=package, value=value)
    yield Fact(key="Python", value=platform.python_version())
    yield Fact(key="NumPy", value=np.__version__)


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_module() -> Iterator[Fact]:
    try:
        module = importlib.import_module("jaxzero._cpu")
    except ImportError as error:
        yield Fact(key="CPU module", value=one_line(error), fix=REINSTALL)
        return
    yield Fact(key="CPU module", value=f"ok, {module.__file__}")


def cuda_module(has_gpu: bool) -> Iterator[Fact]:
    key = "CUDA module"
    obstacle = _ffi.cuda_obstacle()
    if importlib.util.find_spec("jaxzero._cuda") is None:
        fix = BUILD_CUDA if has_gpu else None
        yield Fact(key=key, value=f"none: {obstacle}", fix=fix)
        return
    try:
        module = importlib.import_module("jaxzero._cuda")
    except ImportError as error:
        yield Fact(key=key, value=one_line(error), fix=BUILD_CUDA)
        return
    cuda = module.cuda_version
    unused = "" if obstacle is None else f"; unused: {obstacle}"
    yield Fact(
        key=key,
        value=f"ok, {module.__file__}, built with CUDA {cuda // 1000}"
        f".{cuda % 1000 // 10} and the headers of NCCL"
        f" {nccl_version(module.nccl_header_version)}"
        f" for architectures {module.architectures}{unused}",
    )


def transport() -> Iterator[Fact]:
    choice = choose(jaxzero.Policy())
    names = " or ".join(choice.names)
    yield Fact(key="transport", value=f"{names} ({choice.reason})")


def environment() -> Iterator[Fact]:
    further = sorted(filter(VARIABLES_IF_SET.fullmatch, os.environ))
    for name in (*SHOWN_VARIABLES, *further):
        # Joined: a value may hold line breaks.
        value = " ".join(os.environ.get(name, "").split())
        yield Fact(key=name, value=value or "not set")
