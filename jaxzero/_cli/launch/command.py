"""``python -m jaxzero launch``: a program as several ranks on this machine."""

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxzero._cli.arguments import Parser, UsageError, whole_number
from jaxzero._cli.launch import environment
from jaxzero._cli.launch.ranks import Outcome, Program, run

PROG = "python -m jaxzero launch"

DESCRIPTION = """\
Runs COMMAND as N processes on this machine, the ranks of one jax.distributed job.

COMMAND joins the job with jaxzero.distributed.initialize(). "python" and "pytest" mean
those of this interpreter. All ranks end together: when all are done, when one fails
or dies, when the time is up, or when this program is stopped.
"""

EPILOG = f"""\
examples:
  {PROG} -n 4 -- pytest tests/multihost
  {PROG} -n 2 --devices-per-process 4 -- python train.py
  {PROG} -n 4 --platform cuda -- pytest tests/multihost

With --platform cuda, rank r takes GPU r modulo the number of GPUs. Ranks that share
a GPU talk through NCCL's network path: the values are those of a cluster, the speed
is not. On a cluster, start COMMAND with srun instead; it need not know.

exit codes: 0 every rank ended with 0; 2 wrong arguments; 124 the time was up; else that
of the first rank that failed (128 + the signal's number if it died by one)
"""

_PROGRAM = str(Path(__file__).with_name("program.py"))
_TIMED_OUT = 124
_FAILED_LINES = 80
_OVERDUE_LINES = 40
_DUMP = "Fatal Python error"
_DONE_LINES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    processes: int
    timeout_s: int
    platform: str
    devices_per_process: int
    log_dir: Path | None
    command: Sequence[str]


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    try:
        options = parse(arguments)
        environments = _environments(options)
    except UsageError as error:
        print(f"{PROG}: error: {error} (see {PROG} --help)", file=sys.stderr)
        return 2
    with _logs(options) as logs:
        programs = [
            Program(command=options.command, environment=variables, log=log)
            for variables, log in zip(environments, logs, strict=True)
        ]
        outcome = run(programs, options.timeout_s)
        print(report(outcome, logs), end="")
    return _exit_code(outcome)


