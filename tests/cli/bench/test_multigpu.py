"""The visit to a machine with several GPUs: its commands, limits and verdicts.

Most tests put a stand-in for Python on the PATH, which writes down what it is asked.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxzero._cli.launch import command as launch

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"
SCRIPT = FOLDER / "multigpu.sh"

# Two lines per call, so that calls at the same time can be told from those in turn.
STAND_IN = f"""\
#!{sys.executable} -IS
import json, os, sys, time
asked = " ".join(sys.argv[1:])
def say(event):
    with open(os.environ["CALLS"], "a") as calls:
        nccl = {{k: v for k, v in os.environ.items() if k.startswith("NCCL_")}}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        calls.write(json.dumps([event, sys.argv[1:], nccl, visible]) + "\\n")
if "count_gpus" in asked:
    print(4)
elif "create_server" in asked:
    print(29500)
else:
    say("start")
    time.sleep(60 if os.environ.get("HANG", "nothing") in asked else 0.1)
    say("end")
    sys.exit(3 if os.environ.get("FAIL", "nothing") in asked else 0)
"""


class Visit:
    """What a run of the script printed, asked for and left."""

    def __init__(self, folder: Path, *steps: str, **variables: str) -> None:
        programs = folder / "bin"
        programs.mkdir()
        (programs / "python3").write_text(STAND_IN)
        (programs / "python3").chmod(0o755)
        log = folder / "calls"
        log.touch()
        unset = ("CUDA_VISIBLE_DEVICES", "DRY", "RANKS", "AT_ONCE", "ARCHIVE")
        self.out = folder / "out"
        self.done = subprocess.run(
            [SCRIPT, self.out, *steps],
            env={k: v for k, v in os.environ.items() if k not in unset}
            | {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(log)}
            | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        # Bash itself says what was killed; nothing else may go wrong unseen.
        assert self.done.stderr.count("\n") == ("HANG" in variables), self.done.stderr
        self.calls = [json.loads(line) for line in log.read_text().splitlines()]
        self.commands = [call[1] for call in self.calls if call[0] == "start"]

    def steps(self) -> dict[str, int]:
        """Returns the exit status of each job."""
        lines = (self.out / "steps.tsv").read_text().splitlines()
        rows = [line.split("\t") for line in lines]
        return {name: int(status) for name, status, *_ in rows}


def programs(command: list[str]) -> list[list[str]]:
    """Returns the program of benchmarks/ and its arguments that a command runs."""
    return [
        command[at:]
        for at, argument in enumerate(command)
        if argument.startswith("benchmarks/")
    ]


class Parsed(Exception):
    """A program has read its command line."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes programs end when their command line has been read."""
    parse = argparse.ArgumentParser.parse_args

    def then_stop(self: Any, *arguments: Any) -> Any:
        raise Parsed(parse(self, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", then_stop)
    monkeypatch.syspath_prepend(str(FOLDER))


def limits() -> dict[str, int]:
    """Returns what `--limits` prints."""
    printed = subprocess.run(
        [SCRIPT, "--limits"], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(s) for name, s in map(str.split, printed.splitlines())}


def test_limits_leave_time_in_ten_minutes() -> None:
    seconds = limits()
    total = seconds.pop("sum")
    assert total == sum(seconds.values()) < 600


@pytest.mark.parametrize("variables", [{}, {"RANKS": "8"}, {"DRY": "1"}], ids=str)
def test_every_program_takes_the_options_it_is_given(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    only_parse: None,
    variables: dict[str, str],
) -> None:
    visit = Visit(tmp_path, **variables)
    assert visit.done.returncode == 0, visit.done.stdout
    asked = {program[0] for command in visit.commands for program in programs(command)}
    names = ("bandwidth", "fsdp2", "mixed", "overlap", "sweep", "targets")
    assert asked == {f"benchmarks/{name}.py" for name in names}
    for command in visit.commands:
        if "launch" in command:
            at = command.index("launch")
            launch.parse(command[at + 1 :])
        for program in programs(command):
            monkeypatch.setattr(sys, "argv", program)
            with pytest.raises(Parsed):
                runpy.run_path(str(ROOT / program[0]), run_name="__main__")
        for argument in command:
            if argument.startswith("tests/"):
                assert (ROOT / argument).is_dir()


def test_all_steps_and_both_layouts_run(tmp_path: Path) -> None:
    visit = Visit(tmp_path, ARCHIVE=f"{tmp_path}/found.tar.gz", NCCL_NVLS_ENABLE="0")
    assert visit.done.returncode == 0, visit.done.stdout
    jobs = set(visit.steps())
    assert {name.split("_")[0] for name in jobs} - {"module"} == set(limits()) - {"sum"}
    for name in ("cuda", "mixed", "multihost"):
        assert {f"{name}_ranks", f"{name}_together"} <= jobs
    assert "0 of 16 failed" in visit.done.stdout
    assert (tmp_path / "found.tar.gz").stat().st_size
    # The machine's settings of NCCL reach every command, and nothing is added.
    assert all(nccl == {"NCCL_NVLS_ENABLE": "0"} for *_, nccl, _ in visit.calls)


def running_at_once(calls: list[Any]) -> int:
    """Returns how many commands ran at the same time, at most."""
    now = most = 0
    for event, *_ in calls:
        now += 1 if event == "start" else -1
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("step", "variables", "expected"),
    [
        ("mixed", {}, 1),
        ("cuda", {}, 2),
        ("cuda", {"AT_ONCE": "1"}, 1),
        ("multihost", {"AT_ONCE": "1"}, 1),
    ],
    ids=str,
)
def test_jobs_that_share_gpus_at_the_same_time(
    tmp_path: Path, step: str, variables: dict[str, str], expected: int
) -> None:
    assert running_at_once(Visit(tmp_path, step, **variables).calls) == expected


@pytest.mark.parametrize(
    ("variables", "visible"),
    [
        ({"RANKS": "2"}, "0,1"),
        ({"RANKS": "2", "CUDA_VISIBLE_DEVICES": "3,5,6,7"}, "3,5"),
        ({"RANKS": "4"}, None),
        ({"RANKS": "8"}, None),
    ],
    ids=str,
)
def test_fewer_ranks_than_gpus_use_the_first(
    tmp_path: Path, variables: dict[str, str], visible: str | None
) -> None:
    visit = Visit(tmp_path, "mixed", **variables)
    assert {call[-1] for call in visit.calls} == {visible}


def test_a_failed_step_is_seen_at_the_end_and_stops_no_other(tmp_path: Path) -> None:
    visit = Visit(tmp_path, FAIL="multihost_ranks")
    assert visit.done.returncode == 1
    assert {name for name, status in visit.steps().items() if status} == {
        "multihost_ranks"
    }
    assert visit.steps()["multihost_ranks"] == 3
    lines = visit.done.stdout.splitlines()
    (line,) = [line for line in lines if line.endswith("FAILED")]
    assert line.split()[:2] == ["multihost_ranks", "3"]
    assert "1 of 16 failed" in lines[-1]
    report = (visit.out / "report.txt").read_text()
    assert visit.done.stdout.endswith(report)


def test_a_step_that_hangs_is_killed_in_time(tmp_path: Path) -> None:
    visit = Visit(tmp_path, "targets", HANG="targets.py")
    assert visit.done.returncode == 1
    assert visit.steps() == {"targets": 137}
    assert "KILLED" in visit.done.stdout


def test_nothing_is_measured_without_the_cuda_module(tmp_path: Path) -> None:
    visit = Visit(tmp_path, FAIL="cuda_obstacle")
    assert visit.done.returncode == 1
    assert visit.steps() == {"build": 0, "module": 3}


def test_an_unknown_step_is_refused_before_any_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPT, tmp_path, "targets", "bandwith"],
        env={**os.environ, "DRY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no step 'bandwith': build mixed bandwidth" in done.stderr
    assert not done.stdout


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_dry_run_starts_ranks_and_tells_what_failed(tmp_path: Path) -> None:
    """A step in both layouts, for real; and one that finds nothing to read."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [SCRIPT, tmp_path, "mixed", "targets"],
        env=inherited | {"DRY": "1", "RANKS": "2", "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.stderr
    assert done.stdout.count("40 steps in") == 2, done.stdout
    for processes in (1, 2):
        found = json.loads((tmp_path / f"mixed_2_in_{processes}.json").read_text())
        assert {row["wrong numbers"] for row in found["rows"]} == {0}
    assert done.returncode == 1
    assert "1 of 3 failed" in done.stdout
