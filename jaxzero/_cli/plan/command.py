"""``python -m jaxzero plan``: buckets and memory of a known model, without a device."""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxzero import (
    MemoryEstimate,
    Policy,
    ReducePlan,
    estimate_memory,
    make_layout,
    make_plan,
)
from jaxzero._cli.arguments import Parser, UsageError, add_count, whole_number
from jaxzero._cli.models import LAYERS, MODELS, Params, num_elements

DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MAX_COUNT = 10**6
MAX_BUCKET_BYTES = 1 << 40
MAX_BUCKETS = 100_000
"""More of them take longer than seconds."""

DESCRIPTION = """\
Shows how gradients of a known model travel, and what a ZeRO-3 training step with an
optimizer like Adam needs on each GPU: parameters, gradients, optimizer state, what is
gathered, and temporary buckets. Activations come on top. No device is touched. Layers
are those of apply_layers, each gathered while the one beside it computes; the plan is
then that of one layer, else of all gradients.
"""

EPILOG = """\
examples:
  python -m jaxzero plan --model gpt2
      over eight devices, everything in float32
  python -m jaxzero plan --model llama-70b --devices 64 --compute-dtype bfloat16
      mixed precision: stored in float32, computed and sent in bfloat16
  python -m jaxzero plan --model llama-8b --replicas 4 --accumulate 8 --no-layers
      shards on 8 devices, 4 copies of them, 8 microbatches, all gathered at once
  python -m jaxzero plan --model mistral-7b --json
      one JSON object for scripts, sizes in bytes

exit codes: 0 done; 2 wrong arguments
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    params = MODELS[options.model]()
    try:
        _check_buckets(options, params)
    except UsageError as error:
        parser.error(str(error))
    devices = options.devices * options.replicas
    policy = Policy(
        compute_dtype=options.compute_dtype,
        comm_dtype=options.comm_dtype,
        shard_dtype=options.shard_dtype,
        bucket_bytes=options.bucket_bytes,
        overlap=options.overlap,
    )
    estimate = estimate_memory(
        params,
        options.devices,
        policy,
        min_shard_numel=options.min_shard_numel,
        layers=LAYERS if options.layers else (),
        replicas=options.replicas,
        accumulate=options.accumulate,
    )
    # With layers, `zero3` divides their sums after the reduction.
    policy = (
        dataclasses.replace(policy, op="sum")
        if options.layers
        else dataclasses.replace(policy, divide_by=devices * options.accumulate)
    )
    grads = _grads(params["blocks"][0] if options.layers else params, policy)
    plan = make_plan(
        make_layout(
            grads,
            "data",
            mesh={"data": options.devices},
            min_shard_numel=options.min_shard_numel,
        ),
        policy=dataclasses.replace(policy, shard_dtype=policy.shard_dtype or "float32"),
    )
    if options.json:
        print(json.dumps(_summary(options, params, plan, estimate)))
    else:
        print(_report(options, params, plan, estimate))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jaxzero plan",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        choices=tuple(MODELS),
        required=True,
        metavar="NAME",
        help=f"one of {', '.join(MODELS)}",
    )
    devices = parser.add_argument_group("the run")
    add_count(
        devices, "--devices", 8, MAX_COUNT, "devices that the state is sharded over"
    )
    add_count(
        devices,
        "--replicas",
        1,
        MAX_COUNT,
        "copies of that group, as hybrid sharding has",
    )
    add_count(devices, "--accumulate", 1, MAX_COUNT, "microbatches of a step")
    devices.add_argument(
        "--no-layers",
        dest="layers",
        action="store_false",
        help="gather all parameters at once, not layer by layer",
    )
    policy = parser.add_argument_group("the policy")
    for name, meaning in (
        ("--compute-dtype", "of gathered parameters and their gradients"),
        ("--comm-dtype", "of gradients on the wire (default: that of computing)"),
        ("--shard-dtype", "of stored parameters, gradients and moments"),
    ):
        default = "" if "default" in meaning else " (default: float32)"
        policy.add_argument(name, choices=DTYPES, help=f"dtype {meaning}{default}")
    policy.add_argument(
        "--min-shard-numel",
        type=whole_number(0, 10**12),
        default=0,
        metavar="N",
        help="leaves with fewer elements stay whole on every device (default 0)",
    )
    policy.add_argument(
        "--bucket-bytes",
        type=byte_count,
        metavar="SIZE",
        help="limit of one bucket, such as 64M (default: that of the transport)",
    )
    policy.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="overlap=False: gather a layer when it is needed, not while the one before"
        " computes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def byte_count(text: str) -> int:
    """Reads a size such as 64M, in bytes; K, M and G are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: for anything else, 0, and more than 1024G.
    """
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    count = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= count <= MAX_BUCKET_BYTES:
        raise argparse.ArgumentTypeError(
            f"expected a size from 1 byte to 1024G, such as 64M, not {text!r}"
        )
    return count


def _check_buckets(options: argparse.Namespace, params: Params) -> None:
    """Refuses buckets so small that planning them takes minutes.

    Raises:
        UsageError: if a plan may have more than `MAX_BUCKETS`.
    """
    if options.bucket_bytes is None:
        return
    # All layers have the same plan, which is made once.
    planned = params | {"blocks": params["blocks"][: 1 if options.layers else None]}
    dtype = jnp.dtype(options.comm_dtype or options.compute_dtype or "float32")
    most_bytes = num_elements(planned) * dtype.itemsize
    if most_bytes > MAX_BUCKETS * options.bucket_bytes:
        least_kib = -(-most_bytes // (MAX_BUCKETS * UNITS["K"]))
        raise UsageError(
            f"--bucket-bytes {options.bucket_bytes} may cut {options.model} into"
            f" {-(-most_bytes // options.bucket_bytes):,} buckets; use at least"
            f" {least_kib}K"
        )


def _grads(params: Any, policy: Policy) -> Any:
    """Returns the shapes of gradients, which have the dtype of computing."""
    dtype = jnp.dtype(policy.compute_dtype or "float32")
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def _report(
    options: argparse.Namespace,
    params: Params,
    plan: ReducePlan,
    estimate: MemoryEstimate,
) -> str:
    copies = f" x {options.replicas} replicas" if options.replicas > 1 else ""
    overlap = "" if options.overlap else ", overlap=False"
    what = (
        f"Gradients of one of {len(params['blocks'])} layers:"
        if options.layers
        else "Gradients of all parameters:"
    )
    return "\n".join(
        [
            f"{options.model}: {num_elements(params):,} parameters over "
            f"{options.devices} devices{copies}{overlap}",
            "",
            what,
            str(plan),
            "",
            str(estimate),
        ]
    )


def _summary(
    options: argparse.Namespace,
    params: Params,
    plan: ReducePlan,
    estimate: MemoryEstimate,
) -> dict[str, Any]:
    return {
        "model": options.model,
        "parameters": num_elements(params),
        "devices": options.devices,
        "replicas": options.replicas,
        "overlap": options.overlap,
        "plan": {
            "layers": len(params["blocks"]) if options.layers else None,
            "leaves": len(plan.leaves),
            "buckets": len(plan.buckets),
            "collectives": plan.num_collectives,
            "wire_bytes": plan.wire_bytes,
            "padding_bytes": plan.padding_bytes,
            "peak_temp_bytes": plan.peak_temp_bytes,
            "fingerprint": plan.fingerprint,
        },
        "memory": estimate.asdict(),
    }
