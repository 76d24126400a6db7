import json
import os
import subprocess
import sys
import time

import pytest

from jaxzero.__main__ import main


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def summary(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    text = output(capsys, "--json", *arguments)
    assert text.count("\n") == 1
    return json.loads(text)


def test_report_has_plan_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--model", "gpt2")
    assert text.startswith("gpt2: 124,439,808 parameters over 8 devices\n")
    for words in (
        "one of 12 layers:\nPlan: 12 leaves over 8 ranks, 1 collectives",
        "['mlp']['up']['w']",
        "bytes per device           8 ranks     unsharded",
        "Activations come on top",
    ):
        assert words in text
    whole = output(capsys, "--model", "gpt2", "--no-layers", "--replicas", "2")
    assert "over 8 devices x 2 replicas" in whole
    assert "all parameters:\nPlan: 148 leaves" in whole
    assert "sum divided by 16" in whole


def test_options_reach_policy_and_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> dict:
        return summary(capsys, "--model", "gpt2", "--no-layers", *options)

    plain, n = run(), 124_439_808
    assert plain["parameters"] == n
    assert plain["plan"]["wire_bytes"] - plain["plan"]["padding_bytes"] == 4 * n
    assert plain["memory"]["unsharded"]["params"] == 4 * n

    half = run("--compute-dtype", "bfloat16")
    assert half["memory"]["sharded"]["gathered"] == 2 * n
    assert half["memory"]["sharded"]["params"] == plain["memory"]["sharded"]["params"]
    assert half["plan"]["wire_bytes"] - half["plan"]["padding_bytes"] == 2 * n

    stored = run("--shard-dtype", "bfloat16")["memory"]
    assert 2 * stored["sharded"]["params"] == plain["memory"]["sharded"]["params"]

    wire = run("--comm-dtype", "float16")["plan"]["wire_bytes"]
    assert wire < plain["plan"]["wire_bytes"] * 0.51

    small = run("--bucket-bytes", "8M")
    assert small["memory"]["sharded"]["buckets"] == 8 << 20
    assert small["plan"]["buckets"] > plain["plan"]["buckets"]

    whole = run("--min-shard-numel", "10000")["memory"]["sharded"]
    assert whole["params"] > plain["memory"]["sharded"]["params"]

    wider = run("--devices", "16", "--accumulate", "2", "--replicas", "4")
    assert (wider["devices"], wider["replicas"]) == (16, 4)
    assert wider["memory"]["sharded"]["full_grads"] == 4 * n

    layered = summary(capsys, "--model", "gpt2")
    assert (layered["plan"]["layers"], plain["plan"]["layers"]) == (12, None)
    total = layered["memory"]["sharded"]["total"]
    assert total < plain["memory"]["sharded"]["total"]


def test_no_overlap_keeps_one_layer_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "llama-8b")
    on, off = summary(capsys, *model), summary(capsys, *model, "--no-overlap")
    assert (on["overlap"], off["overlap"]) == (True, False)
    gathered = [found["memory"]["sharded"]["gathered"] for found in (on, off)]
    assert gathered[1] < gathered[0]
    text = output(capsys, *model, "--no-overlap")
    assert text.splitlines()[0].endswith("over 8 devices, overlap=False")
    assert "overlap" not in output(capsys, *model).splitlines()[0]


@pytest.mark.parametrize("more", [[], ["--no-layers"]], ids=str)
def test_the_largest_model_takes_seconds(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    start = time.perf_counter()
    found = summary(capsys, "--model", "llama-70b", "--devices", "64", *more)
    assert time.perf_counter() - start < 5
    assert found["memory"]["sharded"]["params"] == 4 * 70_553_706_496 // 64


@pytest.mark.parametrize(
    "limits",
    [
        ["--devices", "1000000", "--no-layers"],
        ["--devices", "1000000", "--replicas", "1000000", "--accumulate", "1000000"],
        ["--bucket-bytes", "3M", "--no-layers"],
    ],
    ids=" ".join,
)
def test_the_largest_numbers_take_seconds(
    capsys: pytest.CaptureFixture[str], limits: list[str]
) -> None:
    start = time.process_time()
    summary(capsys, "--model", "llama-70b", *limits)
    assert time.process_time() - start < 20


def test_no_device_is_touched() -> None:
    program = (
        "import jax\n"
        "from jaxzero.__main__ import main\n"
        "assert main(['plan', '--model', 'gpt2', '--json']) == 0\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert len(jax.devices()) == 3"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["model"] == "gpt2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--model"]),
        (["--model", "gpt5"], ["--model", "gpt5", "llama-70b"]),
        (["--model", "gpt2", "--devices", "0"], ["--devices", "from 1 to", "'0'"]),
        (["--model", "gpt2", "--replicas", "x"], ["--replicas", "'x'"]),
        (["--model", "gpt2", "--comm-dtype", "int8"], ["int8", "bfloat16"]),
        (["--model", "gpt2", "--bucket-bytes", "64X"], ["'64X'", "such as 64M"]),
        (["--model", "gpt2", "--bucket-bytes", "0"], ["'0'", "from 1 byte"]),
        (["--model", "gpt2", "--bucket-bytes", "1025G"], ["'1025G'", "to 1024G"]),
        (["--model", "gpt2", "--bucket-bytes", "1"], ["buckets; use at least 2K"]),
        (
            ["--model", "gpt2", "--bucket-bytes", "4K", "--no-layers"],
            ["--bucket-bytes 4096", "121,524 buckets; use at least 5K"],
        ),
        (["--model", "gpt2", "--devices", "1000001"], ["--devices", "to 1000000"]),
        (["--model", "gpt2", "--min-shard-numel", "9" * 20], ["to 1000000000000"]),
    ],
    ids=" ".join,
)
def test_wrong_value_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def test_help_shows_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for words in ("(default 8)", "mistral-7b", "examples:", "exit codes"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 88
