import subprocess
import sys

import jax
import pytest

from jaxzero._cli.arguments import UsageError
from jaxzero._cli.demo import needs
from jaxzero._cli.demo.model import ModelConfig, init_params
from jaxzero._cli.demo.needs import check_memory, needed_bytes
from jaxzero._cli.demo.options import DemoOptions, demo_parser, parse_options
from jaxzero._cli.demo.training import make_optimizer, sharded_trainer


def options(*arguments: str) -> DemoOptions:
    return parse_options(demo_parser(), arguments)


# As in the command; optax computes with numbers of several dtypes.
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("more", [[], ["--layers"]], ids=str)
def test_a_step_needs_at_least_what_is_said(more: list[str]) -> None:
    sizes = ("--blocks", "2", "--width", "64", "--length", "8")
    asked = options(*sizes, "--devices", "2", "--batch", "8", *more)
    config = ModelConfig(blocks=asked.blocks, width=asked.width)
    params = init_params(jax.random.key(0), config)
    trainer = sharded_trainer(params, make_optimizer(asked.steps), asked)
    shape = (asked.batch, asked.length + 1)
    tokens = trainer.place(jax.numpy.zeros(shape, jax.numpy.uint8))
    used = trainer.lower(trainer.state, tokens).compile().memory_analysis()
    device = used.argument_size_in_bytes + used.temp_size_in_bytes
    full = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    all_devices = asked.devices * device + full
    assert all_devices / 20 < needed_bytes(asked) <= all_devices


@pytest.mark.parametrize(
    "more",
    [["--replicas", "8"], ["--check"], ["--compute-dtype", "float16"]],
    ids=" ".join,
)
def test_what_needs_more_or_less_is_counted(more: list[str]) -> None:
    plain = needed_bytes(options("--devices", "8", "--batch", "512"))
    other = needed_bytes(options("--devices", "8", "--batch", "512", *more))
    assert (other < plain) if "float16" in more else (other > plain)


def test_a_run_is_refused_only_if_it_cannot_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = options()
    needed = needed_bytes(asked)
    for free in (needed, None):
        monkeypatch.setattr(needs, "free_host_bytes", lambda free=free: free)
        check_memory(asked)
    monkeypatch.setattr(needs, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match="needs at least"):
        check_memory(asked)


def test_the_largest_sizes_end_at_once_with_one_line() -> None:
    sizes = ("--blocks", "128", "--width", "4096", "--length", "2048")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jaxzero", "demo", *sizes],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert "--blocks 128" in done.stderr and "GB are free" in done.stderr
