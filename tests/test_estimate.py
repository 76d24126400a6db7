"""estimate_memory against XLA's own account of compiled steps, and by hand."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import transformer

from jaxzero import Policy, estimate_memory, zero3

MIB = 1 << 20
PACKED = {"direct_bytes": 1 << 40}
ALONE = {"overlap": False}
SMALL = {"bucket_bytes": MIB}

MODELS: dict[str, Any] = {
    "plain": (transformer.shapes, transformer.loss, {}),
    "layers": (transformer.shapes, transformer.loss, {"layers": "blocks/*"}),
    "stacked": (
        transformer.stacked_shapes,
        transformer.loss_stacked,
        {"stacked": "blocks"},
    ),
    "layers in turns": (
        transformer.shapes,
        transformer.loss_in_turns,
        {"layers": "blocks/*"},
    ),
    "stacked in turns": (
        transformer.stacked_shapes,
        transformer.loss_in_turns,
        {"stacked": "blocks"},
    ),
    "many stacked": (
        functools.partial(transformer.stacked_shapes, 12),
        transformer.loss_in_turns,
        {"stacked": "blocks"},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def promotion() -> Iterator[None]:
    """Optimizers mix dtypes, so they need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "policy", "options"),
    [
        ("plain", {}, {}),
        ("plain", PACKED | SMALL, {"accumulate": 2}),
        # `gathered` has no other layer beside it.
        ("layers", ALONE, {}),
        ("layers", ALONE | PACKED, {}),
        ("stacked", ALONE, {}),
        ("stacked", ALONE | PACKED | SMALL, {"accumulate": 2}),
        ("layers in turns", {}, {}),
        ("layers in turns", PACKED, {"accumulate": 2}),
        ("layers in turns", PACKED | SMALL, {}),
        ("layers in turns", ALONE, {}),
        ("layers in turns", ALONE | PACKED | SMALL, {"accumulate": 2}),
        ("stacked in turns", {}, {}),
        ("stacked in turns", PACKED, {"accumulate": 2}),
        ("stacked in turns", ALONE | PACKED, {"accumulate": 2}),
        ("many stacked", {}, {}),
        # Quotients of all gradients need more than a layer.
        ("many stacked", ALONE, {}),
    ],
    ids=str,
)
def test_within_a_tenth_of_what_xla_allocates(
    mesh8: Any, model: str, policy: Any, options: Any
) -> None:
    """In float32, as XLA:CPU widens 16-bit floats; clipping, as most runs do.

    Examples are few and short, so that activations are small. Temporary memory alone
    is held to the same bound, because the state is exact.
    """
    shapes, loss, named = MODELS[model]
    params, chosen = shapes(), Policy(**policy, transport="xla")
    optimizer = optax.adamw(1e-3)
    zero = zero3(
        loss, optimizer, mesh8, policy=chosen, clip_norm=1.0, **named, **options
    )
    batch = jax.ShapeDtypeStruct(
        (8 * options.get("accumulate", 1), transformer.LENGTH), jnp.int32
    )
    lowered = zero.lower(zero.abstract_state(params), batch)
    memory = lowered.compile().memory_analysis()
    estimate = estimate_memory(
        params, 8, chosen, optimizer=optimizer, **named, **options
    )
    sharded = estimate.sharded
    state = sharded.params + sharded.optimizer
    # What else is passed: the batch and the step.
    assert 0 < memory.argument_size_in_bytes - state < 1024
    temp = estimate.total - state
    assert temp == pytest.approx(memory.temp_size_in_bytes, rel=0.1)


def matrices(count: int, dtype: str = "float32") -> dict[str, Any]:
    """Returns shapes of 1 Mi elements each."""
    one = jax.ShapeDtypeStruct((1024, 1024), dtype)
    return {"blocks": [{"w": one} for _ in range(count)]}


