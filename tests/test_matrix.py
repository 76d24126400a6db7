"""Every option with every other: a pairwise matrix against float64 NumPy."""

from typing import Any

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import assert_pairwise, ident, pairwise

import jaxzero
from jaxzero import Policy

FACTORS: dict[str, list[Any]] = {
    "ranks": [1, 3, 4],
    "replicas": [1, 2],
    "kind": ["auto", "explicit"],
    "check_vma": [True, False],
    "dtype": ["float32", "bfloat16", "float16", "complex64"],
    "op": ["mean", "sum"],
    "divide_by": [None, 3.0],
    "comm_dtype": [None, "float32", "bfloat16", "float16"],
    "shard_dtype": [None, "float32"],
    "reduction": ["native", "float32"],
    "bucket_bytes": [None, 64, 1000],
    "direct_bytes": [None, 0],
    "cuts": ["default", "flat", "last", "whole", "mixed"],
    "min_shard_numel": [0, 14],
    "into": [False, True],
    "with_stats": [False, True],
}
SHAPES = {"a": (6, 5), "b": (13,), "c": (4, 3, 2), "s": (), "e": (0, 3)}
CUTS: dict[str, Any] = {
    "default": dict.fromkeys(SHAPES),
    "flat": dict.fromkeys(SHAPES, "flat"),
    "last": {"a": 1, "b": 0, "c": 2, "s": None, "e": None},
    "whole": dict.fromkeys(SHAPES, "whole"),
    "mixed": {"a": "whole", "b": None, "c": 1, "s": "whole", "e": "flat"},
}


ROWS = pairwise(FACTORS)


def test_the_matrix_is_pairwise_and_small() -> None:
    assert len(ROWS) < 60
    assert_pairwise(ROWS, FACTORS)


@pytest.mark.parametrize("row", ROWS, ids=ident)
def test_options_work_together(make_mesh, row: dict[str, Any]) -> None:
    ranks, replicas, dtype = row["ranks"], row["replicas"], row["dtype"]
    mesh = make_mesh((replicas, ranks), ("replica", "data"), row["kind"])
    asked = CUTS[row["cuts"]]
    cuts = {
        name: "whole"
        if asked[name] is None and np.prod(shape) < row["min_shard_numel"]
        else asked[name]
        for name, shape in SHAPES.items()
    }
    fields = ("op", "divide_by", "comm_dtype", "shard_dtype", "reduction")
    fields += ("bucket_bytes", "direct_bytes")
    policy = Policy(**{field: row[field] for field in fields})
    count = ranks * replicas
    grads = [oracle.integers(SHAPES, rank, dtype=dtype) for rank in range(count)]
    wide = "complex64" if dtype == "complex64" else "float32"
    start = oracle.integers(SHAPES, 99, dtype=wide) if row["into"] else None
    full = oracle.reduce(grads, policy.op, divide_by=policy.divide_by, into=start)
    specs = {
        name: P()
        if cuts[name] == "whole"
        else P(*[None] * (cuts[name] if isinstance(cuts[name], int) else 0), "data")
        for name in SHAPES
    }

    def put(tree: Any, spec: Any) -> Any:
        return jax.tree.map(
            lambda v, s: jax.device_put(v, NamedSharding(mesh, s)), tree, spec
        )

    everywhere = P(("replica", "data"))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *grads)
    arguments = [put(stacked, dict.fromkeys(SHAPES, everywhere))]
    if start is not None:
        arguments.append(
            put(oracle.stored(oracle.shards(start, ranks, cuts), wide), specs)
        )

    layout = jaxzero.make_layout(
        grads[0],
        "data",
        mesh=mesh,
        cuts=asked,
        min_shard_numel=row["min_shard_numel"],
        replicate_axis="replica",
    )

    def reduce(stacked: Any, into: Any = None) -> Any:
        return jaxzero.shard_grads(
            jax.tree.map(lambda leaf: leaf[0], stacked),
            layout,
            into=into,
            policy=policy,
            with_stats=row["with_stats"],
        )

    mapped = jax.shard_map(
        reduce,
        mesh=mesh,
        in_specs=(everywhere, specs)[: len(arguments)],
        out_specs=(specs, P()) if row["with_stats"] else specs,
        check_vma=row["check_vma"],
    )
    result = jax.jit(mapped)(*arguments)
    shards, stats = result if row["with_stats"] else (result, None)
    rounded = [dtype, row["comm_dtype"] or dtype, str(shards["a"].dtype)]
    bounds = oracle.tolerance(count, *rounded)
    scale = max(1.0, *(float(np.max(np.abs(v), initial=0)) for v in full.values()))
    for name, expected in oracle.shards(full, ranks, cuts).items():
        np.testing.assert_allclose(
            oracle.wide(np.asarray(shards[name])),
            expected,
            rtol=bounds["rtol"],
            atol=bounds["atol"] * scale * count,
            err_msg=name,
        )
    if stats is not None:
        assert bool(stats.all_finite)
        np.testing.assert_allclose(
            float(stats.norm), oracle.global_norm(full), rtol=2 * bounds["rtol"]
        )
