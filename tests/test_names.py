"""The names of buckets in a compiled program, which profilers show."""

import re
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import Policy
from jaxzero._transports.names import bucket_name, call_name

RANKS = 8
LIKE = {
    "half": jax.ShapeDtypeStruct((1000,), "bfloat16"),
    "small": jax.ShapeDtypeStruct((104,), "float32"),
    "split": jax.ShapeDtypeStruct((3000,), "float32"),
}
POLICY = Policy(transport="xla", bucket_bytes=8192, direct_bytes=1 << 40)


def scopes(function: Any, mesh: Any, *arguments: Any) -> dict[str, set[str]]:
    """Returns the name scopes of the operations of each kind, outside reductions."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    placed = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(
            (RANKS * t.shape[0], *t.shape[1:]),
            t.dtype,
            sharding=NamedSharding(mesh, P("data")),
        ),
        arguments,
    )
    text = jax.jit(mapped).lower(*placed).compile().as_text()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        kind = re.search(
            r'custom_call_target="(jaxzero_\w+)"| (reduce-scatter|all-gather)\(', line
        )
        name = re.search(r'op_name="[^"]*?(jaxzero/[^"]*)/\w+"', line)
        if kind:
            assert name, line
            found.setdefault(kind[1] or kind[2], set()).add(name[1])
    return found


def names_of(step: str) -> set[str]:
    buckets = jaxzero.make_plan(LIKE, RANKS, POLICY).buckets
    assert len(buckets) == 3
    return {f"jaxzero/{bucket_name(i, b)}/{step}" for i, b in enumerate(buckets)}


def test_every_step_of_a_bucket_has_its_name(mesh8) -> None:
    found = scopes(
        lambda grads: jaxzero.shard_grads(grads, "data", policy=POLICY), mesh8, LIKE
    )
    assert found == {
        "jaxzero_pack": names_of("pack"),
        "reduce-scatter": names_of("collective"),
        "jaxzero_unpack": names_of("unpack"),
    }


def test_every_step_of_a_gather_has_its_name(mesh8) -> None:
    shards = {
        path: jax.ShapeDtypeStruct((leaf.shape[0] // RANKS,), leaf.dtype)
        for path, leaf in LIKE.items()
    }
    found = scopes(
        lambda tree: jaxzero.gather_params(tree, LIKE, "data", policy=POLICY),
        mesh8,
        shards,
    )
    assert found == {
        "jaxzero_pack": names_of("pack"),
        "all-gather": names_of("collective"),
        "jaxzero_unpack_leaves": names_of("unpack"),
    }


@pytest.mark.parametrize(
    ("numel", "size"),
    [
        (3 << 20, "12MiB"),
        (3 << 19, "6MiB"),
        (3 << 18, "3MiB"),
        (3 << 17, "1.5MiB"),
        (257, "1KiB"),
        (8, "32B"),
    ],
)
def test_name_says_number_dtype_and_bytes(numel, size) -> None:
    like = [jax.ShapeDtypeStruct((numel,), "float32")]
    (bucket,) = jaxzero.make_plan(like, 1).buckets
    assert bucket_name(3, bucket) == f"bucket3_float32_{size}"


def test_name_of_a_call_adds_its_buckets_up() -> None:
    like = [jax.ShapeDtypeStruct((3 << 20,), "float32")]
    (bucket,) = jaxzero.make_plan(like, 1).buckets
    assert call_name("all_gather", [bucket] * 3) == "all_gather_3buckets_36MiB"