def test_parts_of_a_step_that_gathers_everything() -> None:
    estimate = estimate_memory(matrices(16), 8, Policy(compute_dtype="bfloat16"))
    sharded = estimate.sharded
    assert sharded.params == sharded.grads == 16 * 4 * MIB // 8
    assert sharded.optimizer == 2 * sharded.params
    # Everything at once, in two bytes, and in one bucket.
    assert sharded.gathered == sharded.full_grads == sharded.buckets == 16 * 2 * MIB
    # While gradients are packed, no gathered parameter is left.
    assert estimate.fullest == "reduction"
    assert sharded.total == (4 * 16 * 4 * MIB // 8) + 2 * 16 * 2 * MIB


def test_layers_gather_one_at_a_time() -> None:
    policy = Policy(overlap=False)
    estimate = estimate_memory(matrices(16), 8, policy, layers="blocks/*")
    sharded = estimate.sharded
    assert sharded.gathered == sharded.full_grads == sharded.buckets == 4 * MIB
    assert sharded.total == 4 * (16 * 4 * MIB // 8) + 2 * 4 * MIB


def test_overlap_costs_one_more_layer_in_a_list_and_two_in_a_scan() -> None:
    stack = {"blocks": {"w": jax.ShapeDtypeStruct((16, 1024, 1024), "float32")}}
    for params, named, more in (
        (matrices(16), {"layers": "blocks/*"}, 1),
        (stack, {"stacked": "blocks"}, 2),
    ):
        options: Any = named
        alone = estimate_memory(params, 8, Policy(overlap=False), **options)
        beside = estimate_memory(params, 8, **options)
        assert beside.total - alone.total == more * 4 * MIB
        assert beside.fullest != alone.fullest


@pytest.mark.parametrize(
    ("count", "ranks", "options"),
    [(1, 8, {}), (16, 1, {}), (16, 1, {"replicas": 2, "sync": "replicas_last"})],
    ids=str,
)
def test_what_has_nothing_beside_it_costs_no_more(
    count: int, ranks: int, options: Any
) -> None:
    with_overlap, without = (
        estimate_memory(
            matrices(count), ranks, Policy(overlap=on), layers="blocks/*", **options
        )
        for on in (True, False)
    )
    assert with_overlap == without


def test_a_loop_over_microbatches_keeps_parameters_for_the_next() -> None:
    once = estimate_memory(matrices(16), 8)
    looped = estimate_memory(matrices(16), 8, accumulate=4)
    assert looped.total - once.total == once.sharded.gathered
    assert looped.sharded.grads == once.sharded.grads


def test_full_gradients_are_counted_when_they_meet_last() -> None:
    policy = Policy(compute_dtype="bfloat16", transport="xla")
    last = estimate_memory(matrices(16), 8, policy, accumulate=4, sync="last")
    # In full, and the first shard.
    assert last.sharded.grads == 16 * 4 * MIB + 4 * MIB // 8
    assert last.sharded.full_grads == 2 * MIB


def test_replicas_change_nothing_but_the_sum_over_them() -> None:
    options: Any = {"replicas": 2, "accumulate": 2}
    each = estimate_memory(matrices(4), 4, **options)
    assert each.sharded == estimate_memory(matrices(4), 4, accumulate=2).sharded
    last = estimate_memory(matrices(4), 4, sync="replicas_last", **options)
    assert last.sharded.grads == 2 * each.sharded.grads


def test_the_optimizer_is_asked_for_its_state_on_shards() -> None:
    params = matrices(4)
    sharded = [
        estimate_memory(params, 4, optimizer=optimizer).sharded
        for optimizer in (optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1))
    ]
    assert [b.optimizer for b in sharded] == [
        0,
        sharded[0].params,
        2 * sharded[0].params + 4,
    ]


def test_small_leaves_stay_whole() -> None:
    params = {"w": jax.ShapeDtypeStruct((64,), "float32")}
    cut, whole = (
        estimate_memory(params, 8, min_shard_numel=n).sharded for n in (0, 65)
    )
    assert (cut.params, whole.params) == (32, 256)
    # It is its own gathered form.
    assert (cut.gathered, whole.gathered) == (256, 0)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_unsharded_holds_everything_in_full(options: Any) -> None:
    full = estimate_memory(matrices(4), 8, **options).unsharded
    n = 4 * 4 * MIB
    assert (full.params, full.optimizer, full.full_grads) == (n, 2 * n, n)
    assert full.total == (5 if options else 4) * n


def test_table_adds_up() -> None:
    estimate = estimate_memory(matrices(8), 8, layers="blocks/*")
    lines = str(estimate).splitlines()
    assert lines[0].split() == ["bytes", "per", "device", "8", "ranks", "unsharded"]
    rows = [line.rsplit(maxsplit=4)[1:4:2] for line in lines[1:-1]]
    for column in zip(*rows, strict=True):
        *parts, total = map(float, column)
        assert sum(parts) == pytest.approx(total, abs=0.3)
    assert "Activations" in lines[-1]


def test_is_plain_data() -> None:
    estimate = estimate_memory(matrices(1), 2)
    data = json.loads(json.dumps(estimate.asdict()))
    assert data["sharded"]["total"] == estimate.total
    assert hash(estimate) == hash(estimate_memory(matrices(1), 2))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"axis_size": 0}, ValueError, "axis_size=0"),
        ({"axis_size": 2.0}, TypeError, "axis_size=2.0"),
        ({"replicas": 0}, ValueError, "replicas=0"),
        ({"accumulate": 0}, ValueError, "accumulate=0"),
        ({"sync": "never"}, ValueError, "sync='never'"),
        (
            {"sync": "replicas_last"},
            ValueError,
            "estimate_memory: sync='replicas_last' needs replicas above 1",
        ),
        ({"layers": "layer/*"}, ValueError, "'layer/*'"),
    ],
    ids=str,
)
def test_wrong_options_are_named(
    arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        estimate_memory(matrices(1), **({"axis_size": 2} | arguments))
