"""The families of models as data: the keys of each one's config.json, defaults, and what keys stand for.

A family that differs from the others in values alone is one more entry of `FAMILIES`; what it computes
otherwise is a field of `ModelConfig` with a neutral default. Knows names and values; reads no configuration
(`config.py` does) and knows nothing of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Keys with no effect on what a forward pass computes: bookkeeping, training-only settings, defaults for
# generation.
# fmt: off
HARMLESS_KEYS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
        "_name_or_path", "activation_dropout", "architectures", "attention_dropout", "attn_implementation",
        "auto_map", "bad_words_ids", "begin_suppress_tokens", "cache_implementation",
        "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "dropout",
        "dtype", "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "gradient_checkpointing", "id2label", "init_std", "initializer_range", "is_decoder",
        "is_llama_config", "keys_to_ignore_at_inference", "label2id", "layerdrop", "length_penalty",
        "max_length", "max_new_tokens", "max_sequence_length", "min_length", "model_max_length",
        "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
        "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
        "output_scores", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty",
        "resid_pdrop", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
        "router_jitter_noise", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
        "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
        "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version",
        "use_bfloat16", "use_cache",
    }
)
# fmt: on

# Keys that do change the result where a family reads them, with the only values under which they do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "cross_attention_hidden_size": (),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
}

# Which layers have a sliding window: none; all; those that layer_types names, or without it those from
# max_window_layers on, those without positions, or all but every n-th.
Windows = Literal["none", "all", "from layer", "without positions", "pattern"]


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    - `keys`: of its config.json; any other key with a value is an error. `defaults`: what transformers
      assumes where a key is left out.
    - `fields`: those of `ModelConfig` that all its models share; "sqrt(hidden_size)" is worked out.
    - `numbers`: a key whose number is a field of `ModelConfig`; with null the field stays neutral.
    - `sizes`: likewise, of sizes that must be given. `aliases`: other words for a key.
    - `acts`: values of the key `act_key` -> `ModelConfig.hidden_act`.
    """

    architecture: str
    keys: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    act_key: str = "hidden_act"
    acts: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu", "swish": "silu"})
    windows: Windows = "none"
    rope_types: tuple[str, ...] | None = None  # None: all that there are
    fused: bool = False  # files hold q, k, v in one tensor, gate and up in another


# fmt: off
_COMMON_KEYS = frozenset(
    {
        "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    }
)
_LLAMA_KEYS = _COMMON_KEYS | frozenset(
    {
        "intermediate_size", "num_key_value_heads", "hidden_act", "rms_norm_eps", "head_dim",
        "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    }
)
# fmt: on
_BIASES = {"attention_bias", "mlp_bias"}
_QWEN_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_GEMMA_KEYS = _LLAMA_KEYS | {"attention_bias", "hidden_activation"}
_GEMMA2_KEYS = _GEMMA_KEYS | {
    "final_logit_softcapping",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_FIELDS = {"norm_plus_one": True, "embed_scale": "sqrt(hidden_size)"}
_TANH = {"gelu_pytorch_tanh": "gelu_pytorch_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA_KEYS | _BIASES, defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA_KEYS | {"sliding_window", "layer_types"},
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA_KEYS | _QWEN_WINDOWS,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        fields={"qkv_bias": True},
        windows="from layer",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_KEYS | _QWEN_WINDOWS | {"attention_bias"},
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
        },
        fields={"qk_norm": True},
        windows="from layer",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _LLAMA_KEYS | {"sliding_window", "num_local_experts", "num_experts_per_tok"},
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        fields={"norm_topk_prob": True},
        sizes={"num_local_experts": "n_experts", "num_experts_per_tok": "experts_per_token"},
        windows="all",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _LLAMA_KEYS
        | _QWEN_WINDOWS  # read nowhere: max_window_layers
        | {
            "attention_bias",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        },
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fields={"qk_norm": True},
        sizes={
            "num_experts": "n_experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_intermediate_size",
        },
        aliases={"num_local_experts": "num_experts"},  # what transformers 5 writes
        windows="all",
    ),
    "granite": Family(
        "GraniteForCausalLM",
        _LLAMA_KEYS
        | _BIASES
        | {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
        defaults={"max_position_embeddings": 2048, "attention_multiplier": 1.0},
        numbers={
            "embedding_multiplier": "embed_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention_scale",
            "logits_scaling": "logits_divisor",
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _LLAMA_KEYS | {"sliding_window", "partial_rotary_factor"},
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        windows="all",
        rope_types=("default", "longrope"),
        fused=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _LLAMA_KEYS
        | _BIASES
        | _QWEN_WINDOWS
        | {"no_rope_layers", "no_rope_layer_interval", "pretraining_tp"},  # the last has no effect here
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        windows="without positions",
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA_KEYS,
        defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 8192, "num_key_value_heads": 16},
        fields=_GEMMA_FIELDS,
        acts=_TANH | {"gelu": "gelu_pytorch_tanh"},  # what the first files say and do not mean
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA2_KEYS | {"attn_logit_softcapping", "sliding_window_size"},  # read nowhere: the last
        defaults=_GEMMA2_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fields=_GEMMA_FIELDS | {"post_norms": True},
        numbers={
            "attn_logit_softcapping": "attention_softcap",
            "final_logit_softcapping": "logits_softcap",
        },
        act_key="hidden_activation",
        acts=_TANH,
        windows="pattern",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA2_KEYS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
        defaults=_GEMMA2_DEFAULTS
        | {
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        fields=_GEMMA_FIELDS | {"post_norms": True, "qk_norm": True},
        numbers={"final_logit_softcapping": "logits_softcap"},
        act_key="hidden_activation",
        acts=_TANH,
        windows="pattern",
    ),
    "opt": Family(
        "OPTForCausalLM",
        _COMMON_KEYS
        | {
            "ffn_dim",
            "activation_function",
            "do_layer_norm_before",
            "_remove_final_layer_norm",
            "word_embed_proj_dim",
            "enable_bias",
            "layer_norm_elementwise_affine",
        },
        defaults={"max_position_embeddings": 2048},
    ),
}
