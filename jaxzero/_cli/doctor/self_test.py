"""`doctor`'s self-test: one small reduction over all local devices, checked."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._cli.doctor.fact import REINSTALL, REPORT, Fact, one_line
from jaxzero._cli.doctor.limit import TimeLimit, TimeLimitError
from jaxzero._cli.doctor.machine import Machine

AFTER_CUDA_FAILURE = (
    "set NCCL_DEBUG=INFO and run this again; until it passes, use"
    " Policy(transport='xla')"
)
RAISE_LIMIT = "on a slow machine, raise --timeout"


def self_test(machine: Machine, limit: TimeLimit) -> Iterator[Fact]:
    key = "self-test"
    if not machine.devices:
        yield Fact(key=key, value="not run: JAX has no devices", fix=machine.fix)
        return
    has_cuda = bool(machine.cuda_devices)
    try:
        difference = limit.run(functools.partial(_difference, machine.devices))
    except TimeLimitError as error:
        fix = f"{RAISE_LIMIT}; else {AFTER_CUDA_FAILURE if has_cuda else REPORT}"
        yield Fact(key=key, value=str(error), fix=fix)
        return
    except Exception as error:
        fix = AFTER_CUDA_FAILURE if has_cuda else REINSTALL
        yield Fact(key=key, value=one_line(error), fix=fix)
        return
    yield Fact(key=key, value=difference or "ok", fix=REPORT if difference else None)


def _difference(
    devices: Sequence[Any], enter_step: Callable[[str], None]
) -> str | None:
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
    totals = {name: leaf.astype(np.float64).sum(0) for name, leaf in grads.items()}
    like = {
        name: jax.ShapeDtypeStruct(shape, dtypes[name])
        for name, shape in shapes.items()
    }

    def scatter(grads: Any) -> Any:
        local = jax.tree.map(lambda leaf: leaf[0], grads)
        return jaxzero.shard_grads(local, "rank", policy=jaxzero.Policy(op="sum"))

    def gather(shards: Any) -> Any:
        full = jaxzero.gather_params(shards, like, "rank")
        return jax.tree.map(lambda leaf: leaf[None], full)

    mesh = Mesh(np.array(devices), ("rank",))

    group = f"{ranks} device{'s' * (ranks > 1)}"

    def run(collective: str, function: Callable[[Any], Any], operands: Any) -> Any:
        mapped = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=P("rank"), out_specs=P("rank"))
        )
        enter_step(f"compiling the {collective} over {group}")
        program = mapped.lower(operands).compile()
        enter_step(f"{collective} over {group}")
        return jax.block_until_ready(program(operands))

    enter_step(f"a copy to {group}")
    grads_on_devices = jax.device_put(grads, NamedSharding(mesh, P("rank")))
    shards = run("reduce-scatter", scatter, grads_on_devices)
    for name, total in totals.items():
        found = np.asarray(shards[name], np.float64).ravel()
        expected = np.pad(total.ravel(), (0, found.size - total.size))
        wrong = np.count_nonzero(found != expected)
        if wrong:
            return f"reduce-scatter: {wrong} of {found.size} elements differ in {name}"
    full = run("all-gather", gather, shards)
    for name, total in totals.items():
        wrong = np.count_nonzero(np.asarray(full[name], np.float64) != total)
        if wrong:
            return f"all-gather: {wrong} of {full[name].size} elements differ in {name}"
    return None
