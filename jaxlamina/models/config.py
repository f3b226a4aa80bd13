"""What a model looks like: one frozen dataclass, read from a Hugging Face `config.json`.

Knows the configuration forms of transformers 4 and 5 for llama, mistral, qwen2, qwen3 and opt. A field that
would change the result and is not supported is an error that names the field; a field nobody here has heard
of is one too, because a silently ignored field is a wrong model. Knows nothing of arrays, weights or
tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.models.rope_config import RopeConfig, finite, rope_from_hf, rope_to_hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")

# Keys with no effect on what a forward pass computes: bookkeeping, training-only settings, defaults for
# generation.
# fmt: off
HARMLESS_KEYS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
        "_name_or_path", "activation_dropout", "architectures", "attention_dropout",
        "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens",
        "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "dropout",
        "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
        "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
        "id2label", "init_std", "initializer_range", "is_decoder", "is_llama_config",
        "keys_to_ignore_at_inference", "label2id", "layerdrop", "length_penalty", "max_length",
        "max_new_tokens", "max_sequence_length", "min_length", "model_max_length", "name_or_path",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
        "output_attentions", "output_hidden_states", "output_scores", "prefix", "problem_type",
        "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
        "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
        "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
        "use_cache",
    }
)
# fmt: on

# Keys that do change the result, with the only values under which they do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
}

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
_FAMILY_KEYS: dict[str, frozenset[str]] = {
    "llama": _LLAMA_KEYS | {"attention_bias", "mlp_bias"},
    "mistral": _LLAMA_KEYS | {"sliding_window", "layer_types"},
    "qwen2": _LLAMA_KEYS | {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
    "qwen3": _LLAMA_KEYS
    | {"attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
    "opt": _COMMON_KEYS
    | {
        "ffn_dim",
        "activation_function",
        "do_layer_norm_before",
        "_remove_final_layer_norm",
        "word_embed_proj_dim",
        "enable_bias",
        "layer_norm_elementwise_affine",
    },
}

# Far above any model that there is: what is larger is damage or malice, and takes memory before a tensor is
# looked at.
_MOST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
}
_MOST_OF_ALL = 1 << 27

# What transformers assumes when a config.json leaves the key out.
_DEFAULTS: dict[str, dict[str, int | None]] = {
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "opt": {"max_position_embeddings": 2048},
}


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Axis letters: D = hidden_size, F = intermediate_size, V = vocab_size, L =
    num_hidden_layers, N = num_attention_heads, K = num_key_value_heads, H = head_dim.

    Built with `from_hf`; hashable, so it can key a cache and be a static argument of `jax.jit`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str  # silu | relu | gelu
    norm_eps: float
    tie_word_embeddings: bool
    windows: tuple[
        int | None, ...
    ]  # a layer's sliding window in tokens, None = attends over everything earlier
    rope: RopeConfig | None  # None: learned positions (opt)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_first: bool = True  # False: norms come after attention and MLP (opt-350m)
    final_norm: bool = True
    norm_affine: bool = True
    embed_dim: int | None = None  # width of the token embedding where it is not hidden_size (opt-350m)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        n, k = self.num_attention_heads, self.num_key_value_heads
        if n % k:
            raise UserError(f"config: num_attention_heads={n} must be a multiple of num_key_value_heads={k}")
        if len(self.windows) != self.num_hidden_layers:
            raise UserError(
                f"config: layer_types names {len(self.windows)} layers "
                f"but num_hidden_layers={self.num_hidden_layers}"
            )
        if self.rope is not None and self.head_dim % 2:
            raise UserError(
                f"config: head_dim={self.head_dim} must be even for rotary positions; check config.json"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json` that was parsed to a dict.

        Raises `UserError` naming the field for an unknown model_type, a missing or ill-typed size, and every
        field that would change the result and is not supported.
        """
        family = hf.get("model_type")
        if family is None:
            raise UserError("config: model_type is missing; is this the config.json of a Hugging Face model?")
        if family not in FAMILIES:
            raise UserError(
                f"config: model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}"
            )
        _reject_unsupported(family, hf)
        return _opt(hf) if family == "opt" else _llama_like(family, hf)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dict of this model, in the form that transformers 4 and 5 both read.

        `ModelConfig.from_hf(config.to_hf()) == config`.
        """
        eos = self.eos_token_ids
        hf: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "pad_token_id": self.pad_token_id,
        }
        if self.model_type == "opt":
            return hf | {
                "ffn_dim": self.intermediate_size,
                "activation_function": self.hidden_act,
                "do_layer_norm_before": self.norm_first,
                "_remove_final_layer_norm": self.norm_first and not self.final_norm,
                "word_embed_proj_dim": self.embed_dim or self.hidden_size,
                "enable_bias": self.qkv_bias,
                "layer_norm_elementwise_affine": self.norm_affine,
            }
        hf |= {
            "intermediate_size": self.intermediate_size,
            "num_key_value_heads": self.num_key_value_heads,
            "hidden_act": self.hidden_act,
            "rms_norm_eps": self.norm_eps,
            "head_dim": self.head_dim,
        }
        assert self.rope is not None
        hf |= rope_to_hf(self.rope)
        if self.model_type in ("llama", "qwen3"):
            hf["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            hf["mlp_bias"] = self.mlp_bias
        if self.model_type == "mistral":
            hf["sliding_window"] = self.windows[0]
        if self.model_type in ("qwen2", "qwen3"):
            sizes = [w for w in self.windows if w is not None]
            hf["use_sliding_window"] = bool(sizes)
            hf["sliding_window"] = sizes[0] if sizes else None
            hf["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
        return hf


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
}


def _reject_unsupported(family: str, hf: Mapping[str, Any]) -> None:
    if hf.get("quantization_config") is not None:
        raise UserError(
            "config: quantization_config is not supported; use unquantized weights or a GGUF file"
        )
    for key, allowed in NEUTRAL_VALUES.items():
        value = hf.get(key)
        if value is not None and value not in allowed:
            raise UserError(f"config: {key}={value!r} is not supported and would change the result")
    known = _FAMILY_KEYS[family] | HARMLESS_KEYS | NEUTRAL_VALUES.keys() | {"quantization_config"}
    unknown = sorted(key for key, value in hf.items() if key not in known and value is not None)
    if unknown:
        shown = ", ".join(f"{key}={_short(hf[key])}" for key in unknown)
        raise UserError(
            f"config: {shown} is not known for model_type={family!r} and may change the result; "
            "remove it from config.json if the model does not need it"
        )


def _llama_like(family: str, hf: Mapping[str, Any]) -> ModelConfig:
    n = _size(hf, "num_attention_heads")
    d = _size(hf, "hidden_size")
    n_layers = _size(hf, "num_hidden_layers")
    defaults = _DEFAULTS[family]
    max_positions = _optional_size(hf, "max_position_embeddings", defaults["max_position_embeddings"])
    assert max_positions is not None
    k = _optional_size(hf, "num_key_value_heads", defaults["num_key_value_heads"])
    head_dim = _optional_size(hf, "head_dim", defaults["head_dim"])
    if head_dim is None:
        if d % n:
            raise UserError(
                f"config: hidden_size={d} must be a multiple of num_attention_heads={n} without head_dim"
            )
        head_dim = d // n
    act = hf.get("hidden_act") or "silu"
    if act not in ("silu", "swish"):
        raise UserError(
            f"config: hidden_act={act!r} is not supported for model_type={family!r}; supported: silu"
        )
    attention_bias = _flag(hf, "attention_bias", False)
    return ModelConfig(
        model_type=family,
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=d,
        intermediate_size=_size(hf, "intermediate_size"),
        num_hidden_layers=n_layers,
        num_attention_heads=n,
        num_key_value_heads=n if k is None else k,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        hidden_act="silu",
        norm_eps=_epsilon(hf, "rms_norm_eps", 1e-6),
        tie_word_embeddings=_flag(hf, "tie_word_embeddings", False),
        windows=_windows(family, hf, n_layers),
        rope=rope_from_hf(hf, max_positions),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=_flag(hf, "mlp_bias", False),
        qk_norm=family == "qwen3",
        **_token_ids(hf),
    )


def _opt(hf: Mapping[str, Any]) -> ModelConfig:
    n = _size(hf, "num_attention_heads")
    d = _size(hf, "hidden_size")
    n_layers = _size(hf, "num_hidden_layers")
    if d % n:
        raise UserError(f"config: hidden_size={d} must be a multiple of num_attention_heads={n}")
    act = hf.get("activation_function") or "relu"
    if act not in ("relu", "gelu"):
        raise UserError(
            f"config: activation_function={act!r} is not supported for opt; supported: relu, gelu"
        )
    max_positions = _optional_size(hf, "max_position_embeddings", _DEFAULTS["opt"]["max_position_embeddings"])
    assert max_positions is not None
    embed_dim = _optional_size(hf, "word_embed_proj_dim", None)
    bias = _flag(hf, "enable_bias", True)
    norm_first = _flag(hf, "do_layer_norm_before", True)
    return ModelConfig(
        model_type="opt",
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=d,
        intermediate_size=_size(hf, "ffn_dim"),
        num_hidden_layers=n_layers,
        num_attention_heads=n,
        num_key_value_heads=n,
        head_dim=d // n,
        max_position_embeddings=max_positions,
        hidden_act=act,
        norm_eps=1e-5,  # torch.nn.LayerNorm's own; opt's config has no field for it
        tie_word_embeddings=_flag(hf, "tie_word_embeddings", True),
        windows=(None,) * n_layers,
        rope=None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm_first=norm_first,
        final_norm=norm_first and not _flag(hf, "_remove_final_layer_norm", False),
        norm_affine=_flag(hf, "layer_norm_elementwise_affine", True),
        embed_dim=None if embed_dim == d else embed_dim,
        **_token_ids(hf),
    )


def _windows(family: str, hf: Mapping[str, Any], n_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, as the family's own rules give it."""
    if family == "llama":
        return (None,) * n_layers
    window = _optional_size(hf, "sliding_window", 4096)
    types = hf.get("layer_types")
    if types is not None:
        if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
            raise UserError(f"config: layer_types={_short(types)} must be a list of names")
        strange = sorted(set(types) - {"full_attention", "sliding_attention"})
        if strange:
            raise UserError(
                f"config: layer_types has {', '.join(strange)}; supported: full_attention, sliding_attention"
            )
    if family == "mistral":
        expected = "full_attention" if window is None else "sliding_attention"
        if types is not None and any(kind != expected for kind in types):
            raise UserError(
                f"config: layer_types must all be {expected} for model_type='mistral' "
                f"with sliding_window={window}; a model that mixes them has another model_type"
            )
        return (window,) * (n_layers if types is None else len(types))
    if not _flag(hf, "use_sliding_window", False):
        window = None
    if types is None:
        first = hf.get("max_window_layers")
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int):
            raise UserError(f"config: max_window_layers={_short(first)} must be an integer")
        return tuple(window if i >= first else None for i in range(n_layers))
    if window is None and "sliding_attention" in types:
        raise UserError(
            "config: layer_types asks for sliding_attention but use_sliding_window is false "
            "or sliding_window is null"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _token_ids(hf: Mapping[str, Any]) -> dict[str, Any]:
    eos = hf.get("eos_token_id")
    several = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    return {
        "bos_token_id": _token_id("bos_token_id", hf.get("bos_token_id")),
        "eos_token_ids": tuple(_token_id("eos_token_id", one) for one in several if one is not None),
        "pad_token_id": _token_id("pad_token_id", hf.get("pad_token_id"), least=-1),  # LLaMA's first had -1
    }


def _token_id(key: str, value: Any, least: int = 0) -> int | None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31
    ):
        raise UserError(f"config: {key}={_short(value)} must be a token id")
    return value


def _size(hf: Mapping[str, Any], key: str) -> int:
    if hf.get(key) is None:
        raise UserError(f"config: {key} is missing; the config.json is not complete")
    size = _optional_size(hf, key, None)
    assert size is not None
    return size


def _optional_size(hf: Mapping[str, Any], key: str, default: int | None) -> int | None:
    # A key that is there with null means "derive it", which is not the same as the family's default.
    value = hf.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UserError(f"config: {key}={_short(value)} must be a positive integer")
    most = _MOST.get(key, _MOST_OF_ALL)
    if value > most:
        raise UserError(f"config: {key}={_short(value)} must be at most {most}; check config.json")
    return value


def _number(hf: Mapping[str, Any], key: str, default: float) -> float:
    value = hf.get(key)
    if value is None:
        return default
    return finite(key, value)


def _epsilon(hf: Mapping[str, Any], key: str, default: float) -> float:
    value = _number(hf, key, default)
    if not 0 <= value < 1:
        raise UserError(f"config: {key}={_short(value)} must be at least 0 and below 1")
    return value


def _flag(hf: Mapping[str, Any], key: str, default: bool) -> bool:
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"config: {key}={_short(value)} must be true or false")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
