"""The launcher: ranks end together, the right one is shown, and none is left."""

import re
import signal
import textwrap
from pathlib import Path

import pytest
from cli.launch.ranks import Launcher, launch, wait_until

from jaxzero._cli.launch import command as cli
from jaxzero._cli.launch.ranks import Outcome

pytestmark = pytest.mark.multiprocess

# Every rank waits for rank 1 in a collective, which rank 1 never joins.
COLLECTIVE = """
import os, signal, sys, time
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from jaxzero.distributed import initialize

initialize()
multihost_utils.sync_global_devices("start")
print("together", flush=True)
if jax.process_index() == 1:
    {ending}
multihost_utils.sync_global_devices("end")
"""

# Every rank starts a process of its own and tells when it runs.
WITH_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1], f"{child.pid}").touch()
time.sleep(600)
"""


def program(code: str) -> list[str]:
    return ["python", "-c", code]


def in_collective(ending: str) -> list[str]:
    return program(COLLECTIVE.format(ending=ending))


def test_each_rank_knows_its_number_and_how_many_there_are(tmp_path: Path) -> None:
    code = """
    import jax
    from jaxzero.distributed import initialize, started_by
    initialize()
    print(started_by(), jax.process_index(), jax.process_count(), jax.device_count())
    """
    code = textwrap.dedent(code)
    done = launch(
        *("-n", "2", "--devices-per-process", "3", "--log-dir", str(tmp_path)),
        *("--", *program(code)),
    )
    assert done.code == 0, done.output
    assert "all 2 ranks done" in done.output
    for rank in range(2):
        assert f"launch {rank} 2 6" in (tmp_path / f"rank-{rank}.log").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ending", "code", "sentence"),
    [
        ("sys.exit(3)", 3, "rank 1 of 4 ended with exit code 3"),
        ("os._exit(5)", 5, "rank 1 of 4 ended with exit code 5"),
        ("raise ValueError('boom')", 1, "rank 1 of 4 ended with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 of 4 died by SIGKILL"),
    ],
    ids=["exits", "exits-hard", "raises", "is-killed"],
)
def test_a_rank_that_fails_ends_the_others_and_is_shown(
    ending: str, code: int, sentence: str
) -> None:
    command = in_collective(f"print('rank', 1, 'says so'); {ending}")
    done = launch("-n", "4", "--timeout", "60", "--", *command)
    assert done.code == code, done.output
    assert sentence in done.output
    assert "--- rank 1 ---" in done.output
    assert "rank 1 says so" in done.output
    assert "--- rank 0" not in done.output
    assert ("ValueError: boom" in done.output) == ("boom" in ending)
    assert done.seconds < 30


def test_a_rank_that_hangs_ends_all_when_the_time_is_up_and_shows_where() -> None:
    command = in_collective("time.sleep(600)")
    done = launch("-n", "2", "--timeout", "8", "--", *command)
    assert done.code == 124, done.output
    assert re.search(
        r"time is up after 8.\d s; still running of 2 ranks: 0, 1", done.output
    )
    assert "sync_global_devices" in done.output
    assert 'File "<string>", line 12' in done.output
    assert done.seconds < 20


def test_a_deep_stack_hides_neither_its_top_nor_what_was_printed() -> None:
    code = """
