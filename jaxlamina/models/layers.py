"""The parts of a decoder layer. Attribute names are the Hugging Face tensor names, weights lie `[out, in]`.

Knows arrays and the attention operator; knows nothing of configurations' files, of KV or of slicing.
Projection, norm, rotation and attention stay separate calls, queries before keys and values, because a slice
of the model begins and ends between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlamina.models.config import ModelConfig
from jaxlamina.models.rope import rotate
from pallas_kernels import cpu, exact
from splitter import attention

# Makes one parameter: ("matrix" | "scale" | "bias", shape) -> an array, or its shape and dtype alone.
Make = Callable[[str, tuple[int, ...]], Any]


# Up to this many rows a CPU matmul is run weight first; beyond it, packing the weight is paid back.
_FEW_ROWS = 64


def _times_transposed(x: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x [..., in], w [out, in] -> x w^T [..., out], accumulated and returned in ``dtype``.

    On CPU with few rows, which is a decode step, it is computed as (w x^T)^T. XLA's CPU kernels repack their
    right operand on every call, which for x w^T is the whole weight, and fuse a single row's product into
    slow scalar loops. Weight first, only the few rows are packed: two cores, float32, ``[576 | 1536, …]``
    weights, in chains as a model has them, went from 8 to 17 and from 21 to 33 GB/s of weights at 1 row (JAX
    0.10.2; 1-3 GB/s without it on 0.11.2), from 10 to 20 at 8 rows and from 6 to 9 at 32. The barriers keep
    XLA from turning it back. Native kernels, where they are, take the plain product.
    """
    n_rows = math.prod(x.shape[:-1])
    product = partial(jax.lax.dot_general, precision=exact(w.dtype), preferred_element_type=dtype)
    platform = jax.default_backend()
    if n_rows > _FEW_ROWS or platform != "cpu" or cpu.serves(platform):
        return product(x, w, (((x.ndim - 1,), (1,)), ((), ())))
    columns = jax.lax.optimization_barrier(x.reshape(n_rows, -1).T)
    y = product(w, columns, (((1,), (0,)), ((), ())))
    return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1)


def linear(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    """x [..., in], w [out, in], b [out] -> x w^T + b [..., out]. Every projection of every model."""
    y = _times_transposed(x, w)
    return y if b is None else y + b


def vocabulary_logits(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., D], w [V, D] -> float32 [..., V]: bfloat16 would tie neighbours for no gain."""
    return _times_transposed(x, w, jnp.float32)


def _value(variable: nnx.Param | None) -> jax.Array | None:
    return None if variable is None else variable[...]


class Linear(nnx.Module):
    """`weight` [out, in], `bias` [out] or None."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, make: Make) -> None:
        self.weight = nnx.Param(make("matrix", (n_out, n_in)))
        self.bias = nnx.Param(make("bias", (n_out,))) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.weight[...], _value(self.bias))


