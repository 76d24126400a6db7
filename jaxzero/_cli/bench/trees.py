"""Gradient trees that benchmarks reduce: shapes only."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxzero._cli.models import LLAMA_8B, Gpt2, Llama

Shape = tuple[int, ...]
Tree = dict[str, Shape]


def shapes(params: Any) -> Tree:
    """Returns the shapes of a model's parameters by their key paths."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def gpt2(layers: int = 12, width: int = 768) -> Tree:
    """Returns the parameters of a GPT-2: 148 leaves, 124 M parameters."""
    return shapes(Gpt2(layers=layers, width=width).params())


def layer(width: int = 192) -> Tree:
    """Returns one layer of a GPT-2: 12 leaves."""
    return shapes(Gpt2(layers=1, width=width).params()["blocks"][0])


def llama(layers: int = 1, model: Llama = LLAMA_8B) -> Tree:
    """Returns layers of a Llama: of Llama 8B 9 leaves, 218 M parameters each."""
    return shapes(dataclasses.replace(model, layers=layers).params()["blocks"])


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
