"""What `doctor` reports: facts, the fixes that several checks share, their text."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

MAX_ERROR_LENGTH = 400

REINSTALL = (
    "reinstall jaxzero (pip install --force-reinstall --no-deps jaxzero); in a folder"
    " with its source, use pip install -e . (see BUILD.md)"
)
INSTALL_PLUGIN = "pip install 'jax[cuda13]'"
CHECK_DEVICE = "see that nvidia-smi answers, and end processes that hang on the GPU"
CHECK_PLATFORMS = "unset JAX_PLATFORMS, or install the JAX plugin for the platform"
REPORT = "please report this whole output, together with how jaxzero was installed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of the report; with a fix, it is a problem."""

    key: str
    value: str
    fix: str | None = None


def guarded(
    key: str, check: Callable[..., Iterable[Fact]], *arguments: Any
) -> Iterator[Fact]:
    """Yields the facts of a check; its failure becomes one of them."""
    try:
        yield from check(*arguments)
    except Exception as error:
        yield Fact(key=key, value=one_line(error), fix=REPORT)


def as_text(fact: Fact) -> str:
    """Returns the lines that a person reads."""
    line = f"{fact.key}: {fact.value}"
    return line if fact.fix is None else f"{line}\n  fix: {fact.fix}"


def summary(facts: Sequence[Fact]) -> dict[str, Any]:
    """Returns what a program reads, ready for JSON."""
    problems = [dataclasses.asdict(fact) for fact in facts if fact.fix is not None]
    return {
        "ok": not problems,
        "facts": {fact.key: fact.value for fact in facts},
        "problems": problems,
    }


def one_line(error: Exception) -> str:
    """Returns an error's type and text, shortened."""
    # Not every error has a text.
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[:MAX_ERROR_LENGTH]}..."
