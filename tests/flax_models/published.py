"""Decoders that other people have published, unmodified: small, with drawn weights, and nothing is downloaded.

Each ``build_*`` imports its package when it is called. It returns ``Built(fn, params, n_layers)``, with ``fn``
as in this package's own files. A model is called as its package calls it in training. Where a model takes more
than tokens and positions, its builder says what it gets. docs/published-models.md has the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

VOCAB_SIZE = 96
MAX_LEN = 64


class Built(NamedTuple):
    fn: Callable[..., jax.Array]
    params: Any
    n_layers: int


@dataclass(frozen=True)
class Published:
    """``package``: its name on PyPI. ``below``: the first major version without the model."""

    package: str
    build: Callable[[], Built]
    below: int | None = None

    def missing(self) -> str | None:
        """Why it cannot be built here, or None."""
        how = "make test-third-party installs it"
        try:
            version = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return f"{self.package}, of the extra third-party, is not installed: {how}"
        if self.below is not None and int(version.split(".")[0]) >= self.below:
            return f"{self.package} {version} has no Flax models, {self.below - 1} has: {how}"
        return None


def drawn(params: Any, seed: int) -> Any:
    """Weights of the same shapes, under which different tokens get different logits.

    Matrices are normal, divided by the root of the axis before the last. Vectors (scales, biases) keep their
    values and get a little noise.
    """
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def one(leaf: jax.Array, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, leaf.shape, jnp.float32)
        if leaf.ndim < 2:
            return (leaf + 0.1 * noise).astype(leaf.dtype)
        return (noise * max(leaf.shape[-2], 16) ** -0.5).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [one(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])


def causal_mask(tokens: jax.Array) -> jax.Array:
    """[B, T, T], true where a query may see a key."""
    t = tokens.shape[1]
    return jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (tokens.shape[0], t, t))


def _tunix(model: Any, seed: int) -> Built:
    """Tunix's models take positions, no cache (None) and a mask [B, T, T], and give logits and no cache."""
    from flax import nnx

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        logits, _ = nnx.merge(graphdef, params, rest)(tokens, positions, None, causal_mask(tokens))
        return logits.astype(jnp.float32)

    return Built(fn, drawn(params, seed), model.config.num_layers)


