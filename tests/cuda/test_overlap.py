"""Which collectives XLA runs beside which matrix products, compiled for H200s."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from cuda import h200
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxzero
from jaxzero import Policy, zero3

h200.skip_unless_compiler()

RANKS = 8
LAYERS = 12
WIDTH = 1024
LAYER_BYTES = 2 * 8 * WIDTH * WIDTH
"""Of one layer's parameters in bfloat16, and of its largest bucket."""

GATHER, REDUCE = "gather", "reduce"
LAYOUTS: dict[str, Any] = {
    "list": {"layers": "blocks/*"},
    "stacked": {"stacked": "blocks"},
}


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(params: Any, batch: Any) -> jax.Array:
    def layer(own: Any, hidden: jax.Array) -> jax.Array:
        return hidden + jnp.tanh(jnp.tanh(hidden @ own["up"]) @ own["down"])

    out = jaxzero.apply_layers(layer, params["blocks"], batch["x"])
    return jnp.mean(out.astype(jnp.float32))


def init(layout: str) -> Any:
    stack = (LAYERS,) if layout == "stacked" else ()

    def block() -> Any:
        return {
            "up": jnp.zeros((*stack, WIDTH, 4 * WIDTH)),
            "down": jnp.zeros((*stack, 4 * WIDTH, WIDTH)),
        }

    return {"blocks": block() if stack else [block() for _ in range(LAYERS)]}


def compiled(layout: str, dump: Path, *, overlap: bool) -> Any:
    mesh = Mesh(h200.devices(RANKS), ("data",), axis_types=(AxisType.Auto,))
    policy = Policy(
        compute_dtype="bfloat16", shard_dtype="float32", overlap=overlap, op="mean"
    )
    zero = zero3(loss, optax.sgd(1e-3), mesh, policy=policy, **LAYOUTS[layout])
    state = zero.abstract_state(lambda: init(layout))
    x = jax.ShapeDtypeStruct((RANKS * 512, WIDTH), jnp.bfloat16)
    lowered = zero.lower(state, {"x": x}, platforms=("cuda",))
    return h200.compile_lowered(lowered, xla_dump_to=str(dump))


