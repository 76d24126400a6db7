"""Many steps that mix collectives: `python benchmarks/mixed.py [--steps 2000]`.

    python -m jaxzero launch -n 4 --platform cuda -- \
        python benchmarks/mixed.py --out /tmp/found

On a mesh of 2 replicas, in random order and without waiting: reductions over one axis,
over the other and over both, and gathers, each beside native collectives over other
axes in the same program. Gradients are whole numbers, so all sums are exact; they are
compared with NumPy's. A process that is not done in time prints its stacks and ends.
"""

import argparse
import dataclasses
import faulthandler
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxzero
from jaxzero import Policy
from jaxzero._cli.bench.table import table
from jaxzero.distributed import initialize, started_by

BOTH = ("replica", "data")
SPEC = PartitionSpec(BOTH)
SHAPES = {"large": (512, 129), "middle": (33, 65), "small": (7,), "wide": (3, 5001)}
DTYPES = {
    "large": "bfloat16",
    "middle": "float32",
    "small": "bfloat16",
    "wide": "float32",
}
IN_FLIGHT = 50
"""Steps that are enqueued before any is waited for; on CPU devices 1."""

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A step: what ours does, and the native collective beside it.

    Attributes:
      axes: over which the result is sharded.
      summed: over which gradients are summed.
      ours: from a rank's gradients and sums to its new sums.
      native: from a rank's number to the sum over `native_axes`.
      native_axes: of the native collective.
    """

    axes: tuple[str, ...]
    summed: tuple[str, ...]
    ours: Callable[[Tree, Tree], Tree]
    native: Callable[[Any], Any]
    native_axes: tuple[str, ...]


def kinds(mesh: Mesh) -> dict[str, Kind]:
    """Returns all kinds of steps."""

    def reduce(axes: Any, grads: Tree, into: Tree, **options: Any) -> Tree:
        reduction = options.pop("reduction", "native")
        sums: Tree = jaxzero.shard_grads(
            grads,
            axes,
            into=into,
            cuts="flat",
            policy=Policy(op="sum", reduction=reduction),
            **options,
        )
        return sums

    def regather(grads: Tree, into: Tree) -> Tree:
        """Gathers all ranks' sums over "data", and adds what comes back to them."""
        like = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in SHAPES.items()
        }
        half = lax.axis_size("data")
        index = lax.axis_index("data")
        own = {name: _cut(leaf, half)[index] for name, leaf in grads.items()}
        own = {name: leaf.astype(jnp.float32) for name, leaf in own.items()}
        full = jaxzero.gather_params(own, like, "data", cuts="flat")
        return {name: into[name] + _cut(full[name], half)[index] for name in into}

    def along(axes: tuple[str, ...]) -> tuple[Callable[[Any], Any], tuple[str, ...]]:
        return lambda x: lax.psum(x, axes)[0], axes

    def scattered(x: Any) -> Any:
        rows = jnp.tile(x[None], (lax.axis_size("data"), 1))
        return lax.psum_scatter(rows, "data")[0]

    return {
        "sharded and replicated": Kind(
            ("data",),
            BOTH,
            functools.partial(reduce, "data", replicate_axis="replica"),
            *along(("replica",)),
        ),
        "sharded over both": Kind(
            BOTH, BOTH, functools.partial(reduce, BOTH), scattered, ("data",)
        ),
        "sharded over replicas": Kind(
            ("replica",),
            ("replica",),
            functools.partial(reduce, "replica"),
            lambda x: jnp.sum(lax.all_gather(x, "data")[:, 0]),
            ("data",),
        ),
        "summed in float32": Kind(
            ("data",),
            BOTH,
            functools.partial(
                reduce, "data", replicate_axis="replica", reduction="float32"
            ),
            *along(BOTH),
        ),
        "gathered": Kind(("data",), (), regather, *along(("replica",))),
    }


def _cut(leaf: Any, count: int) -> Any:
    """Returns a leaf as `count` equal rows, zero-padded; JAX and NumPy."""
    module: Any = np if isinstance(leaf, np.ndarray) else jnp
    flat = leaf.reshape(-1)
    return module.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def gradient(rank: int) -> Tree:
    """Returns whole numbers whose sums over ranks bfloat16 holds."""
    random = np.random.default_rng(rank)
    return {
        name: random.integers(-2, 3, shape).astype(jnp.dtype(DTYPES[name]))
        for name, shape in SHAPES.items()
    }


