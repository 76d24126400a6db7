"""Ends process groups when the process that started them is gone.

A program of its own, without imports beyond the standard library's core. It reads
process group ids from stdin, one per line. The end of the input means that the
launcher died, however that happened: all groups are killed. The line "done" means
that the launcher has ended them itself.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads group ids until the input ends, then kills the groups."""
    groups = []
    for line in sys.stdin:
        if line == "done\n":
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