def schedule(text: str, computation: str) -> list[str]:
    """Returns starts and ends of collectives, and matrix products, in order.

    Such as ["reduce start", "product", "reduce end"].
    """
    start = text.index(f"{computation} (") if computation != "ENTRY" else 0
    start = text.index("ENTRY") if computation == "ENTRY" else start
    body = text[start:].split("\n}")[0]
    events, kinds = [], {}
    for line in body.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(", line)
        if found is None:
            continue
        name, opcode = found.groups()
        if opcode.endswith("-start"):
            inner = re.search(r"(?:calls|to_apply)=%?([\w.-]+)", line)
            called = text[text.index(f"%{inner[1]} (") :] if inner else line
            called = called.split("\n}")[0]
            for kind, target in (
                (GATHER, _target("all_gather")),
                (REDUCE, _target("reduce_scatter")),
            ):
                if target in called:
                    kinds[name] = kind
                    events.append(f"{kind} start")
        elif opcode.endswith("-done"):
            given = re.search(r"-done\(.*?%?([\w.-]+)\)", line)
            if given and given[1] in kinds:
                events.append(f"{kinds[given[1]]} end")
        elif "gemm" in line or opcode == "dot":
            events.append("product")
    return events


def _target(name: str) -> str:
    return f'custom_call_target="jaxzero_{name}"'


def beside(events: list[str], kind: str) -> list[int]:
    """Returns the number of products beside each collective of a kind."""
    counts, open_at = [], None
    for event in events:
        if event == f"{kind} start":
            open_at = 0
        elif event == f"{kind} end":
            assert open_at is not None
            counts.append(open_at)
            open_at = None
        elif event == "product" and open_at is not None:
            open_at += 1
    return counts


def loop_bodies(text: str) -> list[list[str]]:
    names = re.findall(r"body=%?([\w.-]+)", text)
    return [schedule(text, f"%{name}") for name in names]


def test_listed_layers_hide_their_collectives(tmp_path: Path) -> None:
    text = compiled("list", tmp_path, overlap=True).as_text()
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
    assert not any(copied), "only scalars are copied"
    events = schedule(text, "ENTRY")
    gathers, reductions = beside(events, GATHER), beside(events, REDUCE)
    # Forward and backward; the first ones of both have nothing to run beside.
    assert len(gathers) == 2 * LAYERS
    assert len(reductions) == LAYERS
    assert sum(count > 0 for count in gathers) >= 2 * LAYERS - 3
    assert sum(count > 0 for count in reductions) >= LAYERS - 2


def test_stacked_layers_hide_their_collectives_backward(tmp_path: Path) -> None:
    text = compiled("stacked", tmp_path, overlap=True).as_text()
    backward = [body for body in loop_bodies(text) if f"{REDUCE} start" in body]
    assert len(backward) == 1
    assert all(count > 0 for count in beside(backward[0], REDUCE))
    assert all(count > 0 for count in beside(backward[0], GATHER))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_overlap_nothing_is_gathered_ahead(tmp_path: Path, layout: str) -> None:
    text = compiled(layout, tmp_path, overlap=False).as_text()
    schedules = [schedule(text, "ENTRY"), *loop_bodies(text)]
    counts = [count for events in schedules for count in beside(events, GATHER)]
    assert sum(count > 0 for count in counts) <= 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_is_on_the_collective_stream(
    tmp_path: Path, layout: str
) -> None:
    compiled(layout, tmp_path, overlap=True)
    thunks = next(tmp_path.glob("*thunk_sequence.txt")).read_text().splitlines()
    started = [line for line in thunks if "kAsyncStart" in line]
    # A list has three calls a layer; a loop has them in its body, and at both ends.
    least = 3 * LAYERS if layout == "list" else 8
    assert len([line for line in started if "communication_stream[0]" in line]) >= least


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_costs_a_layer_and_its_buckets(tmp_path: Path, layout: str) -> None:
    def temp(overlap: bool) -> int:
        folder = tmp_path / str(overlap)
        folder.mkdir()
        program = compiled(layout, folder, overlap=overlap)
        return int(program.memory_analysis().temp_size_in_bytes)

    off, on = temp(False), temp(True)
    # Of the layer that is next, or was: its parameters or gradients, its bucket.
    assert on - off < 2 * LAYER_BYTES
    # A quarter of a layer each are the shards of all gradients, which a loop collects.
    assert on < (8 + (layout == "stacked") * LAYERS / 4) * LAYER_BYTES


def whole_tree(dump: Path, flush_bytes: int | None) -> Any:
    """Compiles the gradient of a plain model, reduced as a whole."""
    mesh = Mesh(h200.devices(RANKS), ("data",), axis_types=(AxisType.Auto,))
    policy = Policy(shard_dtype="float32", flush_bytes=flush_bytes)
    weights = [
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16) for _ in range(LAYERS)
    ]

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x.astype(jnp.float32))

    def step(weights: Any, x: jax.Array) -> Any:
        # Typed as varying, so that the gradient is that of this device.
        weights = jax.lax.pcast(weights, "data", to="varying")
        value, grads = jax.value_and_grad(loss)(weights, x)
        shards = jaxzero.shard_grads(grads, "data", policy=policy)
        return shards, jax.lax.pmean(value, "data")

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=(PartitionSpec("data"), PartitionSpec()),
    )

    def placed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    x = jax.ShapeDtypeStruct((RANKS * 512, WIDTH), jnp.bfloat16)
    traced = jax.jit(mapped).trace(
        [placed(weight, PartitionSpec()) for weight in weights],
        placed(x, PartitionSpec("data")),
    )
    lowered = traced.lower(lowering_platforms=("cuda",))
    return h200.compile_lowered(lowered, xla_dump_to=str(dump))


def test_flushes_of_a_whole_tree_run_beside_the_backward_pass(tmp_path: Path) -> None:
    weight_bytes = 2 * WIDTH * WIDTH
    at_once = whole_tree(tmp_path / "a", None)
    split = whole_tree(tmp_path / "b", 3 * weight_bytes)
    assert beside(schedule(at_once.as_text(), "ENTRY"), REDUCE) == [0]
    events = schedule(split.as_text(), "ENTRY")
    counts = beside(events, REDUCE)
    assert len(counts) == LAYERS // 3
    first = events.index(f"{REDUCE} start")
    assert "product" in events[first:]
    # JAX 0.11 starts each as early, but waits for it at once.
    if jax.__version_info__ >= (0, 12):
        # The last one waits for the last gradient.
        assert all(count > 0 for count in counts[:-1])
    temp = [p.memory_analysis().temp_size_in_bytes for p in (split, at_once)]
    assert temp[0] < temp[1] + weight_bytes
