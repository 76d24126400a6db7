"""What XLA makes of a call: collectives, custom calls, copies, memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import Policy

RANKS = 8


class Compiled:
    """A reduction compiled for the CPU devices of a mesh."""

    def __init__(self, mesh: Any, like: Any, donate: bool = False, **options: Any):
        self.policy = options.get("policy", Policy())
        replicated = NamedSharding(mesh, P())
        grads = jax.tree.map(
            lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=replicated), like
        )
        arguments = [grads]
        if donate:
            arguments.append(
                jax.tree.map(
                    lambda t: jax.ShapeDtypeStruct(
                        (-(-t.size // RANKS) * RANKS,),
                        jnp.float32,
                        sharding=NamedSharding(mesh, P("data")),
                    ),
                    like,
                )
            )

        def reduce(grads: Any, into: Any = None) -> Any:
            return jaxzero.shard_grads(
                grads, "data", into=into, cuts="flat", policy=self.policy
            )

        mapped = jax.shard_map(
            reduce,
            mesh=mesh,
            in_specs=(P(), P("data"))[: len(arguments)],
            out_specs=P("data"),
            check_vma=False,
        )
        jitted = jax.jit(mapped, donate_argnums=1 if donate else ())
        program = jitted.lower(*arguments).compile()
        self.text = program.as_text()
        self.memory = program.memory_analysis()

    def count(self, opcode: str) -> int:
        return len(re.findall(rf" {opcode}\(", self.text))

    def calls(self, target: str) -> int:
        return self.text.count(f'custom_call_target="{target}"')


def tree(leaves: int, numel: int, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {f"{i:04}": jax.ShapeDtypeStruct((numel,), dtype) for i in range(leaves)}


@pytest.mark.parametrize(
    "policy",
    [
        Policy(transport="xla"),
        Policy(transport="xla", bucket_bytes=5000),
        Policy(transport="xla", direct_bytes=3000),
    ],
    ids=["one-bucket", "buckets", "direct"],
)
def test_the_program_has_the_collectives_of_the_plan(mesh8, policy) -> None:
    like = tree(6, 700, "float32") | tree(3, 1200, "float32")
    compiled = Compiled(mesh8, like, policy=policy)
    plan = jaxzero.make_plan(like, RANKS, policy, cuts="flat")
    packed = sum(bucket.kind == "packed" for bucket in plan.buckets)
    assert compiled.count("reduce-scatter") == plan.num_collectives > 0
    assert compiled.calls("jaxzero_pack") == packed
    assert compiled.calls("jaxzero_unpack") == len(plan.buckets)


def test_a_thousand_small_leaves_take_one_collective(mesh8) -> None:
    compiled = Compiled(mesh8, tree(1000, 100, "float32"))
    assert compiled.count("reduce-scatter") == 1


@pytest.mark.parametrize("wire", ["float32", None], ids=["packed", "direct"])
def test_donated_accumulators_are_updated_in_place(mesh8, wire) -> None:
    numel, leaves = 1 << 18, 4
    compiled = Compiled(
        mesh8,
        tree(leaves, numel, "bfloat16" if wire else "float32"),
        donate=True,
        policy=Policy(transport="xla", comm_dtype=wire),
    )
    assert compiled.memory.alias_size_in_bytes == leaves * 4 * numel // RANKS
    assert compiled.count("copy") == 0


@pytest.mark.parametrize("leaves", [8, 32])
@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        ("bfloat16", Policy(comm_dtype="float32", bucket_bytes=1 << 22)),
        ("float32", Policy(bucket_bytes=1 << 22, direct_bytes=1 << 40)),
        ("float32", Policy(bucket_bytes=1 << 22)),
    ],
    ids=["cast", "packed", "direct"],
)
def test_temporary_memory_is_two_buckets_at_most(mesh8, leaves, dtype, policy) -> None:
    """Whatever the number of leaves, which here are 1 MiB on the wire."""
    compiled = Compiled(mesh8, tree(leaves, 1 << 18, dtype), policy=policy)
    assert compiled.memory.temp_size_in_bytes <= 2 * policy.bucket_bytes + 65536


def test_identical_calls_are_merged(mesh8) -> None:
    """No side effects: XLA merges equal calls and drops unused ones, on all ranks."""

    def twice(stacked: Any) -> Any:
        once, again, _ = (jaxzero.shard_grads(stacked[0], "data") for _ in range(3))
        return once + again

    mapped = jax.shard_map(twice, mesh=mesh8, in_specs=P("data"), out_specs=P("data"))
    argument = jax.ShapeDtypeStruct(
        (8, 100), np.float32, sharding=NamedSharding(mesh8, P("data"))
    )
    text = jax.jit(mapped).lower(argument).compile().as_text()
    assert text.count('custom_call_target="jaxzero_pack"') == 1
