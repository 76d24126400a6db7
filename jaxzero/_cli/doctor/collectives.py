"""`doctor` on XLA's collectives extension, which lends us its communicators."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxzero._cli.doctor.fact import CHECK_DEVICE, Fact
from jaxzero._cli.doctor.limit import TimeLimit, TimeLimitError

PROBE = "jaxzero_collectives_probe"

UPGRADE = (
    "pip install --upgrade 'jax[cuda13]>=0.11.2', whose jaxlib and plugin have one"
    " version; until then use Policy(transport='xla')"
)
NEWER_JAXZERO = (
    "install a newer jaxzero, or an older jax[cuda13] from 0.11.2 on; until then use"
    " Policy(transport='xla')"
)


def collectives(devices: Sequence[Any], limit: TimeLimit) -> Iterator[Fact]:
    """Compares what the CUDA module was built with and what the plugin offers."""
    key = "collectives extension"
    try:
        module = importlib.import_module("jaxzero._cuda")
    except ImportError:
        return  # said of the CUDA module
    built = f"built with {_text(module.collectives_version)}"
    if not devices:
        yield Fact(key=key, value=f"{built}; only a CUDA device shows what XLA offers")
        return
    try:
        found, is_supported, *offered = limit.run(lambda step: offer(devices[0], step))
    except TimeLimitError as error:
        yield Fact(key=key, value=f"{built}; {error}", fix=CHECK_DEVICE)
        return
    if not found:
        value = f"{built}; the CUDA plugin offers none"
        yield Fact(key=key, value=value, fix=UPGRADE)
        return
    value = f"{built}; the CUDA plugin offers {_text(offered)}"
    if is_supported:
        yield Fact(key=key, value=value)
        return
    is_newer = tuple(offered) > module.collectives_version
    fix = NEWER_JAXZERO if is_newer else UPGRADE
    yield Fact(key=key, value=f"{value}, which does not fit", fix=fix)


def offer(device: Any, enter_step: Callable[[str], None]) -> list[int]:
    """Returns found, supported, major, minor, as a running handler sees them."""
    enter_step("a first call on the GPU")
    probe = importlib.import_module("jaxzero._cuda").collectives_probe()
    jax.ffi.register_ffi_target(PROBE, probe, platform="CUDA")
    with jax.default_device(device):
        numbers = jax.ffi.ffi_call(PROBE, jax.ShapeDtypeStruct((4,), jnp.int32))()
        return [int(number) for number in np.asarray(numbers)]


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
