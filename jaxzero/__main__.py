"""``python -m jaxzero COMMAND``: picks a command and imports only that one."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "bench": "time it here against what you would write without it",
    "demo": "train a small transformer with everything sharded, on CPU devices",
    "doctor": "say what is installed, what works, and how to fix the rest",
    "plan": "show buckets and memory of a known model, without a device",
}

HELP = """\
usage: python -m jaxzero COMMAND [options]

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

exit codes: 0 done; 1 a command found something wrong; 2 wrong arguments
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
    if name not in COMMANDS:
        print(
            f"python -m jaxzero: error: no command {name!r}; the commands are"
            f" {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    command = importlib.import_module(f"jaxzero._cli.{name}")
    exit_code: int = command.main(rest)
    return exit_code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return HELP.format(commands="\n".join(lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
