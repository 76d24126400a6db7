"""Processes that live and die together: started, waited for, ended as one.

Every rank leads a process group of its own, so that ending the group ends whatever
the rank started too. A watchdog process ends the groups if the launcher itself is
killed. A rank does not start its program before the watchdog knows its group, so
there is no moment in which a rank could be forgotten.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_WATCHDOG = Path(__file__).with_name("watchdog.py")

# Waits for a line, then becomes the program. No core files, because a rank that
# hangs is aborted to make it show where.
_GATE = 'ulimit -c 0; read -r _ && exec "$@" </dev/null'

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STACK_DUMP_S = 2.0
_DEATH_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One rank's program: its command, environment and the file for its output."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: at most one of the first three says why it ended early.

    Attributes:
      failed: the first rank that ended with an error, and its exit status as
        `subprocess` gives it: negative for a signal.
      overdue: ranks that were still running when the time was up.
      stopped: the signal that told the launcher to stop.
      seconds: how long the run took.
    """

    failed: tuple[int, int] | None = None
    overdue: tuple[int, ...] = ()
    stopped: signal.Signals | None = None
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Ended:
    """A rank has ended."""

    rank: int
    status: int


_Events = queue.SimpleQueue[_Ended | signal.Signals]


def run(programs: Sequence[Program], timeout_s: float) -> Outcome:
    """Runs programs until all are done, one fails, the time is up, or a stop signal.

    When this returns, no process of theirs is left.
    """
    start = time.monotonic()
    events: _Events = queue.SimpleQueue()
    with _stop_signals_into(events), _group(programs, events) as ranks:
        running = set(range(len(ranks)))
        failed: tuple[int, int] | None = None
        overdue: tuple[int, ...] = ()
        stopped: signal.Signals | None = None
        while running and failed is None and stopped is None:
            left_s = start + timeout_s - time.monotonic()
            try:
                event = events.get(timeout=max(left_s, 0.0))
            except queue.Empty:
                overdue = tuple(sorted(running))
                _dump_stacks([ranks[rank] for rank in overdue])
                break
            if isinstance(event, signal.Signals):
                stopped = event
                continue
            running.remove(event.rank)
            if event.status:
                failed = (event.rank, event.status)
        seconds = time.monotonic() - start
    return Outcome(failed=failed, overdue=overdue, stopped=stopped, seconds=seconds)


class _Rank:
    """One running program, and the thread that waits for its end."""

    def __init__(self, number: int, program: Program, events: _Events) -> None:
        with program.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GATE, "rank", *program.command],
                env=dict(program.environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._number = number
        self._events = events
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    @property
    def group(self) -> int:
        """The rank's process group: the process that leads it."""
        return self._process.pid

    def open_gate(self) -> None:
        """Lets the program start."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as gate:
            gate.write(b"\n")

    def abort(self) -> None:
        """Makes a Python program write the stacks of its threads and die."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)

    def kill(self) -> None:
        """Kills the program and everything in its group."""
        if self._process.returncode is None:
            self._kill_group()

    def join(self, timeout_s: float) -> None:
        """Waits until the program is gone."""
        self._thread.join(timeout_s)

    def _wait(self) -> None:
        # The process is left unreaped until its group has been killed, so that the
        # number of the group cannot have been given to another one.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._kill_group()
        self._events.put(_Ended(self._number, self._process.wait()))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _group(programs: Sequence[Program], events: _Events) -> Iterator[list[_Rank]]:
    """Starts the programs, and kills what is left of them at the end."""
    ranks: list[_Rank] = []
    with _watchdog() as watched:
        try:
            for number, program in enumerate(programs):
                ranks.append(_Rank(number, program, events))
                watched(ranks[-1].group)
            for rank in ranks:
                rank.open_gate()
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.join(_DEATH_S)


@contextlib.contextmanager
def _watchdog() -> Iterator[Callable[[int], None]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_WATCHDOG)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None
    pipe = process.stdin

    def write(line: object) -> None:
        print(line, file=pipe, flush=True)

    try:
        yield write
    finally:
        with contextlib.suppress(BrokenPipeError), pipe:
            write("done")
        process.wait()


@contextlib.contextmanager
def _stop_signals_into(events: _Events) -> Iterator[None]:
    """Turns stop signals into events, so that none can interrupt the clean-up."""
    before = {
        number: signal.signal(
            number, lambda number, _: events.put(signal.Signals(number))
        )
        for number in _STOP_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.abort()
    deadline = time.monotonic() + _STACK_DUMP_S
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0.0))
