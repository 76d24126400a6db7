"""estimate_memory against what XLA allocates for H200s, compiled without them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformer
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxzero import Policy, _ffi, estimate_memory, zero3

if importlib.util.find_spec("jax_plugins") is None or _ffi.cuda_obstacle():
    pytest.skip(
        f"compiling for CUDA: {_ffi.cuda_obstacle() or 'no plugin'}",
        allow_module_level=True,
    )

H200 = Path(__file__).with_name("h200.txtpb").read_text()
RANKS = 8
BFLOAT16 = Policy(compute_dtype="bfloat16")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    described = topologies.get_topology_desc(
        "", "cuda", target_config=H200, topology=f"1x{RANKS}x1"
    )
    return Mesh(np.array(described.devices), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Policy(bucket_bytes=1 << 20), {}),
        (BFLOAT16, {"accumulate": 2}),
        (Policy(), {"accumulate": 2, "sync": "last"}),
        (BFLOAT16, {"layers": "blocks/*"}),
        (BFLOAT16, {"stacked": "blocks"}),
    ],
    ids=["plain", "accumulate", "kept-full", "layers", "stacked"],
)
def test_within_a_tenth_of_what_xla_allocates(
    mesh: Mesh, policy: Policy, options: Any
) -> None:
    stacked = "stacked" in options
    params = transformer.stacked_shapes() if stacked else transformer.shapes()
    loss = transformer.loss_stacked if stacked else transformer.loss
    optimizer = optax.adamw(1e-3)
    zero = zero3(loss, optimizer, mesh, policy=policy, clip_norm=1.0, **options)
    state = zero.abstract_state(params)
    examples = RANKS * options.get("accumulate", 1)
    batch = jax.ShapeDtypeStruct(
        (examples, transformer.LENGTH), jnp.int32, sharding=zero.batch_sharding
    )
    traced = jax.jit(zero.step, donate_argnums=0).trace(state, batch)
    program = traced.lower(lowering_platforms=("cuda",)).compile(
        compiler_options={"xla_gpu_autotune_level": 0}
    )
    memory = program.memory_analysis()
    sharded = estimate_memory(
        params, RANKS, policy, optimizer=optimizer, **options
    ).sharded
    held = sharded.params + sharded.optimizer
    assert 0 < memory.argument_size_in_bytes - held < 1024
    temp = sharded.total - held
    assert temp == pytest.approx(memory.temp_size_in_bytes, rel=0.1)
