"""Runs a Python program, and ends the process without a barrier if it fails.

A program of its own, on the standard library only: `program.py script.py ...`,
`program.py -m module ...` or `program.py -c code ...`, as for the interpreter. The
interpreter's own way out would first wait for the other ranks, which may wait for
this one: `jax.distributed` has a barrier there.

A rank that ends closes its connections, and so makes the ranks that wait for it fail
too. The launcher must see the cause before the effects, also where the cause was
killed and takes its time to be gone. So whatever fails here lingers, connections open.
"""

import os
import runpy
import sys
import time
import traceback
from types import TracebackType

_LINGER_S = 1.0


def main(arguments: list[str]) -> None:
    """Runs what the arguments of an interpreter say."""
    status: object = 1
    try:
        _run(arguments)
        return
    except SystemExit as request:
        status = request.code
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_own_part(error.__traceback__)))
    if status is None or status == 0:
        return
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_LINGER_S)
    os._exit(status & 0xFF or 1)


def _run(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-m":
        name, *rest = rest
        _see_modules_of("")
        sys.argv = [name, *rest]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *rest = rest
        _see_modules_of("")
        sys.argv = ["-c", *rest]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        _see_modules_of(os.path.dirname(os.path.abspath(first)))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Leaves out the frames that lead to the program."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _see_modules_of(folder: str) -> None:
    """Puts a folder where the interpreter has put that of this file."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


if __name__ == "__main__":
    main(sys.argv[1:])
