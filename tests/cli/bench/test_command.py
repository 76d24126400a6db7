"""`python -m jaxzero bench`: in this process on a small tree, and as users start it."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
import pytest
from cli.bench.tiny import TREE
from cli.launch.ranks import launch

from jaxzero.__main__ import main
from jaxzero._cli.bench import command as bench
from jaxzero._cli.bench import rivals, trees

WAYS = ["jaxzero", "per leaf", "concatenated", "limit: one flat leaf"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    # From here on a command cannot change how many devices this process has.
    assert len(jax.devices()) >= 8
    monkeypatch.setitem(trees.TREES, "tiny", lambda: TREE)
    monkeypatch.setitem(trees.TREES, "layer", lambda: {"kernel": (8, 8)})


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", "--repeats", "1", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_table_per_tree_names_the_fastest_rival(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output(capsys, "--tree", "tiny", "layer", "--devices", "4")
    lines = text.splitlines()
    assert re.match(r"jaxzero \S+, JAX \S+, \d+ x cpu, processor ", lines[0])
    assert lines[1] == "tiny: 4 leaves, 0.000503 M parameters, float32"
    assert lines[3].split() == ["how", "ms", "times", "jaxzero"]
    table = [re.split(r"  +", line) for line in lines[4:8]]
    assert [row[0] for row in table] == WAYS
    ratios = {row[0]: float(row[2]) for row in table}
    assert ratios["jaxzero"] == 1
    said = re.search(
        r"Fastest rival: (.+), (\S+) times as long as jaxzero; the limit: (\S+) times",
        " ".join(lines[9:11]),
    )
    assert said
    rival, ratio, limit = said.groups()
    assert float(ratio) == ratios[rival] == min(ratios[how] for how in WAYS[1:3])
    assert float(limit) == ratios[WAYS[-1]]
    assert "read ratios, not ms" in text
    assert "\nlayer: 1 leaves" in text
    assert max(map(len, lines)) <= 88
    # The launcher shows so many lines of the first rank, and Gloo prints one.
    assert text.index("\nlayer") and len(lines[: lines.index(lines[9]) + 2]) <= 11


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--devices",
        "2",
        "--grads",
        "bfloat16",
        "float32",
        "--comm-dtype",
        "float16",
    ]
    text = output(
        capsys, "--json", "--tree", "tiny", "--reduction", "float32", *options
    )
    assert text.count("\n") == 1
    found = json.loads(text)
    assert set(found) == {"environment", "rows"}
    assert found["environment"]["jax"] == jax.__version__
    assert "commit" not in found["environment"]
    assert [row["how"] for row in found["rows"]] == [*WAYS[:3], "one flat leaf"]
    for row in found["rows"]:
        assert row["ms"] > 0 and row["ratio_to_jaxzero"] > 0
        assert row["tree"] == "tiny"
        assert (row["leaves"], row["parameters"], row["ranks"]) == (4, 503, 2)
        assert row["grads"] == ["bfloat16", "float32"]
        assert row["wire_bytes"] == {"float16": 2 * 503}
        assert row["reduction"] == "float32" and row["repeats"] == 1
    kinds = [row["kind"] for row in found["rows"]]
    assert kinds == ["jaxzero", "rival", "rival", "limit"]


def test_options_are_shown_with_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--comm-dtype", "bfloat16", "--reduction", "float32", "--devices", "1"]
    text = output(capsys, "--tree", "tiny", *options)
    assert "float32, bfloat16 on the wire, jaxzero sums in float32\n" in text
    assert "limit: as many bytes read and written" in text


def test_wrong_numbers_end_with_one_and_without_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = rivals.ours

    def wrong(policy: Any, grads: Any, into: Any) -> Any:
        shards = ours(policy, grads, into)
        return shards | {"table": shards["table"].at[3].add(1)}

    monkeypatch.setattr(rivals, "ours", wrong)
    assert main(["bench", "--tree", "tiny"]) == 1
    captured = capsys.readouterr()
    assert "times jaxzero" not in captured.out
    assert "jaxzero is wrong, so nothing is timed" in captured.err
    assert "leaf 'table'" in captured.err
    assert captured.err.count("\n") == 1


def test_devices_without_a_transport_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError("the mesh has NVIDIA GPUs, but no CUDA module")

    monkeypatch.setattr(rivals, "ours", refuse)
    assert main(["bench", "--tree", "tiny", "--devices", "2"]) == 2
    captured = capsys.readouterr()
    assert "error: the mesh has NVIDIA GPUs, but no CUDA module" in captured.err
    assert captured.err.count("\n") == 1


def test_tree_that_does_not_fit_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "free_bytes", lambda _: 30_000_000_000)
    monkeypatch.setitem(trees.TREES, "huge", lambda: {"kernel": (1 << 15, 1 << 15)})
    # 1 << 30 parameters: at least gradients and the flat leaf, on each of 8 devices.
    assert main(["bench", "--tree", "huge"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    needed = re.search(r"huge over 8 devices needs about (\d+) GB", captured.err)
    assert needed and int(needed[1]) > 64
    assert "30 GB are free" in captured.err and "fewer --devices" in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tree", "bert"], ["'bert'", "gpt2"]),
        (["--tree", "tiny", "--devices", "0"], ["'0'", "from 1 to 1024"]),
        (["--tree", "tiny", "--devices", "9"], ["--devices 9", "fresh process"]),
        (["--repeats", "none"], ["'none'", "from 1 to"]),
        (["--repeats", "10001"], ["'10001'", "from 1 to 10000"]),
        (["--comm-dtype", "int8"], ["'int8'", "bfloat16"]),
        (["--reduction", "fast"], ["'fast'", "native"]),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    try:
        code = main(["bench", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("python -m jaxzero bench: error: ")
    for word in words:
        assert word in captured.err


def test_help_shows_trees_examples_and_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for words in ("(default 7)", "examples:", "exit codes", "srun", *trees.TREES):
        assert words in text
    assert max(map(len, text.splitlines())) <= 88


def test_a_user_gets_eight_devices_and_needs_no_folder(tmp_path: Any) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxzero", "bench", "--tree", "layer", "--repeats", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ", 8 x cpu, " in done.stdout
    assert "layer: 12 leaves, 0.445 M parameters, float32\n" in done.stdout


@pytest.mark.multiprocess
def test_the_first_of_several_processes_prints() -> None:
    done = launch(
        *("-n", "2", "--timeout", "100", "--"),
        *("python", "-m", "jaxzero", "bench", "--repeats", "1"),
    )
    assert done.code == 0, done.output
    assert done.output.count("times jaxzero") == 1
    assert ", 2 x cpu, " in done.output
    assert "layer: 12 leaves" in done.output
    for way in WAYS:
        assert f"\n{way} " in done.output


@pytest.mark.multiprocess
def test_devices_belong_to_one_process() -> None:
    done = launch(
        *("-n", "2", "--timeout", "60", "--"),
        *("python", "-m", "jaxzero", "bench", "--devices", "2"),
    )
    assert done.code == 2
    assert "--devices is for one process" in done.output


@pytest.mark.multiprocess
def test_wrong_numbers_of_one_rank_end_all() -> None:
    program = """
import sys
import jax
from jaxzero.__main__ import main
from jaxzero._cli.bench import comparison

difference = comparison.difference
comparison.difference = lambda *work: (
    difference(*work) if jax.process_index() == 0 else "planted"
)
sys.exit(main(["bench"]))
"""
    done = launch("-n", "2", "--timeout", "60", "--", "python", "-c", program)
    assert done.code == 1, done.output
    assert "rank 1 of 2 ended with exit code 1" in done.output
    assert "jaxzero is wrong, so nothing is timed: planted" in done.output
    assert done.seconds < 40
