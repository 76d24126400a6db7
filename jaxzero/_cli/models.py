"""Shapes of the parameters of known models; nothing is allocated."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

type Params = dict[str, Any]

LAYERS = "blocks/*"
"""Key paths of their layers, as `jaxzero.zero3(..., layers=...)` takes them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2:
    """A GPT-2: learned positions, biases, and a head tied to the embedding."""

    layers: int
    width: int
    vocabulary: int = 50257
    positions: int = 1024

    def params(self) -> Params:
        """Returns the shapes of its parameters."""
        width = self.width
        return {
            "wte": _array(self.vocabulary, width),
            "wpe": _array(self.positions, width),
            "blocks": [
                {
                    "ln_1": _affine(width),
                    "attn": {
                        "qkv": _dense(width, 3 * width),
                        "proj": _dense(width, width),
                    },
                    "ln_2": _affine(width),
                    "mlp": {
                        "up": _dense(width, 4 * width),
                        "down": _dense(4 * width, width),
                    },
                }
                for _ in range(self.layers)
            ],
            "ln_f": _affine(width),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama or Mistral: grouped key-value heads, a gated MLP, no biases."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    def params(self) -> Params:
        """Returns the shapes of its parameters."""
        width, hidden = self.width, self.hidden
        kv_width = width // self.heads * self.kv_heads
        params = {
            "embed": _array(self.vocabulary, width),
            "blocks": [
                {
                    "attn_norm": _array(width),
                    "q": _array(width, width),
                    "k": _array(width, kv_width),
                    "v": _array(width, kv_width),
                    "o": _array(width, width),
                    "mlp_norm": _array(width),
                    "gate": _array(width, hidden),
                    "up": _array(width, hidden),
                    "down": _array(hidden, width),
                }
                for _ in range(self.layers)
            ],
            "norm": _array(width),
        }
        return (
            params if self.tied else params | {"head": _array(width, self.vocabulary)}
        )


def _llama3(**sizes: Any) -> Llama:
    return Llama(kv_heads=8, vocabulary=128256, **sizes)


LLAMA_8B = _llama3(layers=32, width=4096, hidden=14336, heads=32)

MODELS: Mapping[str, Callable[[], Params]] = {
    "gpt2": Gpt2(layers=12, width=768).params,
    "gpt2-medium": Gpt2(layers=24, width=1024).params,
    "gpt2-large": Gpt2(layers=36, width=1280).params,
    "gpt2-xl": Gpt2(layers=48, width=1600).params,
    "llama-3.2-1b": _llama3(
        layers=16, width=2048, hidden=8192, heads=32, tied=True
    ).params,
    "llama-8b": LLAMA_8B.params,
    "llama-70b": _llama3(layers=80, width=8192, hidden=28672, heads=64).params,
    "mistral-7b": Llama(
        layers=32, width=4096, hidden=14336, heads=32, kv_heads=8, vocabulary=32000
    ).params,
}
"""Per name, what returns its parameters' shapes, float32."""


def num_elements(params: Params) -> int:
    """Returns the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def _affine(width: int) -> Params:
    return {"scale": _array(width), "bias": _array(width)}


def _dense(rows: int, columns: int) -> Params:
    return {"w": _array(rows, columns), "b": _array(columns)}
