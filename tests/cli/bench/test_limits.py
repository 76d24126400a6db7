from typing import Any

import jax
import numpy as np
import pytest

from jaxzero._cli.bench import limits


def test_flat_leaves_are_as_many_bytes_per_dtype() -> None:
    call = limits.flat_call({"float32": 80_000, "bfloat16": 4_100}, jax.devices()[:4])
    shards = jax.block_until_ready(call())
    # Results are float32; rounded up to 64 elements a rank.
    assert {k: v.size for k, v in shards.items()} == {
        "float32": 20_224,
        "bfloat16": 2_304,
    }
    assert all(np.asarray(v).any() for v in shards.values())


@pytest.mark.parametrize("fresh", [True, False])
def test_memcpy_copies_every_byte_once(
    monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    targets: list[np.ndarray] = []
    copyto = np.copyto

    def watched(target: np.ndarray, source: np.ndarray) -> None:
        copyto(target, source)
        targets.append(target)

    monkeypatch.setattr(np, "copyto", watched)
    call = limits.memcpy(12_345, fresh=fresh)
    call()
    assert sum(target.size for target in targets) == 12_345
    assert all(target.all() for target in targets)
    first = {id(target.base) for target in targets}
    kept = list(targets)
    targets.clear()
    call()
    assert (first == {id(target.base) for target in targets}) != fresh
    assert len(kept) == len(targets)


def test_memory_is_passed_over_in_place_on_a_device() -> None:
    class Gpu:
        """A CPU device that is told from those by its platform only."""

        platform = "gpu"

    device: Any = jax.devices()[1]
    seen: Any = Gpu()
    seen_array = jax.numpy.ones

    def ones(*arguments: Any, device: Any) -> jax.Array:
        assert device is seen
        return seen_array(*arguments, device=jax.devices()[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits.jnp, "ones", ones)
        call = limits.memory_call(8_000, seen)
    first = call()
    second = call()
    assert first.is_deleted()
    assert second.nbytes == 4_000 and second.devices() == {device}
