"""A LLaMA in plain JAX, written as one writes it without this project: einsums, a softmax by hand, weights by
their names in Hugging Face checkpoints. Its builders are what a command's `--model` or `--config` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina import FlaxModel

Params = Mapping[str, Any]


def rms(x: Any, weight: Any, eps: float) -> Any:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype) * weight


def rope(x: Any, positions: Any, theta: float) -> Any:
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(q: Any, k: Any, v: Any) -> Any:
    """q ``[B, T, K, G, H]``, k and v ``[B, T, K, H]``"""
    t = q.shape[1]
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def llama(params: Params, tokens: Any, positions: Any, *, head_dim: int, eps: float, theta: float) -> Any:
    """Logits ``[B, T, V]``. Products of float32 are of float32: on GPUs JAX's default has fewer digits."""
    with jax.default_matmul_precision("float32"):
        return _llama(params, tokens, positions, head_dim, eps, theta)


def _llama(params: Params, tokens: Any, positions: Any, head_dim: int, eps: float, theta: float) -> Any:
    x = params["model.embed_tokens.weight"][tokens]
    layer = 0
    while (root := f"model.layers.{layer}.") + "input_layernorm.weight" in params:
        h = rms(x, params[root + "input_layernorm.weight"], eps)
        q, k, v = (h @ params[f"{root}self_attn.{name}_proj.weight"].T for name in "qkv")
        k, v = (y.reshape(*y.shape[:2], -1, head_dim) for y in (k, v))
        q = q.reshape(*q.shape[:2], -1, head_dim)
        n_kv = k.shape[2]
        q, k = rope(q, positions, theta), rope(k, positions, theta)
        out = attention(q.reshape(*q.shape[:2], n_kv, -1, head_dim), k, v)
        x = x + out.reshape(*x.shape[:2], -1) @ params[root + "self_attn.o_proj.weight"].T
        h = rms(x, params[root + "post_attention_layernorm.weight"], eps)
        gate, up = (h @ params[f"{root}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (jax.nn.silu(gate) * up) @ params[root + "mlp.down_proj.weight"].T
        layer += 1
    head = params.get("lm_head.weight", params["model.embed_tokens.weight"])
    return (rms(x, params["model.norm.weight"], eps) @ head.T).astype(jnp.float32)


def of_weights(config: Any, params: Params, dtype: Any, **more: Any) -> FlaxModel:
    """``config``: a `jaxlamina.models.ModelConfig` of a LLaMA."""
    fn: Callable[..., Any] = partial(
        llama, head_dim=config.head_dim, eps=config.norm_eps, theta=config.rope.theta
    )
    params = {name: jnp.asarray(x, dtype) for name, x in params.items()}
    longest = config.max_position_embeddings
    return FlaxModel(fn, params, vocab_size=config.vocab_size, max_model_len=longest, name="llama", **more)


def demo_float32(dtype: Any = np.float32) -> FlaxModel:
    """The demo model's weights and tokenizer."""
    from jaxlamina.weights import open_checkpoint

    checkpoint = open_checkpoint("smollm2-135m-instruct")
    return of_weights(checkpoint.config, checkpoint.load("float32"), dtype, tokenizer=checkpoint.tokenizer())


def demo_bfloat16() -> FlaxModel:
    return demo_float32(jnp.bfloat16)


def llama_8b() -> FlaxModel:
    """Random weights of LLaMA-3-8B's shape, in bfloat16."""
    from jaxlamina.models.config_files import model_config
    from jaxlamina.weights.dummy import random_weights

    config = model_config("llama-3-8b")
    return of_weights(config, random_weights(config, jnp.bfloat16), jnp.bfloat16)
