"""The demo's options: their help, their defaults, and what is refused."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from jaxzero._cli.arguments import Parser, UsageError, whole_number
from jaxzero._cli.check import CHECKED_STEPS, TOLERANCES
from jaxzero._cli.model import HEAD_WIDTH

PLOT_ENDINGS = (".pdf", ".png", ".svg")

DESCRIPTION = """\
Trains a byte-level transformer on the source files of Python's standard library.
Several CPU devices in one process share the work as in ZeRO-3: parameters, gradients
and Adam's state are all sharded, the microbatches of a step are summed into float32
shards, and clipping uses the norm that the last reduction returns.
"""

EXAMPLES = """\
examples:
  python -m jaxzero demo
      eight devices, about a minute on two cores
  python -m jaxzero demo --check --wire float32
      the same, compared with an unsharded run
  python -m jaxzero demo --check --plot demo.png
      draw both loss curves and the memory per device
  python -m jaxzero demo --devices 4 --steps 20 --json | tail -n 1
      a summary for scripts

exit codes: 0 done; 1 the check failed or the loss is not finite; 2 wrong arguments
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line asks for, checked."""

    devices: int
    steps: int
    batch: int
    microbatches: int
    wire: str
    seed: int
    layers: int
    width: int
    length: int
    check: bool
    plot: Path | None
    json: bool


def demo_parser() -> Parser:
    """Returns the parser; its defaults fit two cores and two minutes."""
    parser = Parser(
        prog="python -m jaxzero demo",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    _add_count(run, "--devices", 8, "CPU devices")
    _add_count(run, "--steps", 100, "optimizer steps")
    _add_count(run, "--batch", 64, "sequences per step, over devices and microbatches")
    _add_count(run, "--microbatches", 4, "parts of a step that are accumulated")
    run.add_argument(
        "--wire",
        choices=tuple(TOLERANCES),
        default="bfloat16",
        help="dtype in which gradients travel (default bfloat16)",
    )
    run.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="of parameters and data (default 0)",
    )
    model = parser.add_argument_group("the model")
    _add_count(model, "--layers", 3, "transformer blocks")
    _add_count(model, "--width", 256, f"channels, a multiple of {HEAD_WIDTH}")
    _add_count(model, "--length", 64, "bytes that each sequence predicts")
    output = parser.add_argument_group("output")
    tolerances = ", ".join(
        f"{value:g} for {wire}" for wire, value in TOLERANCES.items()
    )
    output.add_argument(
        "--check",
        action="store_true",
        help=f"repeat the first {CHECKED_STEPS} steps unsharded; fail if a loss differs"
        f" by a larger fraction than {tolerances}",
    )
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw losses and memory; the ending is one of {', '.join(PLOT_ENDINGS)}",
    )
    output.add_argument(
        "--json", action="store_true", help="print a summary as the last line"
    )
    return parser


def parse_options(parser: Parser, arguments: Sequence[str]) -> DemoOptions:
    """Reads the command line and refuses, before any work, what cannot be done.

    Raises:
        UsageError: for options that do not fit together or the machine.
    """
    options = DemoOptions(**vars(parser.parse_args(arguments)))
    parts = options.devices * options.microbatches
    if options.batch % parts:
        nearest = max(1, round(options.batch / parts)) * parts
        raise UsageError(
            f"--batch {options.batch} does not divide by {options.devices} devices x"
            f" {options.microbatches} microbatches; try --batch {nearest}"
        )
    if options.width % HEAD_WIDTH:
        nearest = -(-options.width // HEAD_WIDTH) * HEAD_WIDTH
        raise UsageError(
            f"--width {options.width} is no multiple of {HEAD_WIDTH};"
            f" try --width {nearest}"
        )
    _check_installed("optax")
    if options.plot is not None:
        _check_installed("matplotlib")
        _check_writable(options.plot)
    return options


def _add_count(
    group: argparse._ArgumentGroup, name: str, default: int, text: str
) -> None:
    group.add_argument(
        name,
        type=whole_number(1),
        default=default,
        metavar="N",
        help=f"{text} (default {default})",
    )


def _check_installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"{name} is not installed: pip install 'jaxzero[demo]'")


def _check_writable(path: Path) -> None:
    if path.suffix.lower() not in PLOT_ENDINGS:
        raise UsageError(
            f"--plot {path}: the name must end in one of {', '.join(PLOT_ENDINGS)}"
        )
    existed = path.exists()
    try:
        # Permission bits do not tell (root, read-only mounts), so try it.
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}") from error
    if not existed:
        path.unlink()
