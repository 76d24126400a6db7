"""Gradient trees that benchmarks reduce: shapes only."""

import functools
from collections.abc import Callable

Shape = tuple[int, ...]
Tree = dict[str, Shape]


def gpt2(layers: int = 12, width: int = 768, vocab: int = 50257) -> Tree:
    """Returns the parameter shapes of GPT-2: 148 leaves, 124 M parameters."""
    tree: Tree = {"wte": (vocab, width), "wpe": (1024, width)}
    for layer in range(layers):
        block: Tree = {
            "ln_1.scale": (width,),
            "ln_1.bias": (width,),
            "attn.qkv.kernel": (width, 3 * width),
            "attn.qkv.bias": (3 * width,),
            "attn.out.kernel": (width, width),
            "attn.out.bias": (width,),
            "ln_2.scale": (width,),
            "ln_2.bias": (width,),
            "mlp.in.kernel": (width, 4 * width),
            "mlp.in.bias": (4 * width,),
            "mlp.out.kernel": (4 * width, width),
            "mlp.out.bias": (width,),
        }
        tree |= {f"h{layer}.{name}": shape for name, shape in block.items()}
    return tree | {"ln_f.scale": (width,), "ln_f.bias": (width,)}


def layer(width: int = 192) -> Tree:
    """Returns one layer of a GPT-2: 12 leaves."""
    return {
        name: shape
        for name, shape in gpt2(layers=1, width=width).items()
        if name.startswith("h0.")
    }


def llama(
    layers: int = 1, width: int = 4096, hidden: int = 14336, key_values: int = 1024
) -> Tree:
    """Returns layers of Llama 8B: 9 leaves and 218 M parameters each."""
    block: Tree = {
        "attn_norm": (width,),
        "attn.query": (width, width),
        "attn.key": (width, key_values),
        "attn.value": (width, key_values),
        "attn.out": (width, width),
        "mlp_norm": (width,),
        "mlp.gate": (width, hidden),
        "mlp.up": (width, hidden),
        "mlp.down": (hidden, width),
    }
    return {
        f"{i}.{name}": shape for i in range(layers) for name, shape in block.items()
    }


def small(leaves: int = 1000, numel: int = 100) -> Tree:
    """Returns many small leaves, the case where the number of collectives counts."""
    return {f"leaf{i:04d}": (numel,) for i in range(leaves)}


def awkward() -> Tree:
    """Returns leaves that do not divide by the number of ranks."""
    return {
        f"{kind}{i}": shape
        for i in range(24)
        for kind, shape in (
            ("kernel", (1021, 1531 + i)),
            ("bias", (1531 + i,)),
            ("table", (257, 4099)),
        )
    }


TREES: dict[str, Callable[[], Tree]] = {
    "gpt2": gpt2,
    "gpt2-quarter": functools.partial(gpt2, width=192),
    "layer": layer,
    "awkward": awkward,
    "small": small,
}
"""What `bench --tree` takes."""
