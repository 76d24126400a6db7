"""`doctor` on libnccl: which copies this process has loaded."""

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

from jaxzero._cli.doctor.fact import INSTALL_PLUGIN, Fact

ONE_LIBNCCL = (
    "leave one copy, that of JAX's CUDA plugin: take the others out of LD_LIBRARY_PATH"
    " and LD_PRELOAD, and import no other package that brings its own"
)


def libnccl(num_gpus: int) -> Iterator[Fact]:
    if num_gpus == 0:
        return
    key = "libnccl"
    copies = mapped_libnccl(Path("/proc/self/maps").read_text())
    if copies:
        value = ", ".join(f"{loaded_version(path)} at {path}" for path in copies)
        fix = None if len(copies) == 1 else ONE_LIBNCCL
        yield Fact(key=key, value=value, fix=fix)
    elif num_gpus == 1:
        yield Fact(key=key, value="not loaded (one device needs none)")
    else:
        yield Fact(key=key, value="not loaded by XLA", fix=INSTALL_PLUGIN)


def mapped_libnccl(maps: str) -> list[str]:
    """Returns the copies of libnccl in a process's memory map."""
    # address, permissions, offset, device, inode, and the path if there is one
    paths = {path for line in maps.splitlines() for path in line.split(maxsplit=5)[5:]}
    name = re.compile(r"libnccl\.so[.\d]*")
    return sorted(path for path in paths if name.fullmatch(path.rpartition("/")[2]))


def loaded_version(path: str) -> str:
    """Asks the very copy that is loaded, and never loads one."""
    version = ctypes.c_int()
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    if library.ncclGetVersion(ctypes.byref(version)):
        return "unknown version"
    return nccl_version(version.value)


def nccl_version(code: int) -> str:
    """Returns "2.32.3" for 23203."""
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"
