"""The reduce-scatter of PyTorch's FSDP2 on the same trees: `benchmarks/fsdp2.py`.

    python -m jaxzero launch -n 4 --platform cuda -- \
        python benchmarks/fsdp2.py --out /tmp/found

A module whose parameters are the tree is sharded as one group; its backward pass only
hands out fresh gradients in the dtype in which they travel. The time of FSDP2 is that
of this backward pass minus that of the same on a copy that is not sharded. Parameters,
and so their shards of gradients, are float32. The limit is one flat tensor of as many
bytes. Times are those of CUDA events, medians of runs that take turns. On CPU devices
it only shows that all of it runs.
"""

import argparse
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import bandwidth
import bus
import record

from jaxzero._cli.bench.table import table
from jaxzero._cli.bench.trees import Tree
from jaxzero._cli.launch import environment

FLAT = "torch, one flat tensor"
Measure = Callable[[], float]


def module(tree: Tree, dtype: Any) -> Any:
    """Returns a module whose backward pass only hands out gradients."""
    import torch

    class HandOut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, batch: Any, *params: Any) -> Any:
            ctx.like = [(param.shape, param.dtype, param.device) for param in params]
            return batch.sum()

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            fresh = (
                torch.empty(shape, dtype=own, device=device)
                for shape, own, device in ctx.like
            )
            return None, *fresh

    class Leaves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, shape in enumerate(tree.values()):
                leaf = torch.zeros(shape, dtype=dtype, device=_device())
                self.register_parameter(f"leaf{number}", torch.nn.Parameter(leaf))

        def forward(self, batch: Any) -> Any:
            # FSDP2 has put the gathered parameters in the place of its shards.
            leaves = [getattr(self, f"leaf{number}") for number in range(len(tree))]
            return HandOut.apply(batch, *leaves)

    return Leaves()


def backward(model: Any) -> Measure:
    """Returns what times a backward pass in seconds; the forward pass is not timed."""
    import torch

    batch = torch.zeros(1, device=_device())

    def measure() -> float:
        loss = model(batch)
        seconds = _timed(loss.backward)
        model.zero_grad(set_to_none=True)
        return seconds

    return measure


def flat(nbytes: int, wire: Any, ranks: int) -> Measure:
    """Returns what times the reduce-scatter of one tensor of as many bytes."""
    import torch

    numel = -(-nbytes // wire.itemsize // ranks // 64) * 64
    send = torch.zeros(ranks * numel, dtype=wire, device=_device())
    receive = torch.zeros(numel, dtype=wire, device=_device())
    reduce = torch.distributed.reduce_scatter_tensor
    return lambda: _timed(lambda: reduce(receive, send))


def _device() -> str:
    import torch

    return "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"


def _timed(call: Callable[[], Any]) -> float:
    import torch

    if _device() == "cpu":
        torch.distributed.barrier()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.distributed.barrier()
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def rows(name: str, tree: Tree, wire: str, ranks: int, repeats: int) -> list[bus.Row]:
    """Measures one tree in one dtype."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = getattr(torch, wire)
    sharded = module(tree, torch.float32)
    fully_shard(
        sharded,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        reshard_after_forward=False,
    )
    plain = module(tree, dtype)
    nbytes = sum(p.numel() for p in plain.parameters()) * dtype.itemsize
    measures = {
        "sharded": backward(sharded),
        "plain": backward(plain),
        FLAT: flat(nbytes, dtype, ranks),
    }
    times: dict[str, list[float]] = {how: [] for how in measures}
    for number in range(-3, repeats):
        for how, measure in measures.items():
            seconds = measure()
            if number >= 0:
                times[how].append(seconds)
    median = {how: statistics.median(values) for how, values in times.items()}
    found = {
        "FSDP2": median["sharded"] - median["plain"],
        "FSDP2, all of backward": median["sharded"],
        FLAT: median[FLAT],
    }
    return [
        bus.row(
            tree=name,
            leaves=len(tree),
            nbytes=nbytes,
            ranks=ranks,
            wire=wire,
            into="fresh" if how == FLAT else "float32",
            how=how,
            seconds=seconds,
        )
        for how, seconds in found.items()
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for a JSON file")
    names = list(bandwidth.TREES)
    parser.add_argument("--trees", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--wires", nargs="+", default=["bfloat16", "float32"], metavar="DTYPE"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a few numbers per tree")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    return parser.parse_args(arguments)


def main() -> None:
    """Joins the other ranks and measures."""
    options = parse()
    import torch

    rank = int(os.environ[environment.PROCESS_ID])
    ranks = int(os.environ[environment.NUM_PROCESSES])
    where = _join(options.device, rank, ranks)
    found: list[bus.Row] = []
    for name in options.trees:
        for wire in options.wires:
            tree = bandwidth.tree_of(name, tiny=options.tiny)
            new = rows(name, tree, wire, ranks, options.repeats)
            found += new
            if rank == 0:
                print(table(new), end="\n\n", flush=True)
                if options.out:
                    record.save(f"fsdp2_{ranks}", found, options.out, where)
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


def _join(kind: str, rank: int, ranks: int) -> dict[str, str]:
    """Joins the other ranks, and returns versions and hardware."""
    import torch

    # JAX's coordinator is not started here, so its address is free.
    address = f"tcp://{os.environ[environment.COORDINATOR]}"
    if kind == "cpu":
        torch.distributed.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=ranks
        )
        return {"torch": torch.__version__, "device": f"{ranks} x cpu"}
    device = int(os.environ[environment.LOCAL_DEVICE_IDS].split(",")[0])
    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl",
        init_method=address,
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", device),
    )
    return {
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "device": f"{ranks} x {torch.cuda.get_device_name()}",
    }


if __name__ == "__main__":
    main()
