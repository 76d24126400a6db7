"""A byte-level decoder-only transformer in plain JAX, small enough for two cores."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

import jaxzero

VOCABULARY = 256
HEAD_WIDTH = 64
ROTARY_BASE = 10_000.0

type Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer; ``width`` is a multiple of ``HEAD_WIDTH``."""

    blocks: int
    width: int


def init_params(key: jax.Array, config: ModelConfig) -> Params:
    """Returns float32 parameters: one embedding, tied to the head, and the blocks."""
    width = config.width
    embed_key, *block_keys = jax.random.split(key, 1 + config.blocks)

    def matrix(key: jax.Array, rows: int, columns: int, gain: float) -> jax.Array:
        return jax.random.normal(key, (rows, columns)) * (gain / math.sqrt(rows))

    def block(key: jax.Array) -> Params:
        qkv, out, up, down = jax.random.split(key, 4)
        # Each block adds twice to the residual stream: keep its variance near one.
        residual_gain = (2 * config.blocks) ** -0.5
        return {
            "attention_norm": jnp.ones(width),
            "qkv": matrix(qkv, width, 3 * width, 1.0),
            "attention_out": matrix(out, width, width, residual_gain),
            "mlp_norm": jnp.ones(width),
            "mlp_up": matrix(up, width, 4 * width, 1.0),
            "mlp_down": matrix(down, 4 * width, width, residual_gain),
        }

    return {
        "embedding": 0.02 * jax.random.normal(embed_key, (VOCABULARY, width)),
        "blocks": [block(key) for key in block_keys],
        "final_norm": jnp.ones(width),
    }


def mean_loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the mean next-byte cross entropy in nats.

    Args:
        params: what ``init_params`` returns.
        tokens: uint8[sequences, length + 1]; byte ``t + 1`` is predicted from
            bytes ``0..t``.

    Returns:
        A float32 scalar.
    """
    predictions = log_probabilities(params, tokens[:, :-1])
    targets = jax.nn.one_hot(tokens[:, 1:], VOCABULARY)
    return -jnp.mean(jnp.sum(predictions * targets, axis=-1))


def log_probabilities(params: Params, inputs: jax.Array) -> jax.Array:
    """Returns what is predicted after each byte; computes in the dtype of ``params``.

    Args:
        params: what ``init_params`` returns, or with its blocks still sharded.
        inputs: uint8[sequences, length].

    Returns:
        float32[sequences, length, 256], natural logarithms.
    """
    # A one-hot product: its gradient is a matrix product too, not a slow scatter.
    embedding = params["embedding"]
    hidden = jax.nn.one_hot(inputs, VOCABULARY, dtype=embedding.dtype) @ embedding
    for block in params["blocks"]:
        hidden = _apply_block(block, hidden)
    logits = _rms_norm(hidden, params["final_norm"]) @ embedding.T
    return jax.nn.log_softmax(logits.astype(jnp.float32))


@jaxzero.gathered
def _apply_block(block: Params, hidden: jax.Array) -> jax.Array:
    hidden += _attention(_rms_norm(hidden, block["attention_norm"]), block)
    return hidden + _mlp(_rms_norm(hidden, block["mlp_norm"]), block)


def _rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    # Squares of 16-bit numbers overflow, or lose what 1e-6 is added to.
    wide = hidden.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(hidden.dtype) * scale


def _attention(hidden: jax.Array, block: Params) -> jax.Array:
    sequences, length, width = hidden.shape
    qkv = (hidden @ block["qkv"]).reshape(sequences, length, 3, -1, HEAD_WIDTH)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    # In float32: JAX has no float16 attention on CPU devices.
    mixed = jax.nn.dot_product_attention(
        _rotate(query), _rotate(key), value.astype(jnp.float32), is_causal=True
    )
    mixed = mixed.astype(hidden.dtype).reshape(sequences, length, width)
    return jnp.matmul(mixed, block["attention_out"])


def _rotate(heads: jax.Array) -> jax.Array:
    """Applies rotary positions to ``[sequences, length, heads, head_width]``.

    Returns float32.
    """
    _, length, _, head_width = heads.shape
    half = head_width // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    positions = jnp.arange(length, dtype=jnp.float32)
    angles = positions[:, None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    heads = heads.astype(jnp.float32)
    first, second = heads[..., :half], heads[..., half:]
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def _mlp(hidden: jax.Array, block: Params) -> jax.Array:
    return jnp.matmul(jax.nn.gelu(hidden @ block["mlp_up"]), block["mlp_down"])
