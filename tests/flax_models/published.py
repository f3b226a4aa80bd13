"""Decoders of packages that others have published, small and with drawn weights; nothing is downloaded.

Each ``build_*`` imports its package when it is called (ImportError: not installed) and returns ``(fn, params,
vocab_size, max_len)``, with fn as in this package's own files. Models are called as their packages have them
called for training or prefill; what had to be given beside tokens and positions is said at each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Built = tuple[Callable[..., jax.Array], Any, int, int]

VOCAB_SIZE = 96
MAX_LEN = 64


def drawn(params: Any, seed: int) -> Any:
    """Weights of the same shapes for a model whose own ones are zeros, ones or too small for logits to differ.

    What multiplies activations is divided by the root of its inputs' number, taken for all axes but the last; for
    vectors (scales, biases) it is what they are, and a little noise.
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

    return fn, drawn(params, seed), VOCAB_SIZE, MAX_LEN


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
    # Without torch, the name would be a stand-in that raises when it is used.
    if not transformers.utils.is_flax_available():
        raise ImportError("this transformers has no Flax models")
    model = getattr(transformers, model_class)(config_class(vocab_size=VOCAB_SIZE, **config), seed=seed)

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        output = model.module.apply(
            {"params": params}, tokens, jnp.ones_like(tokens), positions, deterministic=True, return_dict=True
        )
        return output.logits

    return fn, drawn(model.params, seed), VOCAB_SIZE, MAX_LEN


def build_transformers_gpt2(seed: int = 0) -> Built:
    """transformers 4, FlaxGPT2LMHeadModel (Linen): learned positions, a tied head."""
    return _transformers("GPT2", seed, n_positions=MAX_LEN, n_embd=32, n_layer=2, n_head=4)


def build_transformers_gptj(seed: int = 0) -> Built:
    """transformers 4, FlaxGPTJForCausalLM (Linen): a parallel block, partial rotary embedding in pairs."""
    return _transformers("GPTJ", seed, n_positions=MAX_LEN, n_embd=64, n_layer=2, n_head=4, rotary_dim=8)


def _llama_like(name: str, seed: int, **more: Any) -> Built:
    sizes = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
    )
    return _transformers(name, seed, **sizes, **more)


def build_transformers_llama(seed: int = 0) -> Built:
    """transformers 4, FlaxLlamaForCausalLM (Linen)."""
    return _llama_like("Llama", seed)


def build_transformers_mistral(seed: int = 0) -> Built:
    """transformers 4, FlaxMistralForCausalLM (Linen): a window of 16 tokens."""
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

    return fn, drawn(variables["params"], seed), VOCAB_SIZE, MAX_LEN


ALL: tuple[Callable[..., Built], ...] = (
    build_tunix_llama3,
    build_tunix_qwen2,
    build_tunix_qwen3,
    build_tunix_qwen3_moe,
    build_tunix_gemma3,
    build_transformers_gpt2,
    build_transformers_gptj,
    build_transformers_llama,
    build_transformers_mistral,
    build_transformers_gemma,
    build_gemma,
)
