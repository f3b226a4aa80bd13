"""The models that the tests of the drawings draw, each split once."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import split_examples as ex
from flax import nnx

from splitter import SplitModel, attention, split

IDS = jax.ShapeDtypeStruct((2, 1), jnp.int32)
PLAIN = {
    "llama": ex.llama,
    "parallel": ex.parallel_llama,
    "value-residual": ex.value_residual_llama,
    "shared-kv": ex.shared_kv_llama,
}


def _gpt2_params(n_layers):
    def f(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    d = ex.D
    layer = {"ln1": f(d), "c_attn": f(d, 3 * d), "c_attn_b": f(3 * d), "c_proj": f(d, d), "ln2": f(d),
             "c_fc": f(d, 4 * d), "c_out": f(4 * d, d)}  # fmt: skip
    return {"wte": f(ex.V, d), "wpe": f(64, d), "h": [dict(layer) for _ in range(n_layers)]}


def gpt2(params, tokens, positions):
    """Fused q, k, v; learned positions; GELU."""
    x = params["wte"][tokens] + params["wpe"][positions]
    for p in params["h"]:
        qkv = ex.rms(x, p["ln1"]) @ p["c_attn"] + p["c_attn_b"]
        q, k, v = (t.reshape(*t.shape[:2], ex.N, -1) for t in jnp.split(qkv, 3, -1))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["c_proj"]
        x = x + jax.nn.gelu(ex.rms(x, p["ln2"]) @ p["c_fc"]) @ p["c_out"]
    return x @ params["wte"].T


@lru_cache
def drawn(name: str) -> SplitModel:
    if name in PLAIN:
        return split(PLAIN[name], ex.llama_params(4, abstract=True), IDS, IDS)
    if name == "carried":  # rotary tables cross the cuts
        return split(ex.llama, ex.llama_params(4, abstract=True), IDS, IDS, recompute=False)
    if name == "scan":
        return split(ex.scanned_llama, ex.stacked(ex.llama_params(3)), IDS, IDS)
    if name == "gpt2":
        return split(gpt2, _gpt2_params(3), IDS, IDS)
    if name == "closed-over":
        params = ex.llama_params(2)
        return split(lambda _, tokens, positions: ex.llama(params, tokens, positions), {}, IDS, IDS)
    if name == "flax":
        model = ex.FlaxDecoder(3, 32, nnx.Rngs(0))
        model.init_cache(2, 16)
        step, params, cache = ex.flax_step(model)
        return split(step, params, cache, jnp.ones((2, 1), jnp.int32))
    if name == "ragged":
        step, params, cache = ex.flax_step(ex.RaggedGqaDecoder(2, 2, 16, nnx.Rngs(0)))
        return split(step, params, cache, jnp.ones((2, 1), jnp.int32), jnp.ones((2, 1), jnp.int32))
    assert name == "bare"
    return split(lambda _, x: (attention(x, x, x), x.sum()), {}, jnp.ones((2, 1, 4, 8)))


MODELS = [*PLAIN, "carried", "scan", "gpt2", "closed-over", "flax", "ragged", "bare"]