class Run:
    """All kinds of steps on one mesh, and their sums so far."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        replicas = 2 if len(devices) % 2 == 0 else 1
        grid = np.array(devices).reshape(replicas, -1)
        self.mesh = Mesh(grid, BOTH, axis_types=(AxisType.Auto,) * 2)
        self.kinds = kinds(self.mesh)
        self._spread = NamedSharding(self.mesh, SPEC)
        each = [gradient(rank) for rank in range(len(devices))]
        self.grads = {
            name: self._place(np.stack([tree[name] for tree in each]))
            for name in SHAPES
        }
        numbers = np.arange(1, len(devices) + 1, dtype=np.float32)
        self.numbers = self._place(np.repeat(numbers[:, None], 4096, axis=1))
        self.state = {
            how: (
                {
                    name: self._place(np.zeros((len(devices), size), np.float32))
                    for name, size in self._sizes(kind).items()
                },
                self._place(np.zeros(len(devices), np.float32)),
            )
            for how, kind in self.kinds.items()
        }
        self._steps = {how: self._jitted(kind) for how, kind in self.kinds.items()}

    def step(self, how: str) -> Any:
        """Enqueues one step."""
        self.state[how] = self._steps[how](self.grads, self.numbers, self.state[how])
        return self.state[how]

    def wrong(self, how: str, count: int) -> int:
        """Returns how many numbers on this process's devices are wrong after steps."""
        kind = self.kinds[how]
        rank_of = {device: r for r, device in enumerate(self.mesh.devices.flat)}
        sums, total = self.state[how]
        wrong = 0
        for name, leaf in sums.items():
            for shard in leaf.addressable_shards:
                expected = count * self._expected(kind, name, rank_of[shard.device])
                wrong += int(np.sum(np.asarray(shard.data)[0] != expected))
        for shard in total.addressable_shards:
            group = self._group(kind.native_axes, rank_of[shard.device])
            wrong += int(np.asarray(shard.data)[0] != count * sum(r + 1 for r in group))
        return wrong

    def _place(self, stacked: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(
            stacked.shape, self._spread, lambda index: stacked[index]
        )

    def _jitted(self, kind: Kind) -> Any:
        def local(grads: Tree, numbers: Any, state: Any) -> Any:
            own, (sums, total) = jax.tree.map(lambda x: x[0], (grads, state))
            new = kind.ours(own, sums), total + kind.native(numbers[0])
            return jax.tree.map(lambda x: x[None], new)

        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=2)

    def _count(self, axes: Sequence[str]) -> int:
        return int(np.prod([self.mesh.shape[axis] for axis in axes]))

    def _sizes(self, kind: Kind) -> dict[str, int]:
        count = self._count(kind.axes)
        return {n: -(-int(np.prod(s)) // count) for n, s in SHAPES.items()}

    def _group(self, axes: Sequence[str], rank: int) -> list[int]:
        """Returns the ranks that differ from a rank along some axes only."""
        ranks = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)
        place = np.unravel_index(rank, ranks.shape)
        index = tuple(
            slice(None) if axis in axes else int(i)
            for axis, i in zip(BOTH, place, strict=True)
        )
        return [int(r) for r in ranks[index].reshape(-1)]

    def _expected(self, kind: Kind, name: str, rank: int) -> np.ndarray:
        group = self._group(kind.axes, rank)
        own = group.index(rank)
        if kind.summed:
            summed = self._group(kind.summed, rank)
        else:
            summed = [rank]  # each piece comes from the rank that keeps it
        total = sum(gradient(r)[name].astype(np.float64) for r in summed)
        result: np.ndarray = _cut(total, len(group))[own]
        return result


def main() -> None:
    """Runs the steps and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=300, metavar="SECONDS")
    parser.add_argument("--out", type=pathlib.Path, help="folder for a JSON file")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    if started_by():
        initialize()
    run = Run(jax.devices())
    in_flight = 1 if jax.default_backend() == "cpu" else IN_FLIGHT
    for how in run.kinds:  # compiles
        jax.block_until_ready(run.step(how))
    counts = dict.fromkeys(run.kinds, 1)
    start = time.perf_counter()
    for number, how in enumerate(
        np.random.default_rng(0).choice(list(run.kinds), options.steps), 1
    ):
        result = run.step(str(how))
        counts[str(how)] += 1
        if number % in_flight == 0:
            jax.block_until_ready(result)
    jax.block_until_ready(run.state)
    seconds = time.perf_counter() - start
    rows = [
        {
            "step": how,
            "ranks": run.mesh.size,
            "processes": jax.process_count(),
            "steps": counts[how],
            "ms per mixed step": seconds / options.steps * 1e3,
            "wrong numbers": run.wrong(how, counts[how]),
        }
        for how in run.kinds
    ]
    wrong = sum(row["wrong numbers"] for row in rows)
    if jax.process_index() == 0:
        print(table(rows))
        print(f"{options.steps} steps in {seconds:.1f} s, {wrong} wrong numbers")
        if options.out:
            name = f"mixed_{run.mesh.size}_in_{jax.process_count()}"
            record.save(name, rows, options.out)
    if wrong:
        raise SystemExit(f"rank {jax.process_index()}: {wrong} wrong numbers")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
