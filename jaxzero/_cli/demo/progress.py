"""A progress bar on a terminal, about ten plain lines anywhere else."""

import importlib
import sys
import time
from typing import Protocol

BAR_WIDTH = 24
PLAIN_LINES = 10


class Progress(Protocol):
    """Shows that ``step`` of the total is done, with a few words of state."""

    def update(self, step: int, note: str) -> None: ...

    def close(self) -> None: ...


def make_progress(label: str, total: int) -> Progress:
    """Returns tqdm's bar if it is installed, else our own; lines without a terminal."""
    if not sys.stderr.isatty():
        return _Lines(label, total)
    try:
        return _Tqdm(label, total)
    except ModuleNotFoundError:
        return _Bar(label, total)


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._every = -(-total // PLAIN_LINES)

    def update(self, step: int, note: str) -> None:
        if step == 1 or step == self._total or step % self._every == 0:
            print(f"{self._label} {step:>4}/{self._total}  {note}", flush=True)

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._start = time.monotonic()

    def update(self, step: int, note: str) -> None:
        filled = BAR_WIDTH * step // self._total
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        left = (time.monotonic() - self._start) / step * (self._total - step)
        # Erase to the end of the line: the note may have become shorter.
        sys.stderr.write(
            f"\r{self._label} [{bar}] {step}/{self._total}  {note}"
            f"  {left:.0f} s left\x1b[K"
        )
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\n")


class _Tqdm:
    def __init__(self, label: str, total: int) -> None:
        self._bar = importlib.import_module("tqdm").tqdm(
            total=total, desc=label, dynamic_ncols=True
        )

    def update(self, step: int, note: str) -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.close()
