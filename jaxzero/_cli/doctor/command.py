"""``python -m jaxzero doctor``: what is installed, what works, how to fix the rest."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence

from jaxzero._cli.arguments import Parser, whole_number
from jaxzero._cli.doctor import install, libnccl
from jaxzero._cli.doctor import machine as machines
from jaxzero._cli.doctor.collectives import collectives
from jaxzero._cli.doctor.fact import Fact, as_text, guarded, summary
from jaxzero._cli.doctor.limit import TimeLimit
from jaxzero._cli.doctor.self_test import self_test

DESCRIPTION = """\
Reports versions, devices, native modules, libnccl and the transport that is used, then
reduce-scatters and gathers a small tree over all local devices and compares the result
with NumPy. Below each problem stands what to do about it.
"""

EPILOG = """\
examples:
  python -m jaxzero doctor
      everything, in seconds
  python -m jaxzero doctor --timeout 20
      where a reduction may hang: says at which step
  python -m jaxzero doctor --json
      one JSON object for scripts: ok, facts, problems
  srun --ntasks-per-node=1 python -m jaxzero doctor
      each machine of a cluster by itself

exit codes: 0 all is well; 1 a problem or a failed self-test; 2 wrong arguments
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(
        prog="python -m jaxzero doctor",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout",
        type=whole_number(1, 24 * 3600),
        default=120,
        metavar="SECONDS",
        help="the most that each check on devices may take (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    limit = TimeLimit(options.timeout)
    facts = []
    for fact in examine(limit):
        facts.append(fact)
        if not options.json:
            # At once: a later check may take long, or the process with it.
            print(as_text(fact), flush=True)
    if options.json:
        print(json.dumps(summary(facts)))
    exit_code = int(any(fact.fix for fact in facts))
    if limit.was_exceeded:
        # At a normal exit JAX would wait for the devices that hang.
        sys.stdout.flush()
        os._exit(exit_code)
    return exit_code


def examine(limit: TimeLimit) -> Iterator[Fact]:
    """Makes every check; none of them can keep the others from being made."""
    yield from guarded("versions", install.versions)
    # Before anything asks for devices, which may hang for what a variable says.
    yield from guarded("environment", install.environment)
    machine = machines.find_machine(limit)
    yield from guarded("CUDA plugin", machines.plugin, machine)
    yield from guarded("devices", machines.devices, machine)
    yield from guarded("CPU module", install.cpu_module)
    yield from guarded("CUDA module", install.cuda_module, machine.has_gpu)
    yield from guarded(
        "collectives extension", collectives, machine.cuda_devices, limit
    )
    yield from guarded("transport", install.transport)
    yield from guarded("latency hiding scheduler", machines.latency_hiding, machine)
    # XLA loads libnccl for its first collective, which is this one.
    tested = list(guarded("self-test", self_test, machine, limit))
    yield from guarded("libnccl", libnccl.libnccl, len(machine.cuda_devices))
    yield from tested
