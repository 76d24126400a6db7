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


def test_unknown_command_is_one_line_that_lists_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "'trian'" in captured.err and "demo" in captured.err
