"""Ctrl-C while ``python -m jaxzero`` imports JAX, which takes a second or more.

Python imports `jaxzero`, and JAX with it, before `jaxzero.__main__` can catch anything.
The default handler would raise inside some import, which may hide the interrupt, and
show a traceback. So the import of this file, the first of `jaxzero`, makes Ctrl-C end a
command that is being started; for any other program it changes nothing.
"""

import os
import signal
import sys
from types import FrameType


def raise_again() -> None:
    """Makes Ctrl-C raise `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    # While Python looks for the module of -m, its first argument is "-m".
    if sys.argv[:1] != ["-m"]:
        return False
    return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "jaxzero"


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(130)


# Not where a shell has told its background jobs to ignore interrupts.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
