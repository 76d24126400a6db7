"""A transformer like GPT-2, small, as shapes and losses, for its memory."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxzero import apply_layers, gathered

WIDTH = 256
LAYERS = 4
VOCABULARY = 1024
LENGTH = 8

Tree = Any


def shapes() -> Tree:
    """Returns the parameters' shapes, layers in a list."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {
        "ln_1": array(WIDTH),
        "qkv": array(WIDTH, 3 * WIDTH),
        "qkv_bias": array(3 * WIDTH),
        "proj": array(WIDTH, WIDTH),
        "ln_2": array(WIDTH),
        "up": array(WIDTH, 4 * WIDTH),
        "up_bias": array(4 * WIDTH),
        "down": array(4 * WIDTH, WIDTH),
    }
    return {
        "wte": array(VOCABULARY, WIDTH),
        "wpe": array(64, WIDTH),
        "blocks": [block] * LAYERS,
        "ln_f": array(WIDTH),
    }


def stacked_shapes(layers: int = LAYERS) -> Tree:
    """Returns them with the layers stacked."""
    params = shapes()
    stacked = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype),
        params["blocks"][0],
    )
    return params | {"blocks": stacked}


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy; layers in a Python loop."""
    hidden = _embedded(params, tokens)
    for block in params["blocks"]:
        hidden = gathered(_block)(block, hidden)
    return _cross_entropy(params, hidden, tokens)


def loss_stacked(params: Tree, tokens: jax.Array) -> jax.Array:
    """The same with `lax.scan` over layers."""

    def body(hidden: jax.Array, block: Tree) -> tuple[jax.Array, None]:
        return gathered(_block)(block, hidden), None

    hidden, _ = jax.lax.scan(body, _embedded(params, tokens), params["blocks"])
    return _cross_entropy(params, hidden, tokens)


def loss_in_turns(params: Tree, tokens: jax.Array) -> jax.Array:
    """The same with `apply_layers`, for listed and stacked layers."""
    hidden = apply_layers(_block, params["blocks"], _embedded(params, tokens))
    return _cross_entropy(params, hidden, tokens)


def _embedded(params: Tree, tokens: jax.Array) -> jax.Array:
    return params["wte"][tokens] + params["wpe"][: tokens.shape[1]]


def _cross_entropy(params: Tree, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = _normed(hidden, params["ln_f"]) @ params["wte"].T
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))


def _block(params: Tree, hidden: jax.Array) -> jax.Array:
    qkv = _normed(hidden, params["ln_1"]) @ params["qkv"] + params["qkv_bias"]
    heads = [x.reshape(*hidden.shape[:2], 4, -1) for x in jnp.split(qkv, 3, -1)]
    mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
    hidden += mixed.reshape(hidden.shape) @ params["proj"]
    wide = _normed(hidden, params["ln_2"]) @ params["up"] + params["up_bias"]
    return hidden + jax.nn.gelu(wide) @ params["down"]


def _normed(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    centered = hidden - hidden.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(hidden.var(-1, keepdims=True) + 1e-5) * scale