class Embedding(nnx.Module):
    """`weight` [rows, width], looked up by row number."""

    def __init__(self, n_rows: int, width: int, *, make: Make) -> None:
        self.weight = nnx.Param(make("matrix", (n_rows, width)))

    def __call__(self, rows: jax.Array) -> jax.Array:
        return jnp.take(self.weight[...], rows, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """Root mean square in float32, cast back, then scaled: the order Hugging Face rounds in. With
    ``plus_one`` scaled by 1 + weight in float32, then cast back, which is Gemma's order."""

    def __init__(self, width: int, eps: float, *, plus_one: bool = False, make: Make) -> None:
        self.weight = nnx.Param(make("bias" if plus_one else "scale", (width,)))
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.plus_one:
            return (wide * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return self.weight[...] * wide.astype(x.dtype)


def rms_norm(config: ModelConfig, width: int, make: Make) -> RMSNorm:
    return RMSNorm(width, config.norm_eps, plus_one=config.norm_plus_one, make=make)


class LayerNorm(nnx.Module):
    """Mean and variance in float32; `weight` and `bias` [width], both None where the norm learns nothing."""

    def __init__(self, width: int, eps: float, *, affine: bool, make: Make) -> None:
        self.weight = nnx.Param(make("scale", (width,))) if affine else None
        self.bias = nnx.Param(make("bias", (width,))) if affine else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.weight is not None and self.bias is not None:
            wide = wide * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)


class Attention(nnx.Module):
    """Projections around the attention operator: [B, T, D] -> [B, T, D]; tables are cosine and sine."""

    def __init__(self, config: ModelConfig, layer: int, *, make: Make) -> None:
        d, h = config.hidden_size, config.head_dim
        n, k = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = h
        self.window = config.windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.name = f"layers.{layer}.self_attn"
        self.q_proj = Linear(d, n * h, bias=config.qkv_bias, make=make)
        self.k_proj = Linear(d, k * h, bias=config.qkv_bias, make=make)
        self.v_proj = Linear(d, k * h, bias=config.qkv_bias, make=make)
        out = Linear(n * h, d, bias=config.o_bias, make=make)
        if config.model_type == "opt":
            self.out_proj = out
        else:
            self.o_proj = out
        self.q_norm = rms_norm(config, h, make) if config.qk_norm else None
        self.k_norm = rms_norm(config, h, make) if config.qk_norm else None

    def queries(self, x: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        """[B, T, D] -> [B, T, N, H], normed and rotated."""
        return self._turned(self._heads(self.q_proj(x)), self.q_norm, tables)

    def keys(self, x: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        """[B, T, D] -> [B, T, K, H], normed and rotated: what the KV cache holds."""
        return self._turned(self._heads(self.k_proj(x)), self.k_norm, tables)

    def values(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, K, H]."""
        return self._heads(self.v_proj(x))

    def project_out(self, out: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D]."""
        flat = out.reshape(*out.shape[:2], -1)
        return self.out_proj(flat) if hasattr(self, "out_proj") else self.o_proj(flat)

    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        # Queries come first so that a slice can send them off before keys and values are computed.
        q = self.queries(x, tables)
        k = self.keys(x, tables)
        v = self.values(x)
        out = attention(q, k, v, scale=self.scale, window=self.window, softcap=self.softcap, name=self.name)
        return self.project_out(out)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    @staticmethod
    def _turned(x: jax.Array, norm: RMSNorm | None, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        if norm is not None:
            x = norm(x)
        return x if tables is None else rotate(x, *tables)


def activated(act: str, x: jax.Array) -> jax.Array:
    return jax.nn.silu(x) if act == "silu" else jax.nn.gelu(x, approximate=True)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)); D -> F -> D."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        d, f = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(d, f, bias=config.mlp_bias, make=make)
        self.up_proj = Linear(d, f, bias=config.mlp_bias, make=make)
        self.down_proj = Linear(f, d, bias=config.mlp_bias, make=make)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(activated(self.act, self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nnx.Module):
    """Layer with two norms, before attention and before the MLP: every family but opt and Gemma from 2 on."""

    def __init__(self, config: ModelConfig, layer: int, mlp: nnx.Module, *, make: Make) -> None:
        self.residual_scale = config.residual_scale
        self.input_layernorm = rms_norm(config, config.hidden_size, make)
        self.self_attn = Attention(config, layer, make=make)
        self.post_attention_layernorm = rms_norm(config, config.hidden_size, make)
        self.mlp = mlp

    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        x = x + self._scaled(self.self_attn(self.input_layernorm(x), tables))
        return x + self._scaled(self.mlp(self.post_attention_layernorm(x)))

    def _scaled(self, x: jax.Array) -> jax.Array:
        if self.residual_scale == 1:
            return x
        return (x.astype(jnp.float32) * self.residual_scale).astype(x.dtype)


class FourNormLayer(nnx.Module):
    """Layer with norms before and after attention and the MLP (Gemma 2 and 3)."""

    def __init__(self, config: ModelConfig, layer: int, mlp: nnx.Module, *, make: Make) -> None:
        d = config.hidden_size
        self.input_layernorm = rms_norm(config, d, make)
        self.self_attn = Attention(config, layer, make=make)
        self.post_attention_layernorm = rms_norm(config, d, make)
        self.pre_feedforward_layernorm = rms_norm(config, d, make)
        self.mlp = mlp
        self.post_feedforward_layernorm = rms_norm(config, d, make)

    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), tables))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class OptLayer(nnx.Module):
    """Layer of opt: norms before each block, or after each residual sum (opt-350m)."""

    def __init__(self, config: ModelConfig, layer: int, *, make: Make) -> None:
        d, f = config.hidden_size, config.intermediate_size
        self.norm_first = config.norm_first
        self.act = config.hidden_act
        self.self_attn = Attention(config, layer, make=make)
        self.self_attn_layer_norm = LayerNorm(d, config.norm_eps, affine=config.norm_affine, make=make)
        self.fc1 = Linear(d, f, bias=config.mlp_bias, make=make)
        self.fc2 = Linear(f, d, bias=config.mlp_bias, make=make)
        self.final_layer_norm = LayerNorm(d, config.norm_eps, affine=config.norm_affine, make=make)

    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        if self.norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), tables)
            return x + self._mlp(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, tables))
        return self.final_layer_norm(x + self._mlp(x))

    def _mlp(self, x: jax.Array) -> jax.Array:
        hidden = self.fc1(x)
        hidden = jax.nn.relu(hidden) if self.act == "relu" else jax.nn.gelu(hidden, approximate=False)
        return self.fc2(hidden)
