"""H200s to compile for, which need not be there."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.experimental import topologies
from jax.stages import Compiled, Lowered

from jaxzero import _ffi

# Dumped on the card: compiling for it needs neither the card nor a driver.
TARGET = Path(__file__).with_name("h200.txtpb").read_text()


def skip_unless_compiler() -> None:
    """Skips a module of tests where there is no CUDA module or no plugin."""
    if importlib.util.find_spec("jax_plugins") is None or _ffi.cuda_obstacle():
        pytest.skip(
            f"compiling for CUDA: {_ffi.cuda_obstacle() or 'no plugin'}",
            allow_module_level=True,
        )


def devices(ranks: int) -> Any:
    """Returns an array of described devices."""
    described = topologies.get_topology_desc(
        "", "cuda", target_config=TARGET, topology=f"1x{ranks}x1"
    )
    return np.array(described.devices)


def compile_lowered(lowered: Lowered, **options: Any) -> Compiled:
    """Compiles as users do, whatever the flags of the tests for CPU programs."""
    return lowered.compile(
        compiler_options={
            "xla_backend_optimization_level": 3,
            "xla_llvm_disable_expensive_passes": False,
            "xla_gpu_autotune_level": 0,  # It measures, on a card.
            **options,
        }
    )