import time
for i in range(100): print("line", i)
def deeper(levels): time.sleep(600) if not levels else deeper(levels - 1)
deeper(60)
"""
    done = launch("-n", "1", "--timeout", "4", "--", *program(code))
    assert done.code == 124, done.output
    assert "line 99\nFatal Python error" in done.output
    assert "line 79" not in done.output
    assert "line 4 in deeper" in done.output
    assert len(done.output.splitlines()) < 60


def test_output_without_a_newline_and_beyond_the_tail_is_handled() -> None:
    code = "import sys; [print(i) for i in range(200)]; print(end='last'); sys.exit(4)"
    done = launch("-n", "1", "--", *program(code))
    assert done.code == 4
    assert "--- rank 0, last 80 of 201 lines ---\n121\n" in done.output
    assert "199\nlast\nlaunch: rank 0 of 1 ended with exit code 4" in done.output


def test_the_children_of_a_rank_end_with_it() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '600'])"
    assert launch("-n", "2", "--", *program(code)).code == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_launcher_that_is_stopped_leaves_no_process(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with Launcher("-n", "3", "--", *program(WITH_CHILD), str(tmp_path)) as launcher:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 30, "three children")
        assert len(launcher.alive()) >= 7
        launcher.process.send_signal(number)
        done = launcher.finish()
        assert done.code == code
        if number != signal.SIGKILL:
            assert f"stopped by {number.name}" in done.output
        launcher.assert_nothing_left()


def test_a_launcher_that_is_killed_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, temporary = tmp_path / "marks", tmp_path / "temporary"
    marks.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Launcher("-n", "2", "--", *program(WITH_CHILD), str(marks)) as launcher:
        wait_until(lambda: len(list(marks.iterdir())) == 2, 30, "two children")
        launcher.process.kill()
        launcher.finish()
        launcher.assert_nothing_left()
    assert list(temporary.iterdir()) == []


def test_the_coordinator_listens_on_this_machine_only() -> None:
    code = """
import os, jaxzero.distributed
jaxzero.distributed.initialize()
if os.environ["JAXZERO_PROCESS_ID"] == "0":
    port = int(os.environ["JAXZERO_COORDINATOR"].rpartition(":")[2])
    lines = [l.split() for f in ("tcp", "tcp6") for l in open("/proc/net/" + f)]
    found = {l[1] for l in lines if l[3] == "0A" and l[1].endswith(f":{port:04X}")}
    print("listens on", found)
"""
    done = launch("-n", "2", "--", *program(code))
    assert done.code == 0, done.output
    assert "0100007F:" in done.output.partition("listens on")[2]
    assert "00000000:" not in done.output.partition("listens on")[2]


def test_a_launcher_killed_while_it_starts_ranks_leaves_no_process(
    tmp_path: Path,
) -> None:
    with Launcher("-n", "64", "--", *program(WITH_CHILD), str(tmp_path)) as launcher:
        wait_until(lambda: "rank" in " ".join(launcher.alive()), 30, "the first rank")
        launcher.process.kill()
        launcher.finish()
        launcher.assert_nothing_left()


def test_ranks_hash_strings_differently(tmp_path: Path) -> None:
    code = "print('hash:', hash('a leaf'))"
    log = ("--log-dir", str(tmp_path))
    assert launch("-n", "2", *log, "--", *program(code)).code == 0
    assert len({path.read_text() for path in tmp_path.iterdir()}) == 2


def test_python_programs_see_what_the_interpreter_would_give(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import beside, sys\nprint(beside.value, __name__, sys.argv)\n")
    done = launch("-n", "1", "--", "python", str(script), "a", "--b")
    assert f"7 __main__ ['{script}', 'a', '--b']" in done.output
    done = launch("-n", "1", "--", "python", "-X", "dev", "-c", "print(1 + 1)")
    assert "\n2\n" in done.output
    done = launch("-n", "1", "--", "sh", "-c", "exit 9")
    assert done.code == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "--", "python"], "whole number from 1 to 1024, not '0'"),
        (["--timeout", "soon", "--", "python"], "of at least 1, not 'soon'"),
        (["--platform", "tpu", "--", "python"], "choose from"),
        (["--frob", "--", "python"], "unknown option '--frob'"),
        (["-n", "2", "pytest", "tests"], "no command; write it after --"),
        (["--"], "no command; write it after --"),
        (["--", "no-such-program"], "no program 'no-such-program' is found"),
        (
            ["--platform", "cuda", "--devices-per-process", "2", "--", "python"],
            "--devices-per-process is for --platform cpu",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_gives_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("python -m jaxzero launch: error: ")


def test_cuda_without_a_gpu_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["--platform", "cuda", "--", "python"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err


def test_help_explains_and_gives_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "-- pytest tests/multihost" in text
    assert "exit code" in text
    assert max(map(len, text.splitlines())) <= 88


def test_an_unknown_signal_is_reported_by_number(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"\xff not text\n")
    text = cli.report(Outcome(failed=(0, -99), seconds=1.0), [log])
    assert "rank 0 of 1 died by signal 99 after 1.0 s\n" in text
