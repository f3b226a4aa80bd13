"""What a model looks like: one frozen dataclass, read from a Hugging Face `config.json`.

Knows the configuration forms of transformers 4 and 5 for the families of `families.py`. A field that would
change the result and is not supported is an error that names the field; a field nobody here has heard of is
one too, because a silently ignored field is a wrong model. Knows nothing of arrays, weights or tokenizers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.models.families import FAMILIES, HARMLESS_KEYS, NEUTRAL_VALUES, Family
from jaxlamina.models.rope_config import RopeConfig, finite, rope_to_hf, ropes_from_hf

# Far above any model that there is: what is larger is damage or malice, and takes memory before a tensor is
# looked at.
_MOST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "num_experts": 4096,
    "num_local_experts": 4096,
}
_MOST_OF_ALL = 1 << 27


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
    hidden_act: str  # silu | relu | gelu | gelu_pytorch_tanh
    norm_eps: float
    tie_word_embeddings: bool
    windows: tuple[
        int | None, ...
    ]  # a layer's sliding window in tokens, None = attends over everything earlier
    rope: RopeConfig | None  # None: learned positions (opt)
    local_rope: RopeConfig | None = None  # of layers with a sliding window, where they have their own
    no_rope_layers: tuple[int, ...] = ()  # layers without positions, whatever `rope` says
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # c: a score s becomes c * tanh(s / c)
    norm_first: bool = True  # False: norms come after attention and MLP (opt-350m)
    final_norm: bool = True
    norm_affine: bool = True
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # norms after attention and MLP, too: four a layer
    embed_scale: float = 1.0  # what the token embedding is multiplied by
    residual_scale: float = 1.0  # what attention and MLP are multiplied by before they are added
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    n_experts: int = 0  # in each layer but `dense_layers`; 0: every layer has one MLP
    experts_per_token: int = 0
    expert_intermediate_size: int | None = None  # None: intermediate_size
    norm_topk_prob: bool = False  # the chosen experts' probabilities are made to add up to 1
    dense_layers: tuple[int, ...] = ()  # layers with one MLP where others have experts
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
                f"config: layer_types names {len(self.windows)} layers but "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        if self.rope is not None:
            self.rope.check(self.head_dim)
        if self.experts_per_token > self.n_experts:
            raise UserError(
                f"config: num_experts_per_tok={self.experts_per_token} must be at most the number of "
                f"experts {self.n_experts}"
            )

    @property
    def expert_size(self) -> int:
        """F of one expert."""
        return self.expert_intermediate_size or self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        return self.n_experts > 0 and layer not in self.dense_layers

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """Each layer's rotary positions."""
        local = self.rope if self.local_rope is None else self.local_rope
        kinds = [self.rope if window is None else local for window in self.windows]
        return tuple(None if i in self.no_rope_layers else rope for i, rope in enumerate(kinds))

    @property
    def max_length(self) -> int:
        """Tokens up to which KV that was stored stays what the whole sequence would have.

        `longrope` turns keys otherwise in sequences longer than the original length, earlier keys too.
        """
        if self.rope is not None and self.rope.rope_type == "longrope":
            assert self.rope.original_max_position_embeddings is not None
            return min(self.max_position_embeddings, self.rope.original_max_position_embeddings)
        return self.max_position_embeddings

    def with_layers(self, n_layers: int) -> ModelConfig:
        """The same model with another number of layers; sliding windows follow the model's own pattern."""
        windows = tuple(self.windows[i % len(self.windows)] for i in range(n_layers))
        return replace(self, num_hidden_layers=n_layers, windows=windows)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json` that was parsed to a dict.

        Raises `UserError` naming the field for an unknown model_type, a missing or ill-typed size, and every
        field that would change the result and is not supported.
        """
        name = hf.get("model_type")
        if name is None:
            raise UserError("config: model_type is missing; is this the config.json of a Hugging Face model?")
        if not isinstance(name, str) or name not in FAMILIES:
            raise UserError(f"config: model_type={name!r} is not supported; supported: {', '.join(FAMILIES)}")
        family = FAMILIES[name]
        for alias, key in family.aliases.items():
            hf = _with_one_name(hf, alias, key)
        _reject_unsupported(name, hf)
        hf = {**family.defaults, **hf}
        return _opt(hf) if name == "opt" else _llama_like(name, hf)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dict of this model, in the form that transformers 4 and 5 both read.

        `ModelConfig.from_hf(config.to_hf()) == config`.
        """
        eos, family = self.eos_token_ids, FAMILIES[self.model_type]
        hf: dict[str, Any] = {
            "architectures": [family.architecture],
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
            family.act_key: self.hidden_act,
            "rms_norm_eps": self.norm_eps,
            "head_dim": self.head_dim,
        }
        assert self.rope is not None
        hf |= rope_to_hf(self.rope, self.local_rope)
        optional: dict[str, Any] = {"attention_bias": self.o_bias, "mlp_bias": self.mlp_bias}
        optional |= {key: getattr(self, name) for key, name in {**family.numbers, **family.sizes}.items()}
        optional |= {"norm_topk_prob": self.norm_topk_prob, "mlp_only_layers": list(self.dense_layers)}
        optional |= _windows_to_hf(self, family)
        if "no_rope_layers" in family.keys:
            optional["no_rope_layers"] = [int(rope is not None) for rope in self.ropes]
        if "query_pre_attn_scalar" in family.keys and self.attention_scale is not None:
            optional["query_pre_attn_scalar"] = round(self.attention_scale**-2)
        return hf | {key: value for key, value in optional.items() if key in family.keys}


def _with_one_name(hf: Mapping[str, Any], alias: str, key: str) -> Mapping[str, Any]:
    if hf.get(alias) is None:
        return hf
    if hf.get(key) not in (None, hf[alias]):
        raise UserError(f"config: {alias}={_short(hf[alias])} and {key}={_short(hf[key])} must be the same")
    return {name: value for name, value in hf.items() if name != alias} | {key: hf[alias]}


def _windows_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    if family.windows == "none":
        return {}
    sizes = [window for window in config.windows if window is not None]
    found: dict[str, Any] = {"sliding_window": sizes[0] if sizes else None, "use_sliding_window": bool(sizes)}
    if family.windows != "all":
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        found["layer_types"] = kinds
    return found


def _method(quantization: Any) -> str:
    named = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return f"quant_method={named!r}"[:80]


def _reject_unsupported(family: str, hf: Mapping[str, Any]) -> None:
    if hf.get("quantization_config") is not None:
        raise UserError(
            f"config: quantization_config is not supported ({_method(hf['quantization_config'])}); "
            "use unquantized weights or a GGUF file"
        )
    keys = FAMILIES[family].keys
    for key, allowed in NEUTRAL_VALUES.items():
        value = None if key in keys else hf.get(key)
        if value is not None and value not in allowed:
            raise UserError(f"config: {key}={value!r} is not supported and would change the result")
    known = keys | HARMLESS_KEYS | NEUTRAL_VALUES.keys() | {"quantization_config"}
    unknown = sorted(key for key, value in hf.items() if key not in known and value is not None)
    if unknown:
        shown = ", ".join(f"{key}={_short(hf[key])}" for key in unknown)
        raise UserError(
            f"config: {shown} is not known for model_type={family!r} and may change the result; remove it "
            "from config.json if the model does not need it"
        )


def _llama_like(name: str, hf: Mapping[str, Any]) -> ModelConfig:
    family = FAMILIES[name]
    n = _size(hf, "num_attention_heads")
    d = _size(hf, "hidden_size")
    n_layers = _size(hf, "num_hidden_layers")
    max_positions = _size(hf, "max_position_embeddings")
    k = _optional_size(hf, "num_key_value_heads", None)
    head_dim = _optional_size(hf, "head_dim", None)
    if head_dim is None:
        if d % n:
            raise UserError(
                f"config: hidden_size={d} must be a multiple of num_attention_heads={n} without head_dim"
            )
        head_dim = d // n
    attention_bias = "attention_bias" in family.keys and _flag(hf, "attention_bias", False)
    no_rope = _no_rope_layers(hf, n_layers) if "no_rope_layers" in family.keys else ()
    fields: dict[str, Any] = {
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": "mlp_bias" in family.keys and _flag(hf, "mlp_bias", False),
    }
    if "query_pre_attn_scalar" in family.keys:
        fields["attention_scale"] = _size(hf, "query_pre_attn_scalar") ** -0.5
    fields |= {field: _positive(hf, key) for key, field in family.numbers.items() if hf.get(key) is not None}
    fields |= {field: _size(hf, key) for key, field in family.sizes.items()}
    if "mlp_only_layers" in family.keys:
        fields["norm_topk_prob"] = _flag(hf, "norm_topk_prob", False)
        fields["dense_layers"] = _dense_layers(hf, n_layers)
    fields |= {key: d**0.5 if value == "sqrt(hidden_size)" else value for key, value in family.fields.items()}
    rope, local_rope = ropes_from_hf(hf, max_positions, family)
    return ModelConfig(
        model_type=name,
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=d,
        intermediate_size=_size(hf, "intermediate_size"),
        num_hidden_layers=n_layers,
        num_attention_heads=n,
        num_key_value_heads=n if k is None else k,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        hidden_act=_act(name, hf),
        norm_eps=_epsilon(hf, "rms_norm_eps", 1e-6),
        tie_word_embeddings=_flag(hf, "tie_word_embeddings", False),
        windows=_windows(name, hf, n_layers, no_rope),
        rope=rope,
        local_rope=local_rope,
        no_rope_layers=no_rope,
        **fields,
        **_token_ids(hf),
    )


def _act(name: str, hf: Mapping[str, Any]) -> str:
    family = FAMILIES[name]
    act = hf.get(family.act_key) or next(iter(family.acts))
    if act not in family.acts:
        raise UserError(
            f"config: {family.act_key}={act!r} is not supported for model_type={name!r}; supported: "
            f"{next(iter(family.acts))}"
        )
    return family.acts[act]


def _no_rope_layers(hf: Mapping[str, Any], n_layers: int) -> tuple[int, ...]:
    """The layers without positions: those with 0 in no_rope_layers, else every no_rope_layer_interval-th."""
    flags = hf.get("no_rope_layers")
    if flags is None:
        every = _size(hf, "no_rope_layer_interval")
        return tuple(range(every - 1, n_layers, every))
    if not isinstance(flags, list | tuple) or len(flags) < n_layers or any(x not in (0, 1) for x in flags):
        raise UserError(
            f"config: no_rope_layers={_short(flags)} must have 0 or 1 for each of {n_layers} layers"
        )
    return tuple(i for i in range(n_layers) if not flags[i])


def _dense_layers(hf: Mapping[str, Any], n_layers: int) -> tuple[int, ...]:
    """The layers without experts: those of mlp_only_layers, and all but every decoder_sparse_step-th."""
    named = hf.get("mlp_only_layers") or []
    if not isinstance(named, list | tuple) or not all(type(i) is int for i in named):
        raise UserError(f"config: mlp_only_layers={_short(named)} must be a list of layers' numbers")
    every = _optional_size(hf, "decoder_sparse_step", 1) or 1
    return tuple(i for i in range(n_layers) if i in named or (i + 1) % every)


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
    max_positions = _size(hf, "max_position_embeddings")
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


def _windows(
    name: str, hf: Mapping[str, Any], n_layers: int, no_rope: tuple[int, ...]
) -> tuple[int | None, ...]:
    """Each layer's sliding window, as the family's own rules give it."""
    family = FAMILIES[name]
    if family.windows == "none":
        return (None,) * n_layers
    window = _optional_size(hf, "sliding_window", None)
    types = hf.get("layer_types")
    if types is not None:
        if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
            raise UserError(f"config: layer_types={_short(types)} must be a list of names")
        strange = sorted(set(types) - {"full_attention", "sliding_attention"})
        if strange:
            raise UserError(
                f"config: layer_types has {', '.join(strange)}; supported: full_attention, sliding_attention"
            )
    if "use_sliding_window" in family.keys and not _flag(hf, "use_sliding_window", False):
        window = None
    if family.windows == "all":
        expected = "full_attention" if window is None else "sliding_attention"
        if types is not None and any(kind != expected for kind in types):
            raise UserError(
                f"config: layer_types must all be {expected} for model_type={name!r} with "
                f"sliding_window={window}; a model that mixes them has another model_type"
            )
        return (window,) * (n_layers if types is None else len(types))
    if types is None:
        local = _local_layers(family, hf, n_layers, no_rope)
        return tuple(window if i in local else None for i in range(n_layers))
    if window is None and "sliding_attention" in types:
        raise UserError(
            "config: layer_types asks for sliding_attention but use_sliding_window is false or "
            "sliding_window is null"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _local_layers(
    family: Family, hf: Mapping[str, Any], n_layers: int, no_rope: tuple[int, ...]
) -> Container[int]:
    """The layers with a sliding window, where layer_types does not say."""
    if family.windows == "without positions":
        return no_rope
    if family.windows == "pattern":
        every = _size(hf, "sliding_window_pattern")
        return [i for i in range(n_layers) if (i + 1) % every]
    first = hf.get("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int):
        raise UserError(f"config: max_window_layers={_short(first)} must be an integer")
    return range(first, n_layers)


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


def _positive(hf: Mapping[str, Any], key: str) -> float:
    value = finite(key, hf[key])
    if value <= 0:
        raise UserError(f"config: {key}={_short(value)} must be positive")
    return value


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
