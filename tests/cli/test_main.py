import errno
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

import jaxzero
from jaxzero.__main__ import COMMANDS, NEED_NATIVE_MODULE, main, run


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_help_lists_every_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert f"  {name:<{max(map(len, COMMANDS))}}  {summary}\n" in text


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_ends_with_examples_that_parse_and_exit_codes(
    capsys: pytest.CaptureFixture[str], command: str | None
) -> None:
    if command is None:
        main(["--help"])
    else:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
    text = capsys.readouterr().out
    head, _, tail = text.partition("\nexamples:\n")
    examples = re.findall(r"python -m jaxzero (\w+)", tail)
    assert examples
    # The launcher starts other commands too.
    assert set(examples) <= ({command, "launch"} if command else set(COMMANDS))
    assert re.search(r"\n\nexit codes: 0 .+; 2 wrong arguments", tail)
    known = set(re.findall(r"--[a-z-]+", head))
    if command:
        # Options of the launcher and of srun stand before the command.
        used = re.findall(rf"python -m jaxzero {command}(.*)", tail)
        assert set(re.findall(r"--[a-z-]+", " ".join(used))) <= known


def test_unknown_command_is_one_line_that_lists_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "'trian'" in captured.err and "demo" in captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxzero {jaxzero.__version__}\n"


def interrupted(*arguments: Any) -> int:
    """A command during which Ctrl-C was pressed."""
    raise KeyboardInterrupt


def test_an_interrupt_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxzero._cli.plan.command.main", interrupted)
    assert run(["plan"]) == 130
    assert capsys.readouterr().err == "\nstopped\n"


def test_errors_of_a_command_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> int:
        raise FileNotFoundError(errno.ENOENT, "missing")

    monkeypatch.setattr("jaxzero._cli.plan.command.main", missing)
    with pytest.raises(FileNotFoundError):
        run(["plan"])


def test_an_interrupt_while_devices_work_ends_with_its_code() -> None:
    steps = ["--steps", "100000", "--blocks", "1", "--width", "64", "--length", "8"]
    # Shells let what they start in the background ignore interrupts, tests included.
    heeding = ["env", "--default-signal=INT"]
    demo = subprocess.Popen(
        [*heeding, sys.executable, "-P", "-m", "jaxzero", "demo", *steps],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    try:
        started_training = any("sharded    1/" in line for line in demo.stdout)
        assert started_training
        demo.send_signal(signal.SIGINT)
        after, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130, after
    assert after.endswith("\nstopped\n") and "Traceback" not in after


@pytest.mark.parametrize("module", ["jax", "optax"])
def test_an_interrupt_during_an_import_ends_without_a_traceback(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except BaseException as error:  # as packages with native code do\n"
        "    raise ImportError('broken') from error\n"
        if module == "jax"
        else "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    command = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "jaxzero", "demo"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert command.stdout is not None
    try:
        assert command.stdout.readline() == "importing\n"
        command.send_signal(signal.SIGINT)
        after, _ = command.communicate(timeout=30)
    finally:
        command.kill()
    assert (command.returncode, after) == (130, "\nstopped\n")


def test_importing_jaxzero_leaves_interrupts_alone() -> None:
    program = (
        "import signal, jaxzero;"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    heeding = ["env", "--default-signal=INT", sys.executable, "-c", program]
    done = subprocess.run(heeding, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


PLAN = ("plan", "--model", "gpt2")


def started(
    stdout: int | IO[bytes], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command whose output goes somewhere; returns what it said otherwise."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "jaxzero", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


COMMAND_LINES = pytest.mark.parametrize(
    "arguments",
    [PLAN, (*PLAN, "--json"), ("plan", "--help"), ("--help",)],
    ids=" ".join,
)


@COMMAND_LINES
def test_output_that_nobody_reads_ends_it_quietly(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = started(writer, *arguments)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@COMMAND_LINES
def test_no_output_at_all_is_no_error(arguments: tuple[str, ...]) -> None:
    without_output = ["sh", "-c", 'exec "$@" >&-', "sh"]
    done = subprocess.run(
        [*without_output, sys.executable, "-P", "-m", "jaxzero", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@COMMAND_LINES
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = started(full, *arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert os.strerror(errno.ENOSPC) in done.stderr


@pytest.mark.parametrize("command", NEED_NATIVE_MODULE)
def test_a_source_folder_that_is_not_built_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "jaxzero._cpu" else find(name, *rest),
    )
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install -e ." in error
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "missing" in capsys.readouterr().out.partition("exit codes: ")[2]
