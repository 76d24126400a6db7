import re

import pytest

from jaxzero.__main__ import COMMANDS, main


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
    assert set(examples) <= ({command} if command else set(COMMANDS))
    assert re.search(r"\n\nexit codes: 0 .+; 2 wrong arguments", tail)
    known = set(re.findall(r"--[a-z-]+", head))
    if command:
        # Options of the launcher and of srun stand before the command.
        used = re.findall(r"python -m jaxzero \w+(.*)", tail)
        assert set(re.findall(r"--[a-z-]+", " ".join(used))) <= known


def test_unknown_command_is_one_line_that_lists_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "'trian'" in captured.err and "demo" in captured.err