def parse(arguments: Sequence[str]) -> Options:
    """Returns the checked command line.

    Raises:
      UsageError: for a missing or unknown command.
      SystemExit: for a wrong option, and after `--help`.
    """
    own, command = _split(arguments)
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [options] -- COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        "--processes",
        type=whole_number(1, 1024),
        default=2,
        metavar="N",
        help="ranks to start (2)",
    )
    parser.add_argument(
        "--timeout",
        type=whole_number(1),
        default=300,
        metavar="SECONDS",
        help="when all ranks are killed, after a dump of their stacks (300)",
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda"),
        default="cpu",
        help="devices of the ranks (cpu)",
    )
    parser.add_argument(
        "--devices-per-process",
        type=whole_number(1, 1024),
        default=1,
        metavar="K",
        help="CPU devices of each rank (1)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="keep each rank's whole output in DIR/rank-R.log",
    )
    options, unknown = parser.parse_known_args(own)
    if unknown and command:
        parser.error(f"unknown option {unknown[0]!r}")
    if options.platform == "cuda" and options.devices_per_process != 1:
        parser.error("--devices-per-process is for --platform cpu; a rank has one GPU")
    if not command:
        parser.error("no command; write it after --, such as: -- pytest tests")
    return Options(
        processes=options.processes,
        timeout_s=options.timeout,
        platform=options.platform,
        devices_per_process=options.devices_per_process,
        log_dir=options.log_dir,
        command=_resolve(command),
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits at the first `--`; what follows belongs to the command."""
    own = list(arguments)
    if "--" not in own:
        return own, []
    at = own.index("--")
    return own[:at], own[at + 1 :]


def _resolve(command: Sequence[str]) -> list[str]:
    program, *rest = command
    if program == "pytest":
        return [sys.executable, _PROGRAM, "-m", "pytest", *rest]
    if program in ("python", "python3"):
        # Options of the interpreter itself, such as -X, need the interpreter itself.
        wrapped = rest and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))
        return [sys.executable, *([_PROGRAM] if wrapped else []), *rest]
    if shutil.which(program) is None:
        raise UsageError(f"no program {program!r} is found")
    return list(command)


def _environments(options: Options) -> list[dict[str, str]]:
    coordinator = f"127.0.0.1:{_free_port()}"
    common = [
        environment.rank_environment(rank, options.processes, coordinator, os.environ)
        for rank in range(options.processes)
    ]
    if options.platform == "cpu":
        count = options.devices_per_process
        return [environment.with_cpu_devices(each, count) for each in common]
    gpus = environment.count_gpus()
    if gpus == 0:
        raise UsageError(
            "--platform cuda, but no GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        )
    return [environment.with_gpu(each, gpus) for each in common]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def _logs(options: Options) -> Iterator[list[Path]]:
    """Yields the file for each rank's output."""
    ranks = range(options.processes)
    if options.log_dir is not None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        yield [options.log_dir / f"rank-{rank}.log" for rank in ranks]
        return
    with contextlib.ExitStack() as files:
        # Files without a name: nothing is left of them, even if this program is killed.
        opened = [files.enter_context(tempfile.TemporaryFile()) for _ in ranks]
        yield [Path(f"/proc/self/fd/{file.fileno()}") for file in opened]


def report(outcome: Outcome, logs: Sequence[Path]) -> str:
    """Returns what is shown at the end: how it ended, and the output that explains it.

    Args:
      outcome: how the run ended.
      logs: each rank's output.
    """
    ranks = len(logs)
    after = f"after {outcome.seconds:.1f} s"
    if outcome.failed is not None:
        rank, status = outcome.failed
        shown, lines = [rank], _FAILED_LINES
        ending = f"rank {rank} of {ranks} {_how_it_ended(status)} {after}"
        ending += "; the others were ended" if ranks > 1 else ""
    elif outcome.overdue:
        shown, lines = list(outcome.overdue), _OVERDUE_LINES
        listed = ", ".join(map(str, outcome.overdue))
        ending = f"time is up {after}; still running of {ranks} ranks: {listed}"
    elif outcome.stopped is not None:
        shown, lines = [], 0
        ending = f"stopped by {outcome.stopped.name} {after}; all {ranks} ranks ended"
    else:
        shown, lines = [0], _DONE_LINES
        ending = f"all {ranks} ranks done {after}"
    show = _around_the_dump if outcome.overdue else _tail
    tails = [show(rank, logs[rank], lines) for rank in shown]
    return "".join([*tails, f"launch: {ending}\n"])


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"died by {signal.Signals(-status).name}"
    except ValueError:
        return f"died by signal {-status}"


def _tail(rank: int, log: Path, count: int) -> str:
    lines = log.read_text(errors="replace").splitlines()
    left_out = f", last {count} of {len(lines)} lines" if len(lines) > count else ""
    text = "\n".join([f"--- rank {rank}{left_out} ---", *lines[-count:]])
    return f"{text}\n"


def _around_the_dump(rank: int, log: Path, count: int) -> str:
    """Shows what a rank was about: its last output, and its innermost frames."""
    lines = log.read_text(errors="replace").splitlines()
    dumps = [i for i, line in enumerate(lines) if line.startswith(_DUMP)]
    if not dumps:
        return _tail(rank, log, count)
    begin = max(dumps[0] - count // 2, 0)
    shown = lines[begin : begin + count]
    where = f"lines {begin + 1} to {begin + len(shown)} of {len(lines)}"
    text = "\n".join([f"--- rank {rank}, {where} ---", *shown])
    return f"{text}\n"


def _exit_code(outcome: Outcome) -> int:
    if outcome.failed is not None:
        status = outcome.failed[1]
        return status if status > 0 else 128 - status
    if outcome.overdue:
        return _TIMED_OUT
    if outcome.stopped is not None:
        return 128 + outcome.stopped
    return 0
