"""estimate_memory against what XLA allocates for H200s, compiled without them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import transformer
from cuda import h200
from jax.sharding import AxisType, Mesh

from jaxzero import Policy, estimate_memory, zero3

h200.skip_unless_compiler()

RANKS = 8
BFLOAT16 = Policy(compute_dtype="bfloat16")
# `gathered` has no other layer beside it.
ALONE = Policy(compute_dtype="bfloat16", overlap=False)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(h200.devices(RANKS), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("loss", "policy", "options"),
    [
        (transformer.loss, Policy(), {"accumulate": 2, "sync": "last"}),
        (transformer.loss, ALONE, {"layers": "blocks/*"}),
        (transformer.loss_stacked, ALONE, {"stacked": "blocks"}),
        (transformer.loss_in_turns, BFLOAT16, {"layers": "blocks/*"}),
        (transformer.loss_in_turns, BFLOAT16, {"stacked": "blocks"}),
        (transformer.loss_in_turns, Policy(), {"stacked": "blocks", "accumulate": 2}),
    ],
    ids=[
        "kept-full",
        "layers",
        "stacked",
        "layers-in-turns",
        "stacked-in-turns",
        "stacked-in-turns-accumulate",
    ],
)
def test_within_a_tenth_of_what_xla_allocates(
    mesh: Mesh, loss: Any, policy: Policy, options: Any
) -> None:
    stacked = "stacked" in options
    params = transformer.stacked_shapes() if stacked else transformer.shapes()
    estimated, allocated = _temps(mesh, loss, params, policy, options)
    assert estimated == pytest.approx(allocated, rel=0.1)


@pytest.mark.parametrize(
    ("policy", "options"),
    [(Policy(bucket_bytes=1 << 20), {}), (BFLOAT16, {"accumulate": 2})],
    ids=["plain", "accumulate"],
)
def test_an_upper_bound_of_a_loss_whose_units_zero3_finds(
    mesh: Mesh, policy: Policy, options: Any
) -> None:
    """Shapes of parameters do not tell in which units a loss uses them."""
    estimated, allocated = _temps(
        mesh, transformer.loss, transformer.shapes(), policy, options
    )
    assert estimated / 6 < allocated < estimated / 2


def _temps(
    mesh: Mesh, loss: Any, params: Any, policy: Policy, options: Any
) -> tuple[int, int]:
    """Returns bytes beside the state: estimated, and allocated by XLA."""
    optimizer = optax.adamw(1e-3)
    zero = zero3(loss, optimizer, mesh, policy=policy, clip_norm=1.0, **options)
    state = zero.abstract_state(params)
    examples = RANKS * options.get("accumulate", 1)
    batch = jax.ShapeDtypeStruct(
        (examples, transformer.LENGTH), jnp.int32, sharding=zero.batch_sharding
    )
    lowered = zero.lower(state, batch, platforms=("cuda",))
    program = h200.compile_lowered(lowered)
    memory = program.memory_analysis()
    sharded = estimate_memory(
        params, RANKS, policy, optimizer=optimizer, **options
    ).sharded
    held = sharded.params + sharded.optimizer
    assert 0 < memory.argument_size_in_bytes - held < 1024
    return sharded.total - held, memory.temp_size_in_bytes
