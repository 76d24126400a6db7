"""What XLA makes of the fused calls on an H200, compiled without one."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import h200
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxzero
from jaxzero import Policy, _ffi

h200.skip_unless_compiler()

RANKS = 4
SHAPES = {"bias": (777,), "matrix": (4096, 1024), "narrow": (64, 333), "scalar": ()}
ON_COLLECTIVES = "stream=communication_stream[0]"


@pytest.fixture(scope="module")
def devices() -> Any:
    return h200.devices(RANKS)


@pytest.fixture
def mesh(devices: Any) -> Mesh:
    return Mesh(devices.reshape(RANKS), ("data",), axis_types=(AxisType.Auto,))


class Compiled:
    """A program compiled for `RANKS` H200s."""

    def __init__(self, program: Any, dump: Path) -> None:
        self.text = program.as_text()
        self.memory = program.memory_analysis()
        self.thunks = next(dump.glob("*thunk_sequence.txt")).read_text().splitlines()

    def count(self, opcode: str) -> int:
        return len(re.findall(rf" {opcode}\(", self.text))

    def calls(self, target: str) -> int:
        return self.text.count(f'custom_call_target="{target}"')

    def of_kind(self, kind: str) -> list[str]:
        return [line for line in self.thunks if f" {kind} " in f"{line} "]


@pytest.fixture
def compile_for_h200(tmp_path: Path) -> Callable[..., Compiled]:
    """Returns a function that compiles `per_rank` over a mesh.

    Arguments are trees of (shape, dtype) as one rank sees them.
    """

    def compile_(
        mesh: Mesh, per_rank: Callable[..., Any], *types: Any, donate: Any = ()
    ) -> Compiled:
        spec = PartitionSpec(mesh.axis_names)

        def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (mesh.size, *leaf.shape),
                leaf.dtype,
                sharding=NamedSharding(mesh, spec),
            )

        def one(*stacked: Any) -> Any:
            trees = jax.tree.map(lambda x: x.reshape(x.shape[1:]), stacked)
            return jax.tree.map(lambda x: x[None], per_rank(*trees))

        mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)
        jitted = jax.jit(mapped, donate_argnums=donate)
        lowered = jitted.trace(*jax.tree.map(place, types)).lower(
            lowering_platforms=("cuda",)
        )
        program = h200.compile_lowered(
            lowered,
            # Capture even a single kernel where XLA may.
            xla_gpu_graph_min_graph_size=1,
            xla_dump_to=str(tmp_path),
        )
        return Compiled(program, tmp_path)

    return compile_


def types(shapes: dict[str, Any], dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for k, s in shapes.items()}


def shard_shapes(shapes: dict[str, Any], ranks: int = RANKS) -> dict[str, Any]:
    plan = jaxzero.make_plan(types(shapes, "float32"), ranks)
    specs = {leaf.path: leaf.cut.shard_shape for leaf in plan.leaves}
    return {name: specs[f"['{name}']"] for name in shapes}


def test_donated_accumulators_are_updated_in_place(
    mesh: Mesh, compile_for_h200: Any
) -> None:
    sums = types(shard_shapes(SHAPES), "float32")
    program = compile_for_h200(
        mesh,
        lambda grads, into: jaxzero.shard_grads(grads, "data", into=into),
        types(SHAPES, "bfloat16"),
        sums,
        donate=1,
    )
    assert program.calls("jaxzero_reduce_scatter") == 1
    assert program.count("copy") == program.count("copy-start") == 0
    total = sum(4 * int(np.prod(leaf.shape)) for leaf in sums.values())
    assert program.memory.alias_size_in_bytes == total


def test_the_call_runs_on_the_stream_of_collectives(
    mesh: Mesh, compile_for_h200: Any
) -> None:
    """One asynchronous region, however many leaves there are."""
    shapes = {f"{i:03}": (i + 1, 16) for i in range(300)}
    program = compile_for_h200(
        mesh,
        lambda grads: jaxzero.shard_grads(grads, "data"),
        types(shapes, "bfloat16"),
    )
    (start,) = program.of_kind("kAsyncStart")
    assert ON_COLLECTIVES in start
    inside = program.thunks[program.thunks.index(start) + 1]
    assert inside.startswith("  ")
    assert "kCustomCall" in inside


def test_statistics_keep_it_one_region(mesh: Mesh, compile_for_h200: Any) -> None:
    program = compile_for_h200(
        mesh,
        lambda grads: jaxzero.shard_grads(grads, "data", with_stats=True),
        types(SHAPES, "bfloat16"),
    )
    regions = [line for line in program.of_kind("kAsyncStart")]
    calls = program.of_kind("kCustomCall")
    assert len([line for line in calls if line.startswith("  ")]) == 1
    # The other region, if it is one, is the sum that combines all ranks' numbers.
    assert 1 <= len(regions) <= 2


def test_nothing_of_it_is_captured_in_a_command_buffer(
    mesh: Mesh, compile_for_h200: Any
) -> None:
    """A graph would keep a communicator that XLA may have replaced."""

    def step(grads: Any, x: jax.Array) -> Any:
        for _ in range(4):
            x = jnp.sin(x @ x)
        shards = jaxzero.shard_grads(grads, "data")
        for _ in range(4):
            x = jnp.cos(x @ x)
        return shards, x

    program = compile_for_h200(
        mesh,
        step,
        types(SHAPES, "bfloat16"),
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
    )
    depth = None
    for line in program.thunks:
        indent = len(line) - len(line.lstrip())
        if depth is not None and indent <= depth:
            depth = None
        if "kCommandBuffer" in line:
            depth = indent
        elif depth is not None:
            assert "kCustomCall" not in line
    assert program.of_kind("kCustomCall")


@pytest.mark.parametrize("reduction", ["native", "float32"])
def test_temporary_memory_is_at_most_two_buckets(
    mesh: Mesh, compile_for_h200: Any, reduction: Any
) -> None:
    shapes = {f"{i}": (1024, 512) for i in range(16)}
    bucket_bytes = 1 << 20
    policy = Policy(reduction=reduction, bucket_bytes=bucket_bytes)
    program = compile_for_h200(
        mesh,
        lambda grads: jaxzero.shard_grads(grads, "data", policy=policy),
        types(shapes, "bfloat16"),
    )
    slack = 4096  # alignment
    assert program.memory.temp_size_in_bytes <= 2 * bucket_bytes + slack


def test_parameters_are_gathered_in_one_call(mesh: Mesh, compile_for_h200: Any) -> None:
    program = compile_for_h200(
        mesh,
        lambda shards: jaxzero.gather_params(shards, types(SHAPES, "bfloat16"), "data"),
        types(shard_shapes(SHAPES), "float32"),
    )
    assert program.calls("jaxzero_all_gather") == 1
    (start,) = program.of_kind("kAsyncStart")
    assert ON_COLLECTIVES in start


def test_replica_groups_follow_the_axes(devices: Any, compile_for_h200: Any) -> None:
    mesh = Mesh(
        devices.reshape(2, 2), ("replica", "data"), axis_types=(AxisType.Auto,) * 2
    )
    program = compile_for_h200(
        mesh,
        lambda grads: jaxzero.shard_grads(
            grads,
            "data",
            cuts={**dict.fromkeys(SHAPES), "scalar": "whole"},
            replicate_axis="replica",
        ),
        types(SHAPES, "bfloat16"),
    )
    for name, ids in (
        ("shard_groups", "0, 1, 2, 3"),
        ("replicate_groups", "0, 2, 1, 3"),
        ("all_groups", "0, 2, 1, 3"),
    ):
        assert re.search(rf"{name} = dense<\[{ids}\]>", program.text), name


def test_accumulating_in_a_scan_copies_nothing(
    mesh: Mesh, compile_for_h200: Any
) -> None:
    def step(grads: Any, into: Any) -> Any:
        def body(carry: Any, scale: jax.Array) -> Any:
            scaled = jax.tree.map(lambda g: g * scale, grads)
            return jaxzero.shard_grads(scaled, "data", into=carry), None

        return lax.scan(body, into, jnp.arange(4, dtype=jnp.bfloat16))[0]

    program = compile_for_h200(
        mesh,
        step,
        types(SHAPES, "bfloat16"),
        types(shard_shapes(SHAPES), "float32"),
        donate=1,
    )
    large = re.findall(r"= f32\[1024,1024\]\S* copy\(", program.text)
    assert not large


def test_profilers_see_the_names_of_buckets(mesh: Mesh, compile_for_h200: Any) -> None:
    policy = Policy(bucket_bytes=1 << 22)
    like = types(SHAPES, "bfloat16")
    program = compile_for_h200(
        mesh, lambda grads: jaxzero.shard_grads(grads, "data", policy=policy), like
    )
    (call,) = (
        line
        for line in program.text.splitlines()
        if 'custom_call_target="jaxzero_reduce_scatter"' in line
    )
    name = r"bucket\d_bfloat16_[\d.]+[KM]iB;"
    (names,) = re.findall(rf'bucket_names = "((?:{name})+)"', call)
    count = names.count(";")
    assert names.startswith("bucket0_bfloat16_4MiB;") and count > 1
    assert f"/jaxzero/reduce_scatter_{count}buckets_" in call
    # The scope takes nothing away from the stream.
    assert '_xla_stream_annotation="collective"' in program.text
    (start,) = program.of_kind("kAsyncStart")
    assert ON_COLLECTIVES in start


@pytest.mark.parametrize("names", ["", ";", "one;two;"])
def test_other_than_one_name_per_bucket_is_refused(
    mesh: Mesh, compile_for_h200: Any, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    from jaxzero._transports import nccl

    true_tables = nccl._Tables.of
    monkeypatch.setattr(
        nccl._Tables,
        "of",
        lambda *args: dataclasses.replace(true_tables(*args), bucket_names=names),
    )
    with pytest.raises(Exception, match=r"bucket_names: expected one for each of 1"):
        compile_for_h200(
            mesh,
            lambda grads: jaxzero.shard_grads(grads, "data"),
            types(SHAPES, "bfloat16"),
        )


def test_a_table_that_contradicts_itself_is_refused(
    mesh: Mesh, compile_for_h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While compiling, so on every rank alike."""
    from jaxzero._transports import nccl

    true_table = nccl._bucket_table

    def broken(*args: Any) -> np.ndarray:
        table = true_table(*args)
        columns = _ffi.cuda_module().bucket_columns()
        table[columns.index("collective")] = 2
        return table

    monkeypatch.setattr(nccl, "_bucket_table", broken)
    with pytest.raises(Exception, match=r"bucket 0: found 4 rows to send, expected 1"):
        compile_for_h200(
            mesh,
            lambda grads: jaxzero.shard_grads(grads, "data"),
            types(SHAPES, "bfloat16"),
        )


