"""As in Flax's own language-modelling example: nn.MultiHeadDotProductAttention with nn.make_causal_mask,
learned position embeddings looked up by the positions given, dropout everywhere, switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

VOCAB_SIZE = 120
MAX_LEN = 128


@struct.dataclass
class TransformerConfig:
    vocab_size: int = VOCAB_SIZE
    emb_dim: int = 32
    num_heads: int = 4
    num_layers: int = 2
    qkv_dim: int = 64
    mlp_dim: int = 64
    max_len: int = MAX_LEN
    dropout_rate: float = 0.1
    deterministic: bool = True
    embed_init: Any = nn.initializers.normal(stddev=0.7)
    kernel_init: Any = nn.initializers.xavier_uniform()
    bias_init: Any = nn.initializers.normal(stddev=0.05)


class MlpBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        cfg = self.config
        x = nn.Dense(cfg.mlp_dim, kernel_init=cfg.kernel_init, bias_init=cfg.bias_init)(inputs)
        x = nn.elu(x)
        x = nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=cfg.deterministic)
        x = nn.Dense(inputs.shape[-1], kernel_init=cfg.kernel_init, bias_init=cfg.bias_init)(x)
        return nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=cfg.deterministic)


class Block(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, decoder_mask: jax.Array) -> jax.Array:
        cfg = self.config
        x = nn.LayerNorm()(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=cfg.num_heads,
            qkv_features=cfg.qkv_dim,
            kernel_init=cfg.kernel_init,
            bias_init=cfg.bias_init,
            use_bias=True,
            broadcast_dropout=False,
            dropout_rate=cfg.dropout_rate,
            deterministic=cfg.deterministic,
        )(x, mask=decoder_mask)
        x = nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=cfg.deterministic)
        x = x + inputs
        return x + MlpBlock(cfg)(nn.LayerNorm()(x))


class TransformerLM(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, inputs_positions: jax.Array) -> jax.Array:
        cfg = self.config
        mask = nn.make_causal_mask(jnp.ones_like(inputs))
        y = nn.Embed(cfg.vocab_size, cfg.emb_dim, embedding_init=cfg.embed_init, name="embed")(inputs)
        pos = nn.Embed(cfg.max_len, cfg.emb_dim, embedding_init=cfg.embed_init, name="posembed")
        y = y + pos(inputs_positions)
        y = nn.Dropout(rate=cfg.dropout_rate)(y, deterministic=cfg.deterministic)
        for lyr in range(cfg.num_layers):
            y = Block(cfg, name=f"block_{lyr}")(y, mask)
        y = nn.LayerNorm(name="norm")(y)
        return nn.Dense(cfg.vocab_size, kernel_init=nn.initializers.lecun_normal(), name="logits")(y)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    module = TransformerLM(TransformerConfig())
    zeros = jnp.zeros((1, 1), jnp.int32)
    return module.apply, jax.jit(module.init)({"params": jax.random.key(seed)}, zeros, zeros)
