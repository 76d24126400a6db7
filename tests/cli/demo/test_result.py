import dataclasses
import json
import math
from pathlib import Path

import pytest

from jaxzero._cli.demo.check import Curve, compare
from jaxzero._cli.demo.memory import StateBytes
from jaxzero._cli.demo.options import DemoOptions, demo_parser, parse_options
from jaxzero._cli.demo.result import (
    DemoResult,
    Run,
    check_line,
    first_line,
    run_lines,
    summary,
)

BYTES = StateBytes(params=4, grads=4, optimizer=8)
RUN = Run(
    curve=Curve(losses=(8.0, 4.0), grad_norms=(math.inf, 1.0)),
    complete=True,
    skipped_steps=1,
    compile_seconds=1.0,
    train_seconds=2.0,
    tokens_per_second=3.0,
    temp_bytes=5,
)


def options(*arguments: str) -> DemoOptions:
    return parse_options(demo_parser(), arguments)


def test_infinite_norms_are_null_in_json() -> None:
    result = DemoResult(
        options=options("--plot", "demo.png"),
        numel=1,
        run=RUN,
        sharded=BYTES,
        unsharded=BYTES,
        check=compare(RUN.curve, Curve(losses=(8.0,), grad_norms=(1.0,)), 0.1),
    )
    found = json.loads(json.dumps(summary(result), allow_nan=False))
    assert found["grad_norms"] == [None, 1.0]
    assert found["skipped_steps"] == 1
    assert found["check"]["first_grad_norm_relative_difference"] is None
    assert not found["check"]["passed"] and found["exit_code"] == 1
    assert found["options"]["plot"] == str(Path("demo.png"))


def test_skipped_steps_are_told() -> None:
    assert "skipped, gradients not being finite: 1" in run_lines(RUN)
    assert "skipped" not in run_lines(dataclasses.replace(RUN, skipped_steps=0))


def test_replicas_are_told() -> None:
    assert "8 CPU devices (2 replicas x 4);" in first_line(
        options("--replicas", "2"), 1, 1
    )
    assert "8 CPU devices;" in first_line(options(), 1, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "bfloat16 wire"), (("--compute-dtype", "float16"), "computed in float16")],
)
def test_check_names_the_dtypes(arguments: tuple[str, ...], words: str) -> None:
    check = compare(RUN.curve, RUN.curve, 0.1)
    assert check_line(check, options(*arguments)).endswith(words)