def test_no_two_calls_share_temporary_memory(
    devices: Any, compile_for_h200: Any
) -> None:
    """XLA takes it for read-only, and merged those of calls that end in one leaf."""
    mesh = Mesh(devices.reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def step(grads: Any) -> Any:
        other = grads | {"matrix": grads["matrix"] * 2}
        return [
            jaxzero.shard_grads(grads, "a", replicate_axis="b"),
            jaxzero.shard_grads(grads, "b", replicate_axis="a"),
            jaxzero.shard_grads(other, "a", replicate_axis="b"),
        ]

    shapes = {name: SHAPES[name] for name in ("matrix", "narrow")}
    program = compile_for_h200(mesh, step, types(shapes, "bfloat16"))
    assert program.calls("jaxzero_reduce_scatter") == 3
    assert program.calls("jaxzero_temp") == 3


def test_rows_whose_sizes_overflow_are_refused() -> None:
    """The temp came out as zero bytes, and the first launch wrote beyond it."""
    module = _ffi.cuda_module()
    slot = {"operand": 0, "outer": 1, "length": 1, "inner": 1, "chunk": 1}
    slot |= {"begin": 0, "count": 1, "row_offset": 512, "base": -1, "accumulate": 0}
    codes = module.bucket_codes()
    bucket = {
        "kind": codes["kind"].index("packed"),
        "collective": codes["collective"].index("all_reduce"),
        "comm_dtype": codes["comm_dtype"].index("float64"),
        **{"send_rows": 1, "recv_rows": 1, "row_numel": (1 << 60) - 1},
        **{"slot_begin": 0, "slot_count": 1, "pre_scale_exponent": 0, "lands": 0},
    }
    slots = _ffi.slot_table([slot]).tobytes()
    table = np.array([bucket[c] for c in module.bucket_columns()], np.int64).tobytes()
    with pytest.raises(ValueError, match=r"bucket 0: found 1 rows of 1152921504606846"):
        module.reduce_temp_bytes(slots, table, 1, 2, False)


@pytest.mark.parametrize("ids", [[0, 1, 2, 2], [0, 1, 2, 4], [-1, 1, 2, 3]])
def test_devices_that_are_not_those_of_the_mesh_are_refused(
    mesh: Mesh, compile_for_h200: Any, monkeypatch: pytest.MonkeyPatch, ids: list[int]
) -> None:
    from jaxzero._axis import Axis

    monkeypatch.setattr(Axis, "replica_groups", lambda *_: np.array([ids], np.int64))
    with pytest.raises(Exception, match=r"shard_groups: found device -?\d, expected"):
        compile_for_h200(
            mesh,
            lambda grads: jaxzero.shard_grads(grads, "data"),
            types(SHAPES, "bfloat16"),
        )


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"format": np.int64(0)}, "format: found 0, expected 1: another version"),
        ({"extra": np.int64(0)}, "found 12 attributes, expected 11"),
    ],
)
def test_attributes_of_another_version_are_refused(
    mesh: Mesh,
    compile_for_h200: Any,
    monkeypatch: pytest.MonkeyPatch,
    further: dict[str, np.int64],
    message: str,
) -> None:
    emitted = jax.ffi.ffi_call

    def ffi_call(target: str, *args: Any, **options: Any) -> Any:
        emit = emitted(target, *args, **options)
        if target != _ffi.REDUCE_SCATTER:
            return emit
        return lambda *operands, **attributes: emit(*operands, **attributes | further)

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    with pytest.raises(Exception, match=message):
        compile_for_h200(
            mesh,
            lambda grads: jaxzero.shard_grads(grads, "data"),
            types(SHAPES, "bfloat16"),
        )
