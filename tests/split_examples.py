"""Small real models that the splitter's tests cut, and a loop that runs what the splitter hands out.

Written in plain JAX and plain Flax, on purpose without the project's own decoder.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from splitter import SplitModel, attention

N, K, H, D, F, V = 4, 2, 8, 32, 64, 97


def rms(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w


def rope(x, positions):
    inv_freq = 1e4 ** (-np.arange(0, H, 2, dtype=np.float32) / H)
    angle = positions[..., None, None] * inv_freq
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def qkv(layer, h, positions):
    heads = lambda w: (h @ w).reshape(*h.shape[:2], -1, H)
    return rope(heads(layer["q"]), positions), rope(heads(layer["k"]), positions), heads(layer["v"])


def mlp(layer, h):
    return (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]


def layer_params(make: Any) -> dict[str, Any]:
    return {
        "norm1": make(D), "q": make(D, N * H), "k": make(D, K * H), "v": make(D, K * H), "o": make(N * H, D),
        "norm2": make(D), "gate": make(D, F), "up": make(D, F), "down": make(F, D),
    }  # fmt: skip


def llama_params(n_layers: int, *, abstract: bool = False, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def make(*shape):
        if abstract:
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    return {"embed": make(V, D), "norm": make(D), "layers": [layer_params(make) for _ in range(n_layers)]}


def llama_layer(x, layer, positions):
    q, k, v = qkv(layer, rms(x, layer["norm1"]), positions)
    x = x + attention(q, k, v).reshape(*x.shape[:2], -1) @ layer["o"]
    return x + mlp(layer, rms(x, layer["norm2"]))


def llama(params, tokens, positions):
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = llama_layer(x, layer, positions)
    return rms(x, params["norm"]) @ params["embed"].T


def stacked(params: dict[str, Any]) -> dict[str, Any]:
    return params | {"layers": jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])}


def scanned_llama(params, tokens, positions):
    """The same model as a scan over stacked layers, each rematerialised."""
    body = jax.checkpoint(lambda x, layer: (llama_layer(x, layer, positions), None))
    x, _ = jax.lax.scan(body, params["embed"][tokens], params["layers"])
    return rms(x, params["norm"]) @ params["embed"].T


def parallel_llama(params, tokens, positions):
    """Attention and MLP side by side (GPT-J, Falcon)."""
    x = params["embed"][tokens]
    for layer in params["layers"]:
        h = rms(x, layer["norm1"])
        q, k, v = qkv(layer, h, positions)
        x = x + attention(q, k, v).reshape(*x.shape[:2], -1) @ layer["o"] + mlp(layer, h)
    return rms(x, params["norm"]) @ params["embed"].T


def value_residual_llama(params, tokens, positions):
    """Every later layer mixes in the first layer's values, so they must be carried."""
    x, first_v = params["embed"][tokens], None
    for layer in params["layers"]:
        q, k, v = qkv(layer, rms(x, layer["norm1"]), positions)
        first_v = v if first_v is None else first_v
        x = x + attention(q, k, (v + first_v) / 2).reshape(*x.shape[:2], -1) @ layer["o"]
        x = x + mlp(layer, rms(x, layer["norm2"]))
    return rms(x, params["norm"]) @ params["embed"].T


def shared_kv_llama(params, tokens, positions):
    """Odd layers reuse the k and v of the layer before (cross-layer KV)."""
    x, kv = params["embed"][tokens], None
    for i, layer in enumerate(params["layers"]):
        q, k, v = qkv(layer, rms(x, layer["norm1"]), positions)
        kv = (k, v) if i % 2 == 0 else kv
        x = x + attention(q, *kv).reshape(*x.shape[:2], -1) @ layer["o"]
        x = x + mlp(layer, rms(x, layer["norm2"]))
    return rms(x, params["norm"]) @ params["embed"].T


class FlaxBlock(nnx.Module):
    def __init__(self, d: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(d, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=d, decode=True, rngs=rngs)
        self.norm2 = nnx.LayerNorm(d, rngs=rngs)
        self.up = nnx.Linear(d, 2 * d, rngs=rngs)
        self.down = nnx.Linear(2 * d, d, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class FlaxDecoder(nnx.Module):
    """A GPT-like decoder of Flax's own MultiHeadAttention with its own cache."""

    def __init__(self, n_layers: int, d: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, d, rngs=rngs)
        self.blocks = nnx.List([FlaxBlock(d, rngs) for _ in range(n_layers)])
        self.norm = nnx.LayerNorm(d, rngs=rngs)
        self.head = nnx.Linear(d, V, rngs=rngs)

    def init_cache(self, batch: int, length: int) -> None:
        for block in self.blocks:
            block.attention.init_cache((batch, length, block.attention.in_features))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RaggedGqaBlock(nnx.Module):
    """Grouped-query attention that keeps its cache head-major and finds its own write position per
    request."""

    def __init__(self, batch: int, length: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.q = nnx.LinearGeneral(D, (N, H), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(D, (K, H), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(D, (K, H), use_bias=False, rngs=rngs)
        self.o = nnx.LinearGeneral((N, H), D, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.cache_k = nnx.Cache(jnp.zeros((batch, length, K, H)))
        self.cache_v = nnx.Cache(jnp.zeros((batch, length, K, H)))

    def __call__(self, x, positions):
        h = self.norm(x)
        q, k, v = rope(self.q(h), positions), rope(self.k(h), positions), self.v(h)
        rows = jnp.arange(x.shape[0])
        self.cache_k[...] = self.cache_k[...].at[rows, positions[:, 0]].set(k[:, 0])
        self.cache_v[...] = self.cache_v[...].at[rows, positions[:, 0]].set(v[:, 0])
        out = jax.nn.dot_product_attention(
            q, self.cache_k[...], self.cache_v[...], key_value_seq_lengths=positions[:, 0] + 1
        )
        return x + self.o(out)


class RaggedGqaDecoder(nnx.Module):
    """A GQA decoder written with `jax.nn.dot_product_attention`, requests of different lengths."""

    def __init__(self, n_layers: int, batch: int, length: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([RaggedGqaBlock(batch, length, rngs) for _ in range(n_layers)])
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def flax_step(model: nnx.Module) -> tuple[Any, Any, Any]:
    """A Flax model as a pure step `fn(params, cache, *inputs) -> (output, new cache)`, its params and its
    cache."""
    graph, params, cache = nnx.split(model, nnx.Param, ...)

    def step(params, cache, *inputs):
        merged = nnx.merge(graph, params, cache)
        out = merged(*inputs)
        return out, nnx.state(merged, nnx.Cache)

    return step, params, cache


def run_split(model: SplitModel, params: Any, *inputs: Any, tie: Any = None) -> Any:
    """One step over the slices, the attention side being the operators as the model wrote them."""
    private = model.private_operands(*inputs)
    context, out, states = model.first_context(*inputs), None, []
    for i in range(model.n):
        weights = model.slice_params(i, params)
        q, rest = model.slices[i].q_part(weights, context, out)
        k, v, context = model.slices[i].kv_part(weights, rest, tie)
        out, state = model.sites[i].attend(q, k, v, *private[i])
        states.append(state)
    final = model.slices[model.n].final(model.slice_params(model.n, params), context, out)
    return model.merge_outputs(
        final, model.aux_outputs(params, *inputs), model.state_outputs(states, *inputs)
    )
