"""Runs the launcher as a process, and finds what it left behind."""

import dataclasses
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

LAUNCHER = [sys.executable, "-m", "jaxzero", "launch"]
_MARK = "JAXZERO_TEST_RUN"


@dataclasses.dataclass(frozen=True)
class Finished:
    """A launcher that has ended."""

    code: int
    output: str
    seconds: float


class Launcher:
    """A running launcher, whose every descendant is marked."""

    def __init__(self, *arguments: str) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._start = time.monotonic()
        name, value = self._mark.split("=")
        self.process = subprocess.Popen(
            [*LAUNCHER, *arguments],
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the launcher if a failed assertion has left it running."""
        self.process.kill()
        self.process.communicate()

    def finish(self) -> Finished:
        """Waits for the launcher, whose own limit is below that."""
        output, _ = self.process.communicate(timeout=300)
        seconds = time.monotonic() - self._start
        return Finished(self.process.returncode, output, seconds)

    def alive(self) -> list[str]:
        """Returns the commands of the marked processes that are still alive."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(
                    b"\0"
                ):
                    command = (folder / "cmdline").read_bytes()
                    found.append(command.replace(b"\0", b" ").decode())
            except (OSError, ValueError):
                continue
        return found

    def assert_nothing_left(self) -> None:
        """Asserts that no marked process outlives the launcher by 5 seconds."""
        wait_until(lambda: not self.alive(), 5, "the end of all processes")


def launch(*arguments: str) -> Finished:
    """Runs the launcher, and asserts that it leaves no process behind."""
    with Launcher(*arguments) as launcher:
        finished = launcher.finish()
        launcher.assert_nothing_left()
    return finished


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits for a condition, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
