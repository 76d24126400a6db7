"""The demo's options: their help, their defaults, and what is refused."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from jaxzero._cli.arguments import Parser, UsageError, add_count, whole_number
from jaxzero._cli.demo.check import CHECKED_STEPS, COMPUTE_TOLERANCES, TOLERANCES
from jaxzero._cli.demo.model import HEAD_WIDTH

PLOT_ENDINGS = (".pdf", ".png", ".svg")

DESCRIPTION = """\
Trains a byte-level transformer on the source files of Python's standard library with
jaxzero.zero3. Several CPU devices in one process share the work: parameters, gradients
and Adam's state are all sharded, the microbatches of a step are summed into float32
shards, and clipping uses the norm of the whole gradient.
"""

EXAMPLES = """\
examples:
  python -m jaxzero demo
      eight devices, about a minute on two cores
  python -m jaxzero demo --check --comm-dtype float32
      the same, compared with an unsharded run
  python -m jaxzero demo --layers
      full parameters of one block at a time: see the temporary bytes
  python -m jaxzero demo --replicas 2 --check
      hybrid sharding: two copies of the state, each over four devices
  python -m jaxzero demo --compute-dtype float16 --check
      mixed precision with a loss scale, compared with float32
  python -m jaxzero demo --check --plot demo.png
      draw both loss curves and the memory per device
  python -m jaxzero demo --devices 4 --steps 20 --json | tail -n 1
      a summary for scripts

exit codes: 0 done; 1 the check failed or the loss is not finite; 2 wrong arguments,
or a package or the native module is missing
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line asks for, checked."""

    devices: int
    replicas: int
    steps: int
    batch: int
    accumulate: int
    layers: bool
    compute_dtype: str
    comm_dtype: str
    seed: int
    blocks: int
    width: int
    length: int
    check: bool
    plot: Path | None
    json: bool

    @property
    def shards(self) -> int:
        """Devices that each copy of the state is spread over."""
        return self.devices // self.replicas


def demo_parser() -> Parser:
    """Returns the parser; its defaults fit two cores and two minutes."""
    parser = Parser(
        prog="python -m jaxzero demo",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    add_count(run, "--devices", 8, 1024, "CPU devices")
    add_count(run, "--replicas", 1, 1024, "copies of the state, each over devices / N")
    add_count(run, "--steps", 100, 10**6, "optimizer steps")
    add_count(run, "--batch", 64, 2**16, "sequences per step, over all of its parts")
    add_count(run, "--accumulate", 4, 1024, "parts of a step that are accumulated")
    run.add_argument(
        "--layers",
        action="store_true",
        help="gather one block at a time, in forward and backward, not all at once",
    )
    run.add_argument(
        "--compute-dtype",
        choices=tuple(COMPUTE_TOLERANCES),
        default="float32",
        help="dtype of gathered parameters and their products; float16 gets a loss"
        " scale, bfloat16 takes several times as long on CPUs (default float32)",
    )
    run.add_argument(
        "--comm-dtype",
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
    add_count(model, "--blocks", 3, 128, "transformer blocks")
    add_count(model, "--width", 256, 4096, f"channels, a multiple of {HEAD_WIDTH}")
    add_count(model, "--length", 64, 2048, "bytes that each sequence predicts")
    output = parser.add_argument_group("output")
    tolerances, computed = (
        ", ".join(f"{value:g} for {dtype}" for dtype, value in table.items() if value)
        for table in (TOLERANCES, COMPUTE_TOLERANCES)
    )
    output.add_argument(
        "--check",
        action="store_true",
        help=f"repeat the first {CHECKED_STEPS} steps unsharded, in float32; fail if a"
        f" loss differs by a larger fraction than {tolerances} on the wire, or"
        f" {computed} in computing",
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
    parts = options.devices * options.accumulate
    if options.devices % options.replicas:
        raise UsageError(
            f"--replicas {options.replicas} does not divide {options.devices} devices;"
            f" try --devices {_nearest(options.devices, options.replicas)}"
        )
    if options.batch % parts:
        raise UsageError(
            f"--batch {options.batch} does not divide by {options.devices} devices x"
            f" {options.accumulate} microbatches; try --batch"
            f" {_nearest(options.batch, parts)}"
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


def _nearest(number: int, factor: int) -> int:
    """Returns the positive multiple of ``factor`` that is nearest to ``number``."""
    return max(1, round(number / factor)) * factor


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
