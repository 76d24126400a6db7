"""Argument parsing shared by the commands: one clear line for a wrong value."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class UsageError(Exception):
    """A wrong request; its text is one line that says what to do instead."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as one line, without the usage text, and exits 2."""

    def error(self, message: str) -> NoReturn:
        print(
            f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr
        )
        raise SystemExit(2)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # Not argparse's own, which hides that the text could not be written.
        print(self.format_help(), end="", file=file)


def add_count(
    group: argparse._ArgumentGroup, name: str, default: int, most: int, text: str
) -> None:
    """Adds an option for a whole number from 1 to `most`."""
    group.add_argument(
        name,
        type=whole_number(1, most),
        default=default,
        metavar="N",
        help=f"{text} (default {default})",
    )


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type for whole numbers inside a range."""
    wanted = f"a whole number of at least {minimum}"
    if maximum is not None:
        wanted = f"a whole number from {minimum} to {maximum}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum or (maximum is not None and number > maximum):
            raise argparse.ArgumentTypeError(f"expected {wanted}, not {text!r}")
        return number

    return parse