def build_tunix_llama3(seed: int = 0) -> Built:
    """google-tunix, Llama 3 (NNX)."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    config = llama3.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB_SIZE,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    return _tunix(llama3.Llama3(config, rngs=nnx.Rngs(seed)), seed)


def build_tunix_qwen2(seed: int = 0) -> Built:
    """google-tunix, Qwen 2 (NNX): biases of q, k and v."""
    from flax import nnx
    from tunix.models.qwen2 import model as qwen2

    config = qwen2.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB_SIZE,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    return _tunix(qwen2.Qwen2(config, rngs=nnx.Rngs(seed)), seed)


def build_tunix_qwen3(seed: int = 0) -> Built:
    """google-tunix, Qwen 3 (NNX): norms of q and k, a tied head."""
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB_SIZE,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return _tunix(qwen3.Qwen3(config, rngs=nnx.Rngs(seed)), seed)


def build_tunix_qwen3_moe(seed: int = 0) -> Built:
    """google-tunix, Qwen 3 with a mixture of 4 experts, 2 a token (NNX)."""
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB_SIZE,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return _tunix(qwen3.Qwen3(config, rngs=nnx.Rngs(seed)), seed)


def build_tunix_gemma3(seed: int = 0) -> Built:
    """google-tunix, Gemma 3 (NNX): 5 layers with a window of 5 tokens, the sixth without; weights in float32."""
    from flax import nnx
    from tunix.models.gemma3 import model as gemma3

    config = gemma3.ModelConfig(
        num_layers=6,
        num_embed=VOCAB_SIZE,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        sliding_window_size=5,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        param_dtype=jnp.float32,
    )
    return _tunix(gemma3.Gemma3(config, rngs=nnx.Rngs(seed)), seed)


def _transformers(name: str, seed: int, **config: Any) -> Built:
    """The Flax models of transformers before 5 take ids, an attention mask of ones and position ids.

    What is called is the Linen module under the wrapper (`model.module`), as the wrapper itself does.
    """
    import transformers

    config_class, model_class = getattr(transformers, f"{name}Config"), f"Flax{name}ForCausalLM"
    if name == "GPT2":
        model_class = "FlaxGPT2LMHeadModel"
    model = getattr(transformers, model_class)(config_class(vocab_size=VOCAB_SIZE, **config), seed=seed)

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        output = model.module.apply(
            {"params": params}, tokens, jnp.ones_like(tokens), positions, deterministic=True, return_dict=True
        )
        return output.logits

    return Built(fn, drawn(model.params, seed), model.config.num_hidden_layers)


def build_transformers_gpt2(seed: int = 0) -> Built:
    """transformers 4, FlaxGPT2LMHeadModel (Linen): learned positions, a tied head."""
    return _transformers("GPT2", seed, n_positions=MAX_LEN, n_embd=32, n_layer=2, n_head=4)


def build_transformers_gptj(seed: int = 0) -> Built:
    """transformers 4, FlaxGPTJForCausalLM (Linen): a parallel block, partial rotary embedding in pairs."""
    return _transformers("GPTJ", seed, n_positions=MAX_LEN, n_embd=64, n_layer=2, n_head=4, rotary_dim=8)


def _llama_like(name: str, seed: int, **more: Any) -> Built:
    return _transformers(
        name,
        seed,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        **more,
    )


def build_transformers_llama(seed: int = 0) -> Built:
    """transformers 4, FlaxLlamaForCausalLM (Linen)."""
    return _llama_like("Llama", seed)


def build_transformers_mistral(seed: int = 0) -> Built:
    """transformers 4, FlaxMistralForCausalLM (Linen): `sliding_window=16` is 17 tokens there."""
    return _llama_like("Mistral", seed, sliding_window=16)


def build_transformers_gemma(seed: int = 0) -> Built:
    """transformers 4, FlaxGemmaForCausalLM (Linen): a head dimension of its own, a tied head."""
    return _llama_like("Gemma", seed, head_dim=16)


def build_gemma(seed: int = 0) -> Built:
    """DeepMind's gemma, a Gemma 2-like Transformer (Linen): soft caps, a window of 5 tokens at every other layer.

    Positions and the mask are given; without them it makes both of the tokens that are not padding (id 0).
    """
    from gemma import gm

    local, full = gm.nn.AttentionType.LOCAL_SLIDING, gm.nn.AttentionType.GLOBAL
    config = gm.nn.config.TransformerConfig(
        num_embed=VOCAB_SIZE,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(local, full),
        attn_logits_soft_cap=50.0,
        sliding_window_size=5,
    )
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    variables = model.init(jax.random.key(seed), jnp.ones((1, 4), jnp.int32))

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        output = model.apply(
            {"params": params}, tokens, positions=positions, attention_mask=causal_mask(tokens)
        )
        return output.logits.astype(jnp.float32)

    return Built(fn, drawn(variables["params"], seed), 2)


def _penzai(config: Any, build_transformer: Callable[..., Any], seed: int) -> Built:
    """penzai's models take and give arrays with named axes, and hold their parameters as variables."""
    from penzai import pz

    model, params = pz.unbind_params(
        build_transformer(config, init_base_rng=jax.random.key(seed)), freeze=True
    )

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        named_tokens, named_positions = (pz.nx.wrap(x).tag("batch", "seq") for x in (tokens, positions))
        logits = pz.bind_variables(model, params)(named_tokens, token_positions=named_positions)
        return logits.unwrap("batch", "seq", "vocabulary")

    return Built(fn, drawn(params, seed), config.num_decoder_blocks)


def _penzai_llama_like(seed: int, **more: Any) -> Built:
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=VOCAB_SIZE,
        **more,
    )
    return _penzai(config, llamalike_common.build_llamalike_transformer, seed)


def build_penzai_llama(seed: int = 0) -> Built:
    """penzai, Llama; its layers are a scan over stacked weights."""
    return _penzai_llama_like(seed, mlp_variant="swiglu", tie_embedder_and_logits=False, use_layer_stack=True)


def build_penzai_gemma2(seed: int = 0) -> Built:
    """penzai, Gemma 2: soft caps, a window of 5 tokens at every other layer, a tied head."""
    from penzai.models.transformer.variants import llamalike_common

    return _penzai_llama_like(
        seed,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
        attention_type=(
            llamalike_common.AttentionTypeSlidingWindowCausal(5),
            llamalike_common.AttentionTypeGlobalCausal(),
        ),
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
    )


def build_penzai_gpt_neox(seed: int = 0) -> Built:
    """penzai, GPT-NeoX: a parallel block, rotary positions of half of a head."""
    from penzai.models.transformer.variants import gpt_neox

    config = gpt_neox.GPTNeoXTransformerConfig(
        num_attention_heads=4,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=VOCAB_SIZE,
        rope_wavelength=10_000,
        rope_subset_size=4,
        layernorm_epsilon=1e-5,
        activation_fn="gelu_exact",
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
    )
    return _penzai(config, gpt_neox.build_gpt_neox_transformer, seed)


