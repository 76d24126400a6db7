"""The options of `bench`: their help, and their defaults, which the machine picks."""

import argparse
import dataclasses
from collections.abc import Sequence

import jax

from jaxzero import Policy
from jaxzero._cli.arguments import Parser, whole_number
from jaxzero._cli.bench.comparison import Request
from jaxzero._cli.bench.devices import CPU_DEVICES
from jaxzero._cli.bench.trees import TREES

PROG = "python -m jaxzero bench"
DTYPES = ("float32", "bfloat16", "float16")
REPEATS = 7

DESCRIPTION = """\
Times jaxzero.shard_grads against what a JAX user would write instead, on the devices
of this machine: one psum_scatter per leaf, leaves concatenated by dtype, and on GPUs
all leaves in one NCCL group. All do the same work: cast, sum, divide, add to donated
float32 accumulators. The limit is the same bytes in one flat leaf per dtype; on one
device, a pass over as much memory. All take turns in one process, and medians are
compared. jaxzero's result is checked first.
"""

EPILOG = f"""\
trees:
  gpt2          GPT-2 124M, 148 leaves; the default on GPUs
  gpt2-quarter  the same at a quarter of its width, 15 M parameters; the default on
                CPU devices, where it takes about half a minute on two cores
  layer         one layer of gpt2-quarter, 12 leaves; the default on CPU devices of
                several processes
  awkward       72 uneven leaves of two dtypes
  small         1000 leaves of 100 elements; compiling its rivals takes a minute there

examples:
  {PROG}
      all GPUs of this machine, or {CPU_DEVICES} CPU devices
  {PROG} --tree gpt2-quarter layer --devices 4
      two trees over four CPU devices
  {PROG} --grads bfloat16 --comm-dtype float32
      gradients in bfloat16 that travel and are summed in float32
  {PROG} --json > bench.json
      one JSON object for scripts: environment, and a row for each time
  python -m jaxzero launch -n 4 --platform cuda -- {PROG}
      one process per GPU; the first one prints
  srun {PROG}
      the same on a cluster

exit codes: 0 done; 1 jaxzero returned wrong numbers; 2 wrong arguments, the tree does
not fit into memory, or a native module is missing
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the command line asks for; None and () leave it to the machine."""

    tree: Sequence[str]
    devices: int | None
    grads: Sequence[str]
    comm_dtype: str | None
    reduction: str
    repeats: int
    json: bool


def parse_options(arguments: Sequence[str]) -> BenchOptions:
    """Reads the command line."""
    parser = Parser(
        prog=PROG,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--tree",
        nargs="+",
        choices=tuple(TREES),
        default=(),
        metavar="NAME",
        help=f"one or more of {', '.join(TREES)} (default: see below)",
    )
    run.add_argument(
        "--devices",
        type=whole_number(1, 1024),
        metavar="N",
        help=f"CPU devices (default {CPU_DEVICES}); GPUs are all used",
    )
    run.add_argument(
        "--repeats",
        type=whole_number(1, 10_000),
        default=REPEATS,
        metavar="N",
        help=f"timed runs of each way (default {REPEATS})",
    )
    policy = parser.add_argument_group("the policy")
    policy.add_argument(
        "--grads",
        nargs="+",
        choices=DTYPES,
        default=(),
        metavar="DTYPE",
        help="dtypes of gradients, which leaves take in turn (default: bfloat16 on"
        " GPUs, float32 on CPUs; of awkward both)",
    )
    policy.add_argument(
        "--comm-dtype",
        choices=DTYPES,
        help="dtype in which gradients travel (default: their own)",
    )
    policy.add_argument(
        "--reduction",
        choices=("native", "float32"),
        default="native",
        help="how jaxzero sums: in the collective, or exchanged and summed in float32;"
        " rivals always sum in the collective (default native)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return BenchOptions(**vars(parser.parse_args(arguments)))


def requests(
    options: BenchOptions, devices: Sequence[jax.Device]
) -> dict[str, Request]:
    """Returns what to compare, by tree."""
    on_cpu = devices[0].platform == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    return {
        name: Request(
            tree=TREES[name](),
            dtypes=options.grads
            or (("bfloat16", "float32") if name == "awkward" else (dtype,)),
            policy=Policy(comm_dtype=options.comm_dtype, reduction=options.reduction),  # type: ignore[arg-type]  # one of its choices
            devices=devices,
            repeats=options.repeats,
        )
        for name in options.tree or (_default_tree(on_cpu),)
    }


def _default_tree(on_cpu: bool) -> str:
    if not on_cpu:
        return "gpt2"
    # XLA's CPU collectives between processes may be wrong for leaves of several MiB.
    # See: https://github.com/jax-ml/jax/issues/40830
    return "layer" if jax.process_count() > 1 else "gpt2-quarter"
