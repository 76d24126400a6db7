"""A byte-level decoder-only transformer in plain JAX, small enough for two cores."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

VOCABULARY = 256
HEAD_WIDTH = 64
ROTARY_BASE = 10_000.0

type Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer; ``width`` is a multiple of ``HEAD_WIDTH``."""

    layers: int
    width: int


def init_params(key: jax.Array, config: ModelConfig) -> Params:
    """Returns float32 parameters: one embedding, tied to the head, and the blocks."""
    width = config.width
    embed_key, *block_keys = jax.random.split(key, 1 + config.layers)

    def matrix(key: jax.Array, rows: int, columns: int, gain: float) -> jax.Array:
        return jax.random.normal(key, (rows, columns)) * (gain / math.sqrt(rows))

    def block(key: jax.Array) -> Params:
        qkv, out, up, down = jax.random.split(key, 4)
        # Each block adds twice to the residual stream: keep its variance near one.
        residual_gain = (2 * config.layers) ** -0.5
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
    """Returns what is predicted after each byte.

    Args:
        params: what ``init_params`` returns.
        inputs: uint8[sequences, length].

    Returns:
        float32[sequences, length, 256], natural logarithms.
    """
    # A one-hot product: its gradient is a matrix product too, not a slow scatter.
    hidden = jax.nn.one_hot(inputs, VOCABULARY) @ params["embedding"]
    for block in params["blocks"]:
        hidden += _attention(_rms_norm(hidden, block["attention_norm"]), block)
        hidden += _mlp(_rms_norm(hidden, block["mlp_norm"]), block)
    logits = _rms_norm(hidden, params["final_norm"]) @ params["embedding"].T
    return jax.nn.log_softmax(logits)


def _rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(hidden), axis=-1, keepdims=True)
    return hidden * jax.lax.rsqrt(mean_square + 1e-6) * scale


def _attention(hidden: jax.Array, block: Params) -> jax.Array:
    sequences, length, width = hidden.shape
    qkv = (hidden @ block["qkv"]).reshape(sequences, length, 3, -1, HEAD_WIDTH)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    mixed = jax.nn.dot_product_attention(
        _rotate(query), _rotate(key), value, is_causal=True
    )
    return jnp.matmul(mixed.reshape(sequences, length, width), block["attention_out"])


def _rotate(heads: jax.Array) -> jax.Array:
    """Applies rotary positions to ``[sequences, length, heads, head_width]``."""
    _, length, _, head_width = heads.shape
    half = head_width // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    positions = jnp.arange(length, dtype=jnp.float32)
    angles = positions[:, None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = heads[..., :half], heads[..., half:]
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def _mlp(hidden: jax.Array, block: Params) -> jax.Array:
    return jnp.matmul(jax.nn.gelu(hidden @ block["mlp_up"]), block["mlp_down"])
