import itertools
from collections.abc import Callable, Iterator

import pytest

from jaxzero._cli.bench import timing
from jaxzero._cli.bench.timing import interleaved_medians


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A clock that only calls move."""
    now = {"seconds": 0.0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now["seconds"])
    return now


def test_calls_take_turns_and_each_timed_run_follows_an_untimed_one() -> None:
    order: list[str] = []
    calls: dict[str, Callable[[], None]] = {
        name: lambda name=name: order.append(name) for name in "ab"
    }
    interleaved_medians(calls, 2, warmups=3, at_once=2)
    runs = [(name, len(list(group))) for name, group in itertools.groupby(order)]
    assert runs == [("a", 3), ("b", 3)] + 2 * [("a", 3), ("b", 3)]


def test_medians_are_of_timed_runs_and_per_call(clock: dict[str, float]) -> None:
    def takes(durations: Iterator[float]) -> Callable[[], None]:
        def call() -> None:
            clock["seconds"] += next(durations)

        return call

    # One warm-up; then an untimed call and two timed ones, three times.
    calls = {
        "steady": takes(itertools.repeat(4.0)),
        "noisy": takes(iter([99, 99, 1, 3, 99, 5, 7, 99, 50, 70])),
    }
    assert interleaved_medians(calls, 3, warmups=1, at_once=2) == {
        "steady": 4.0,
        "noisy": 6.0,
    }
