"""What a demo run found, and the words and numbers in which it is reported."""

import dataclasses
import math
from typing import Any

import jax

import jaxzero
from jaxzero._cli.demo.check import CheckResult, Curve
from jaxzero._cli.demo.memory import StateBytes
from jaxzero._cli.demo.options import DemoOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        curve: losses and gradient norms until a loss was not finite.
        complete: whether all losses were finite.
        skipped_steps: that a loss scale skipped, their gradients not being finite.
        compile_seconds: of the step.
        train_seconds: of all steps.
        tokens_per_second: without compilation.
        temp_bytes: that a step needs on each device besides the state.
    """

    curve: Curve
    complete: bool
    skipped_steps: int
    compile_seconds: float
    train_seconds: float
    tokens_per_second: float
    temp_bytes: int

    @property
    def start_bits(self) -> float:
        """Bits per byte of the first step."""
        losses = self.curve.losses
        return losses[0] / math.log(2) if losses else math.nan

    @property
    def end_bits(self) -> float:
        """Mean bits per byte of the last tenth of the steps."""
        losses = self.curve.losses
        last = losses[-max(1, len(losses) // 10) :]
        return sum(last) / len(last) / math.log(2) if last else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything that is reported; ``check`` is None if it was not asked for."""

    options: DemoOptions
    numel: int
    run: Run
    sharded: StateBytes
    unsharded: StateBytes
    check: CheckResult | None

    @property
    def exit_code(self) -> int:
        """0 if the run completed and the check, if any, passed; else 1."""
        passed = self.check is None or self.check.passed
        return 0 if self.run.complete and passed else 1


def first_line(options: DemoOptions, numel: int, corpus_bytes: int) -> str:
    """Says what is trained, where, and on what."""
    replicas = (
        f" ({options.replicas} replicas x {options.shards})"
        if options.replicas > 1
        else ""
    )
    return (
        f"{numel:,} parameters on {options.devices} CPU devices{replicas}; each step"
        f" reads {options.batch * options.length:,} of {corpus_bytes:,} bytes of text"
        f" in {options.accumulate} microbatches"
    )


def run_lines(run: Run) -> str:
    """Says how far the loss fell and how long it took."""
    skipped = (
        f"\nsteps skipped, gradients not being finite: {run.skipped_steps}"
        if run.skipped_steps
        else ""
    )
    return (
        f"{run.start_bits:.2f} bits per byte at the start,"
        f" {run.end_bits:.2f} at the end (mean of the last tenth)\n"
        f"compiled in {run.compile_seconds:.1f} s,"
        f" trained in {run.train_seconds:.1f} s:"
        f" {run.tokens_per_second:,.0f} tokens/s{skipped}"
    )


def check_line(check: CheckResult, options: DemoOptions) -> str:
    """Says how far the sharded losses were from the unsharded ones."""
    computed = (
        f", computed in {options.compute_dtype}"
        if options.compute_dtype != "float32"
        else ""
    )
    return (
        f"check {'ok' if check.passed else 'FAILED'}: largest relative loss difference"
        f" {check.largest:.2g} (step {check.step} of {len(check.differences)}),\n"
        f"of the first gradient's norm {check.first_norm_difference:.2g};"
        f" tolerance {check.tolerance:g} for a {options.comm_dtype} wire{computed}"
    )


def summary(result: DemoResult) -> dict[str, Any]:
    """Returns the result as a dictionary for JSON."""
    run, check, plot = result.run, result.check, result.options.plot
    return {
        "command": "demo",
        "exit_code": result.exit_code,
        "options": dataclasses.asdict(result.options)
        | {"plot": None if plot is None else str(plot)},
        "versions": {"jaxzero": jaxzero.__version__, "jax": jax.__version__},
        "parameters": result.numel,
        "complete": run.complete,
        "losses": run.curve.losses,
        "skipped_steps": run.skipped_steps,
        "grad_norms": [_finite(norm) for norm in run.curve.grad_norms],
        "bits_per_byte": {"start": run.start_bits, "end": run.end_bits}
        if run.curve.losses
        else None,
        "compile_seconds": round(run.compile_seconds, 3),
        "train_seconds": round(run.train_seconds, 3),
        "tokens_per_second": round(run.tokens_per_second, 1),
        "bytes_per_device": {
            "sharded": dataclasses.asdict(result.sharded),
            "unsharded": dataclasses.asdict(result.unsharded),
            "temporary": run.temp_bytes,
        },
        "check": None
        if check is None
        else {
            "passed": check.passed,
            "largest_relative_difference": check.largest,
            "first_grad_norm_relative_difference": _finite(check.first_norm_difference),
            "step": check.step,
            "steps": len(check.differences),
            "tolerance": check.tolerance,
        },
    }


def _finite(value: float) -> float | None:
    """Returns a number as JSON takes it, which has no infinity."""
    return value if math.isfinite(value) else None
