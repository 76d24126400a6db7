"""``python -m jaxzero COMMAND``: picks a command and imports only that one."""

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from jaxzero import _interrupt

COMMANDS = {
    "bench": "time it here against what you would write without it",
    "demo": "train a small transformer with everything sharded, on CPU devices",
    "doctor": "say what is installed, what works, and how to fix the rest",
    "launch": "run a program as several ranks on this machine",
    "plan": "show buckets and memory of a known model, without a device",
}

NEED_NATIVE_MODULE = ("bench", "demo")

NO_NATIVE_MODULE = """\
python -m jaxzero: error: jaxzero's native module is not built here; run\
 `pip install -e .` in the source folder, or leave that folder if jaxzero is installed\
"""

HELP = """\
usage: python -m jaxzero COMMAND [options]
       python -m jaxzero --version

ZeRO-3 gradient and parameter sharding for JAX.

commands:
{commands}

examples:
  python -m jaxzero doctor
      does it work here?
  python -m jaxzero plan --model gpt2
      what would a training step need on each GPU?
  python -m jaxzero bench --help
      the options, examples and exit codes of one command

exit codes: 0 done; 1 something is wrong or output cannot be written; 2 wrong arguments,
or a part that is needed is missing; 130 stopped by Ctrl-C; 141 nobody reads the output
"""


def main(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: the command line after ``python -m jaxzero``.

    Returns:
        The exit code.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if name == "--version":
        print(f"jaxzero {importlib.import_module('jaxzero').__version__}")
        return 0
    if name not in COMMANDS:
        print(
            f"python -m jaxzero: error: no command {name!r}; the commands are"
            f" {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    is_help = not {"-h", "--help"}.isdisjoint(rest)
    if name in NEED_NATIVE_MODULE and not is_help and not _has_native_module():
        print(NO_NATIVE_MODULE, file=sys.stderr)
        return 2
    command = importlib.import_module(f"jaxzero._cli.{name}.command")
    _interrupt.raise_again()
    exit_code: int = command.main(rest)
    return exit_code


def run(arguments: Sequence[str]) -> int:
    """Runs one command; an interrupt and output that cannot be written end it quietly.

    Args:
        arguments: the command line after ``python -m jaxzero``.

    Returns:
        The exit code.
    """
    try:
        try:
            return main(arguments)
        finally:
            # Here, where a failure can still be told, and not as Python exits. By
            # print, because a program that was started without output has no stdout.
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141  # As of a program that SIGPIPE ends.
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"python -m jaxzero: error: output: {error.strerror}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Sends what is still to be written nowhere, or Python would fail at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_native_module() -> bool:
    return importlib.util.find_spec("jaxzero._cpu") is not None


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return HELP.format(commands="\n".join(lines))


if __name__ == "__main__":
    exit_code = run(sys.argv[1:])
    # The usual exit waits for other ranks, and XLA aborts in it if work still runs.
    importlib.import_module("jaxzero.distributed").exit_on_failure(exit_code)
