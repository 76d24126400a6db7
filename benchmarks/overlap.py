r"""How much communication a training step hides: `python benchmarks/overlap.py`.

    python benchmarks/overlap.py [--save] [--trace FOLDER]
    python -m jaxzero launch -n 2 --platform cuda -- \
        python benchmarks/overlap.py

A step of layers of four matrix products: parameters are gathered in bfloat16 layer by
layer, in forward and backward, gradients are reduce-scattered to float32
shards, and SGD updates them. Exposed time is that of a step minus that of the same step
whose gathers and reductions stay on the device. `native` is what a JAX user would
write: `jax.checkpoint` around `lax.all_gather` and a layer, whose transpose is
`lax.psum_scatter`; XLA schedules it as it likes.
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxzero
from jaxzero import Policy
from jaxzero._cli.bench.table import Row
from jaxzero._cli.bench.table import table as as_text
from jaxzero.distributed import initialize, started_by

AXIS = "data"
LAYOUTS = ("listed", "stacked")
WAYS = {
    "none": "no communication",
    "native": "native",
    "off": "jaxzero, overlap off",
    "on": "jaxzero, overlap on",
}
RATE = 1e-6
Tree = Any
Step = Callable[[Any, Any], Any]


def layer(own: Tree, hidden: jax.Array) -> jax.Array:
    """The matrix products of a transformer block."""
    hidden = hidden + jnp.tanh(hidden @ own["query"]) @ own["out"]
    return hidden + jnp.tanh(hidden @ own["up"]) @ own["down"]


def loss(params: Tree, batch: jax.Array) -> jax.Array:
    """Layers through `apply_layers`."""
    out = jaxzero.apply_layers(layer, params["blocks"], batch)
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


class Bench:
    """One model on all devices."""

    def __init__(self, width: int, layers: int, tokens: int, stacked: bool) -> None:
        self.ranks = jax.device_count()
        self.mesh: Mesh = jax.make_mesh(
            (self.ranks,), (AXIS,), axis_types=(AxisType.Auto,)
        )
        self.width, self.layers, self.stacked = width, layers, stacked
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        shape = (self.ranks * tokens, width)
        self.batch = jax.jit(
            lambda: jnp.full(shape, 0.01, jnp.bfloat16), out_shardings=sharding
        )()

    def init(self) -> Tree:
        """Returns parameters in true shape, float32."""
        stack = (self.layers,) if self.stacked else ()
        width = self.width

        def block() -> Tree:
            shapes = {
                "query": (width, width),
                "out": (width, width),
                "up": (width, 4 * width),
                "down": (4 * width, width),
            }
            return {k: jnp.full((*stack, *s), 1e-3) for k, s in shapes.items()}

        return {"blocks": block() if stack else [block() for _ in range(self.layers)]}

    def ours(self, *, overlap: bool) -> tuple[Step, Any]:
        """Returns the step of `zero3` and its first state."""
        zero = jaxzero.zero3(
            loss,
            optax.sgd(RATE),
            self.mesh,
            policy=Policy(
                compute_dtype="bfloat16", shard_dtype="float32", overlap=overlap
            ),
            **({"stacked": "blocks"} if self.stacked else {"layers": "blocks/*"}),
        )
        return zero.step, zero.init(self.init)

    def plain(self, *, communicate: bool) -> tuple[Step, Any]:
        """Returns the step in plain JAX, with or without its collectives."""
        spec = PartitionSpec(None, AXIS) if self.stacked else PartitionSpec(AXIS)
        params = jax.jit(self.init, out_shardings=NamedSharding(self.mesh, spec))()

        def full(shard: jax.Array) -> jax.Array:
            narrow = shard.astype(jnp.bfloat16)
            if communicate:
                return lax.all_gather(narrow, AXIS, tiled=True)
            # As many bytes, all of them from this device.
            return jnp.tile(narrow, (self.ranks, 1))

        @functools.partial(jax.checkpoint, prevent_cse=True)
        def gathered(shards: Tree, hidden: jax.Array) -> jax.Array:
            # The barrier keeps XLA from gathering all layers at the start.
            shards, hidden = lax.optimization_barrier((shards, hidden))
            return layer(jax.tree.map(full, shards), hidden)

        def local_loss(params: Tree, batch: jax.Array) -> jax.Array:
            hidden = batch
            if self.stacked:
                hidden, _ = lax.scan(
                    lambda h, own: (gathered(own, h), None), hidden, params["blocks"]
                )
            else:
                for own in params["blocks"]:
                    hidden = gathered(own, hidden)
            return jnp.mean(jnp.square(hidden.astype(jnp.float32)))

        def step(params: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
            value, grads = jax.value_and_grad(local_loss)(params, batch)
            new = jax.tree.map(lambda p, g: p - RATE / self.ranks * g, params, grads)
            return new, lax.pmean(value, AXIS)

        mapped = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(spec, PartitionSpec(AXIS)),
            out_specs=(spec, PartitionSpec()),
        )
        return jax.jit(mapped, donate_argnums=0), params


def seconds(step: Step, state: Any, batch: jax.Array, repeats: int) -> float:
    """Returns the median time of a step."""
    state, _ = jax.block_until_ready(step(state, batch))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rows(bench: Bench, ways: Sequence[str], repeats: int) -> list[Row]:
    """Measures ways to run the step.

    Exposed time needs "none" among them. The peak of memory is that of the process, so
    it is only said of a way that is alone.
    """
    all_ways: dict[str, Callable[[], tuple[Step, Any]]] = {
        "none": lambda: bench.plain(communicate=False),
        "native": lambda: bench.plain(communicate=True),
        "off": lambda: bench.ours(overlap=False),
        "on": lambda: bench.ours(overlap=True),
    }
    found = {
        way: seconds(*all_ways[way](), bench.batch, repeats)
        for way in WAYS
        if way in ways
    }
    alone = found.get("none")
    tokens = bench.batch.shape[0]
    return [
        {
            "layers": f"{bench.layers} {'stacked' if bench.stacked else 'listed'}",
            "ranks": bench.ranks,
            "how": WAYS[way],
            "ms": value * 1e3,
            **({} if alone is None else {"exposed ms": (value - alone) * 1e3}),
            "tokens/s": tokens / value,
            **({"peak GB": peak_gigabytes()} if len(found) == 1 else {}),
        }
        for way, value in found.items()
    ]


def peak_gigabytes() -> float | None:
    """Returns the most memory that was in use on this process's first device so far.

    None on CPU devices, which do not count it.
    """
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] / 1e9 if stats else None


def trace(bench: Bench, folder: pathlib.Path) -> None:
    """Writes a profile of two steps with overlap."""
    step, state = bench.ours(overlap=True)
    state, _ = jax.block_until_ready(step(state, bench.batch))
    with jax.profiler.trace(str(folder)):
        for _ in range(2):
            state, _ = jax.block_until_ready(step(state, bench.batch))


def main() -> None:
    """Measures, and on request saves results and a profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results/*.json")
    parser.add_argument("--trace", type=pathlib.Path, help="folder for a profile")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32768, help="per device")
    parser.add_argument(
        "--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS, help="default: all"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        choices=WAYS,
        help="default: all; peak memory is measured of one alone",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder in which --save writes instead"
    )
    parser.add_argument("--name", default="gpu_overlap", help="of the file")
    options = parser.parse_args()
    if started_by():
        initialize()
    table: list[Row] = []
    for layout in options.layouts:
        stacked = layout == "stacked"
        bench = Bench(options.width, options.layers, options.tokens, stacked)
        table += rows(bench, options.ways, options.repeats)
        if jax.process_index() == 0 and options.save:
            name = f"{options.name}_{jax.device_count()}"
            record.save(name, table, options.out or record.RESULTS)
        if options.trace and not stacked:
            trace(bench, options.trace / f"rank{jax.process_index()}")
    if jax.process_index() == 0:
        print(as_text(table), flush=True)


if __name__ == "__main__":
    main()
