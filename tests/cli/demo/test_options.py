import errno
import os
from pathlib import Path

import pytest

from jaxzero.__main__ import main


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "0"], ["--devices", "from 1 to", "'0'"]),
        (["--devices", "many"], ["--devices", "from 1 to", "'many'"]),
        (["--devices", "12"], ["--batch 64", "12 devices x 4", "--batch 48"]),
        (["--devices", "128"], ["128 devices", "try --batch 512"]),
        (["--replicas", "0"], ["--replicas", "from 1 to"]),
        (["--replicas", "3"], ["--replicas 3", "8 devices", "--devices 9"]),
        (["--replicas", "16"], ["--replicas 16", "8 devices", "--devices 16"]),
        (["--layers", "3"], ["unrecognized", "3"]),
        (["--blocks", "0"], ["--blocks", "from 1 to"]),
        (["--compute-dtype", "int8"], ["--compute-dtype", "int8", "bfloat16"]),
        (["--devices", "1025"], ["--devices", "from 1 to 1024"]),
        (["--length", "100000"], ["--length", "from 1 to 2048", "'100000'"]),
        (["--steps", "0"], ["--steps", "from 1 to"]),
        (["--steps", "-3"], ["--steps", "'-3'"]),
        (
            ["--comm-dtype", "int8"],
            ["--comm-dtype", "int8", "float32", "bfloat16", "float16"],
        ),
        (["--seed", "-1"], ["--seed", "from 0"]),
        (["--batch", "1.5"], ["--batch", "whole number"]),
        (["--width", "100"], ["--width 100", "multiple of 64", "--width 128"]),
        (["--plot", "demo.xyz"], ["--plot demo.xyz", ".png"]),
        (["--plot"], ["--plot", "expected one argument"]),
        (["--fast"], ["--fast"]),
    ],
    ids=" ".join,
)
def test_wrong_value_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = error_line(capsys, *arguments)
    for word in words:
        assert word in line


def test_unwritable_plot_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = error_line(capsys, "--plot", str(tmp_path / "missing" / "demo.png"))
    assert os.strerror(errno.ENOENT) in line
    folder = tmp_path / "folder.png"
    folder.mkdir()
    assert os.strerror(errno.EISDIR) in error_line(capsys, "--plot", str(folder))


def test_refused_run_leaves_no_plot_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "demo.png"
    error_line(capsys, "--plot", str(plot), "--devices", "12")
    assert not plot.exists()


def test_help_shows_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for words in (
        "(default 8)",
        "bfloat16",
        "examples:",
        "--check --plot",
        "--layers",
        "--replicas 2",
        "--compute-dtype float16",
        "exit codes",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 88