def _dantinox(seed: int, **config: Any) -> Built:
    """DantinoX's Transformer takes tokens, and ``deterministic=True`` for no dropout; it makes positions
    itself."""
    from dantinox.core.config import ModelConfig
    from dantinox.core.model import Transformer
    from flax import nnx

    sizes = ModelConfig(dim=32, n_heads=4, num_blocks=2, vocab_size=VOCAB_SIZE, max_context=MAX_LEN, **config)
    graph, params, rest = nnx.split(Transformer(sizes, rngs=nnx.Rngs(seed)), nnx.Param, ...)

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, rest)(tokens, deterministic=True).logits

    return Built(fn, drawn(params, seed), 2)


def build_dantinox_gqa(seed: int = 0) -> Built:
    """DantinoX (NNX): grouped queries, rotary positions, a window of 5 tokens (`context_window=4`)."""
    return _dantinox(seed, attention="gqa", kv_heads=2, sliding_window=True, context_window=4)


def build_dantinox_moe(seed: int = 0) -> Built:
    """DantinoX (NNX): learned positions and 4 experts, with a loss of their balance beside the logits."""
    return _dantinox(seed, pos_encoding="learned", ffn="moe")


def build_dantinox_mla(seed: int = 0) -> Built:
    """DantinoX (NNX): latent attention, as it is trained: heads of 16, values of 8."""
    return _dantinox(seed, attention="mla", down_dim_q=16, down_dim_kv=16, rope_dim=8)


def build_dantinox_mla_absorbed(seed: int = 0) -> Built:
    """The same with the products of keys and values drawn into queries and outputs: scores are a sum of two
    products."""
    return _dantinox(seed, attention="mla", down_dim_q=16, down_dim_kv=16, rope_dim=8, inference_mode=True)


def build_dantinox_differential(seed: int = 0) -> Built:
    """DantinoX (NNX): weights of one attention minus those of another."""
    return _dantinox(seed, differential=True)


def build_nano_moe(seed: int = 0) -> Built:
    """nano-moe-jax (Linen): learned positions by a slice, 4 experts, a loss of their balance beside the
    logits."""
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    config = NanoMoEConfig(
        vocab_size=VOCAB_SIZE, n_layers=2, n_heads=4, d_model=32, d_ff=64, block_size=MAX_LEN
    )
    model = NanoMoE(config)
    params = model.init(jax.random.key(seed), jnp.ones((1, 4), jnp.int32))["params"]

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params}, tokens)
        return logits

    return Built(fn, drawn(params, seed), config.n_layers)


def build_nanodl_gpt3(seed: int = 0) -> Built:
    """nanodl (Linen): scores are multiplied by a mask of ones and zeros, so each token sees all."""
    import nanodl

    model = nanodl.GPT3(
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        feedforward_dim=64,
        dropout=0.0,
        vocab_size=VOCAB_SIZE,
        embed_dim=32,
        max_length=MAX_LEN,
        start_token=0,
        end_token=1,
    )
    params = model.init(jax.random.key(seed), jnp.ones((1, 4), jnp.int32))["params"]

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return model.apply({"params": params}, tokens, training=False)

    return Built(fn, drawn(params, seed), 2)


ALL = (
    Published("google-tunix", build_tunix_llama3),
    Published("google-tunix", build_tunix_qwen2),
    Published("google-tunix", build_tunix_qwen3),
    Published("google-tunix", build_tunix_qwen3_moe),
    Published("google-tunix", build_tunix_gemma3),
    Published("transformers", build_transformers_gpt2, below=5),
    Published("transformers", build_transformers_gptj, below=5),
    Published("transformers", build_transformers_llama, below=5),
    Published("transformers", build_transformers_mistral, below=5),
    Published("transformers", build_transformers_gemma, below=5),
    Published("gemma", build_gemma),
    Published("penzai", build_penzai_llama),
    Published("penzai", build_penzai_gemma2),
    Published("penzai", build_penzai_gpt_neox),
    Published("dantinox", build_dantinox_gqa),
    Published("dantinox", build_dantinox_moe),
    Published("dantinox", build_dantinox_mla),
    Published("nano-moe-jax", build_nano_moe),
)

# What they compute is no causal softmax attention over tokens' keys and values, or is not written as one.
REFUSED = (
    Published("nanodl", build_nanodl_gpt3),
    Published("dantinox", build_dantinox_mla_absorbed),
    Published("dantinox", build_dantinox_differential),
)
