"""``python -m jaxzero bench``: jaxzero, its rivals and the limit, side by side."""

import json
import sys
from collections.abc import Sequence

import jax

from jaxzero._cli.arguments import UsageError
from jaxzero._cli.bench.comparison import Request, WrongNumbersError, compare
from jaxzero._cli.bench.devices import devices_here, find_devices
from jaxzero._cli.bench.environment import environment
from jaxzero._cli.bench.memory import free_bytes, needed_bytes
from jaxzero._cli.bench.options import PROG, BenchOptions, parse_options, requests
from jaxzero._cli.bench.report import machine, reading, rows, table, title


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parse_options(arguments)
    try:
        devices = find_devices(options.devices)
        wanted = requests(options, devices)
        for name, request in wanted.items():
            _check_memory(name, request)
        _measure(options, wanted)
    except (UsageError, NotImplementedError) as error:
        # The second where jaxzero has no transport for these devices.
        print(f"{PROG}: error: {error} (see {PROG} --help)", file=sys.stderr)
        return 2
    except WrongNumbersError as error:
        print(
            f"{PROG}: jaxzero is wrong, so nothing is timed: {error}", file=sys.stderr
        )
        return 1
    return 0


def _measure(options: BenchOptions, wanted: dict[str, Request]) -> None:
    """Measures on all ranks, and prints on the first one."""
    is_first = jax.process_index() == 0
    is_text = is_first and not options.json
    all_rows = []
    if is_text:
        print(machine(environment()), flush=True)
    for name, request in wanted.items():
        if is_text:
            # At once: measuring takes a while.
            print(title(name, request), flush=True)
        timings = compare(request)
        all_rows += rows(name, request, timings)
        if is_text:
            print(f"\n{table(timings)}\n\n{reading(request, timings)}", flush=True)
    if is_first and options.json:
        print(json.dumps({"environment": environment(), "rows": all_rows}))


def _check_memory(name: str, request: Request) -> None:
    device = jax.local_devices()[0]
    ranks = len(request.devices)
    needed = needed_bytes(
        request.tree, request.dtypes, request.policy.comm_dtype, ranks
    )
    if device.platform == "cpu":
        needed *= devices_here(request.devices)
    free = free_bytes(device)
    if free is not None and needed > free:
        fewer = "fewer --devices, " if device.platform == "cpu" else ""
        raise UsageError(
            f"--tree {name} over {ranks} devices needs about {needed / 1e9:.3g} GB of"
            f" {'memory' if device.platform == 'cpu' else 'GPU memory'}, and"
            f" {free / 1e9:.3g} GB are free; try {fewer}--tree layer"
        )
