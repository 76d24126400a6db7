"""The demo's run: train sharded, compare with unsharded if asked, report."""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import optax

import jaxzero
from jaxzero._cli.arguments import UsageError
from jaxzero._cli.demo.check import (
    CHECKED_STEPS,
    CheckResult,
    Curve,
    compare,
    tolerance,
)
from jaxzero._cli.demo.memory import measured_bytes, memory_table, unsharded_bytes
from jaxzero._cli.demo.model import ModelConfig, Params, init_params
from jaxzero._cli.demo.needs import check_memory
from jaxzero._cli.demo.options import DemoOptions
from jaxzero._cli.demo.progress import make_progress
from jaxzero._cli.demo.result import (
    DemoResult,
    Run,
    check_line,
    first_line,
    run_lines,
    summary,
)
from jaxzero._cli.demo.text import Bytes, batch_at, load_corpus
from jaxzero._cli.demo.training import (
    Trainer,
    make_optimizer,
    make_policy,
    sharded_trainer,
    unsharded_trainer,
)

Batches = Callable[[int], Bytes]


def run_demo(options: DemoOptions) -> int:
    """Runs the demo; returns the exit code."""
    check_memory(options)
    try:
        corpus = load_corpus()
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error

    def batches(step: int) -> Bytes:
        return batch_at(
            corpus,
            (options.seed, step),
            shape=(options.batch,),
            length=options.length,
        )

    config = ModelConfig(blocks=options.blocks, width=options.width)
    params = init_params(jax.random.key(options.seed), config)
    numel = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(first_line(options, numel, len(corpus)), end="\n\n")
    print(_plan(params, options), end="\n\n")
    optimizer = make_optimizer(options.steps)
    trainer = sharded_trainer(params, optimizer, options)
    run, state = _train("sharded", trainer, batches, options.steps)
    sharded, unsharded = measured_bytes(state), unsharded_bytes(params, optimizer)
    print(f"\n{run_lines(run)}\n")
    print(memory_table(sharded, unsharded, run.temp_bytes))
    check = None
    if options.check and run.complete:
        check = _check(run, params, optimizer, batches, options)
    result = DemoResult(
        options=options,
        numel=numel,
        run=run,
        sharded=sharded,
        unsharded=unsharded,
        check=check,
    )
    if options.plot is not None:
        # Imported late: matplotlib is needed for this option only.
        from jaxzero._cli.demo.plot import save_plot

        save_plot(options.plot, result)
        print(f"plot: {options.plot}")
    if options.json:
        print(json.dumps(summary(result), allow_nan=False))
    return result.exit_code


def _plan(params: Params, options: DemoOptions) -> str:
    """Returns the plan by which gradients travel, of one block if blocks do."""
    policy = make_policy(options)
    if options.layers:
        # What a block's backward pass sums is divided later.
        plan = _plan_of(params["blocks"][0], options, replace(policy, op="sum"))
        return f"each block travels alone:\n{plan}"
    divisor = options.devices * options.accumulate
    return str(_plan_of(params, options, replace(policy, divide_by=divisor)))


def _plan_of(
    grads: Params, options: DemoOptions, policy: jaxzero.Policy
) -> jaxzero.ReducePlan:
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, options.compute_dtype), grads
    )
    return jaxzero.make_plan(shapes, options.shards, policy)


def _check(
    run: Run,
    params: Params,
    optimizer: optax.GradientTransformation,
    batches: Batches,
    options: DemoOptions,
) -> CheckResult:
    print()
    steps = min(options.steps, CHECKED_STEPS)
    trainer = unsharded_trainer(params, optimizer)
    reference, _ = _train("unsharded", trainer, batches, steps)
    limit = tolerance(options.comm_dtype, options.compute_dtype)
    check = compare(run.curve, reference.curve, limit)
    print(f"\n{check_line(check, options)}")
    return check


def _train(
    label: str, trainer: Trainer, batches: Batches, steps: int
) -> tuple[Run, Any]:
    print(f"{label}: compiling", flush=True)
    start = time.monotonic()
    state = trainer.state
    step: Any = trainer.lower(state, trainer.place(batches(0))).compile()
    compiled = time.monotonic()
    losses: list[float] = []
    grad_norms: list[float] = []
    skipped = tokens = 0
    progress = make_progress(label, steps)
    for index in range(steps):
        batch = batches(index)
        state, metrics = step(state, trainer.place(batch))
        loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
        if not math.isfinite(loss):
            print(f"{label}: loss {loss} in step {index + 1}", file=sys.stderr)
            break
        losses.append(loss)
        grad_norms.append(grad_norm)
        skipped += bool(metrics.skipped)
        tokens += batch[..., 1:].size
        progress.update(
            index + 1,
            f"loss {loss:.3f}  grad norm {grad_norm:.2f}"
            f"  {tokens / (time.monotonic() - compiled):,.0f} tokens/s",
        )
    progress.close()
    train_seconds = time.monotonic() - compiled
    run = Run(
        curve=Curve(losses=tuple(losses), grad_norms=tuple(grad_norms)),
        complete=len(losses) == steps,
        skipped_steps=skipped,
        compile_seconds=compiled - start,
        train_seconds=train_seconds,
        tokens_per_second=tokens / train_seconds,
        temp_bytes=step.memory_analysis().temp_size_in_bytes,
    )
    return run, state
