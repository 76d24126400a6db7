from typing import Any

import jax
import numpy as np
import pytest
from cli.bench.tiny import TREE

from jaxzero import Policy
from jaxzero._cli.bench import comparison, rivals
from jaxzero._cli.bench.comparison import (
    Request,
    WrongNumbersError,
    compare,
    wire_bytes,
)

NUMEL = 24 * 16 + 13 + 3 * 5 * 7 + 1


def request_over(devices: int, **changed: Any) -> Request:
    settings = {
        "tree": TREE,
        "dtypes": ["bfloat16", "float32"],
        "policy": Policy(),
        "devices": jax.devices()[:devices],
        "repeats": 1,
    }
    return Request(**settings | changed)


@pytest.mark.parametrize(
    ("devices", "limit"), [(1, "as many bytes read and written"), (4, "one flat leaf")]
)
def test_all_ways_are_timed_beside_the_limit(devices: int, limit: str) -> None:
    timings = compare(request_over(devices))
    assert [(timing.how, timing.kind) for timing in timings] == [
        ("jaxzero", "jaxzero"),
        ("per leaf", "rival"),
        ("concatenated", "rival"),
        (limit, "limit"),
    ]
    ours = timings[0]
    for timing in timings:
        assert timing.ms > 0
        assert timing.ratio_to_jaxzero == pytest.approx(timing.ms / ours.ms)


def test_wrong_numbers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(policy: Policy, grads: Any, into: Any) -> Any:
        return {name: old + 1 for name, old in into.items()}

    def timed(*_: Any, **__: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(rivals, "ours", wrong)
    monkeypatch.setattr(comparison, "interleaved_medians", timed)
    with pytest.raises(WrongNumbersError, match="leaf 'kernel'"):
        compare(request_over(2))


def test_the_limit_has_the_bytes_of_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    own = request_over(4)
    assert wire_bytes(own) == {
        "bfloat16": 2 * (24 * 16 + 3 * 5 * 7),
        "float32": 4 * (13 + 1),
    }
    cast = request_over(4, policy=Policy(comm_dtype="float16"))
    assert wire_bytes(cast) == {"float16": 2 * NUMEL}
    seen = []
    monkeypatch.setattr(
        comparison.limits, "flat_call", lambda *call: seen.append(call) or (lambda: 0)
    )
    compare(cast)
    ((sizes, devices),) = seen
    assert sizes == {"float16": 2 * NUMEL} and len(devices) == 4


def test_one_rank_moves_gradients_and_accumulators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        comparison.limits,
        "memory_call",
        lambda count, _: seen.append(count) or (lambda: np.zeros(1)),
    )
    compare(request_over(1, dtypes=["bfloat16"]))
    assert seen == [10 * NUMEL]
