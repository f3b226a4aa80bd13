"""GGUF files of llama.cpp as checkpoints: metadata to `ModelConfig`, tensors to Hugging Face names and order.

Knows the words that llama.cpp's architectures share and how its converter reorders weights; what one of them
has of its own is in `gguf_families`. Knows nothing of the container's bytes (`gguf_file`) or of tokenizers
(`gguf_tokenizer`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxlamina.dtypes import most_common_dtype
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig
from jaxlamina.models.causal_lm import CausalLM, with_blocks
from jaxlamina.models.families import FAMILIES
from jaxlamina.text.tokenizer import Tokenizer
from jaxlamina.weights.checkpoint import StreamedCheckpoint, expected_shapes
from jaxlamina.weights.fit import check_fit, unique
from jaxlamina.weights.fused import fused_parts, fused_shapes
from jaxlamina.weights.gguf_families import GGUF_FAMILIES, GgufFamily, short_float
from jaxlamina.weights.gguf_file import SUPPORTED, GgufFile, GgufTensor, decoder, read_gguf
from jaxlamina.weights.gguf_tokenizer import gguf_eos_ids, tokenizer_from_gguf
from jaxlamina.weights.streaming import Decode, StoredTensor
from pallas_kernels.blocks import N_BYTES

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = "rope_freqs.weight"
_OWN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Stacks have no "weight" at the end of their names in a model.
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}

# Metadata under `<architecture>.` that is read here, or has no effect on what is computed.
_READ_KEYS = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_NEUTRAL_KEYS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Layers = Annotated[list[bool], msgspec.Meta(min_length=1)]
# What the values of keys must be, wherever they are read later; `<architecture>.` is left out. Sizes are
# checked where each is read: older files may lack them, and some have one a layer.
_KINDS: dict[str, Any] = {
    "general.architecture": str,
    "split.count": int,
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"), _Number),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), _Number),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), _Number),
    **dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"), _Number),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _Number),
    "attention.layer_norm_rms_epsilon": _Number,
    "attention.sliding_window": _Count,
    "attention.sliding_window_pattern": _Count | _Layers,
    "rope.scaling.type": str,
    "rope.scaling.original_context_length": _Count,
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"), str),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), list[str]),
    "tokenizer.ggml.token_type": list[int],
    "tokenizer.ggml.scores": list[float],
    **{f"tokenizer.ggml.{name}_token_id": int for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{name}": bool for name in ("bos_token", "eos_token", "space_prefix")},
}


class GgufCheckpoint(StreamedCheckpoint):
    """One `.gguf` file."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = read_gguf(path)
        self.config = ModelConfig.from_hf(hf_config(self._file))
        _ = self.stored  # so that a wrong tensor is an error now and not after a prompt

    @property
    def own_dtype(self) -> str | None:
        tensors = self._file.tensors.values()
        return most_common_dtype((_OWN_DTYPES.get(t.type_name), t.n_bytes) for t in tensors)

    @cached_property
    def forms(self) -> dict[str, str]:
        """Of matrices that can be multiplied with as they are stored, the format of their blocks, by name."""
        return {
            name: tensor.form
            for name, tensor in self.stored.items()
            if tensor.form in N_BYTES and len(tensor.shape) == 2
        }

    def in_blocks(self) -> GgufBlocks:
        """The same model with those matrices as they are stored."""
        return GgufBlocks(self)

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        family = family_of(self._file)
        skipped = (LONG_FACTORS, SHORT_FACTORS) if family.model_type == "phi3" else (ROPE_FACTORS,)
        tensors = self._file.tensors.items()
        named = ((hf_name(name, family), (name, t)) for name, t in tensors if name not in skipped)
        found = unique(named, str(self.path))
        shapes = {hf: tensor.shape for hf, (_, tensor) in found.items()}
        expected = expected_shapes(self.config)
        parts = fused_parts(self.config, expected)
        check_fit(fused_shapes(expected, parts), shapes, str(self.path))
        strange = sorted({t.type_name for _, t in found.values()} - set(SUPPORTED))
        if strange:
            raise UserError(
                f"{self.path} has tensors of type {', '.join(strange)}; supported: {', '.join(SUPPORTED)}. "
                "Fetch another quantisation of this model"
            )
        stored = {hf: self._stored(name, tensor, family) for hf, (name, tensor) in found.items()}
        for whole, rows in parts.items():
            tensor = stored.pop(whole)
            stored |= {name: tensor.part(where) for name, where in rows}
        return stored

    def _stored(self, name: str, tensor: GgufTensor, family: GgufFamily) -> StoredTensor:
        permuted = family.permuted and re.search(r"\.attn_[qk]\.(weight|bias)$", name)
        decode = decoder(tensor.type_name)
        if family.norm_plus_one and name.endswith("norm.weight"):
            decode = _less_one(decode)
        head_dim = self.config.head_dim
        return StoredTensor(
            path=self.path,
            shape=tensor.shape,
            offset_bytes=tensor.offset_bytes,
            n_bytes=tensor.n_bytes,
            decode=decode,
            row_group=head_dim if permuted else 1,
            rearrange=_unpermute(head_dim) if permuted else None,
            form=tensor.type_name,
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file.metadata, str(self.path))


class GgufBlocks(StreamedCheckpoint):
    """One `.gguf` file, whose quantised matrices are kept as blocks (`pallas_kernels.blocks`); float32
    otherwise."""

    kind = "gguf"

    def __init__(self, decoded: GgufCheckpoint) -> None:
        self.path, self.config, self._decoded = decoded.path, decoded.config, decoded

    @property
    def model(self) -> CausalLM:
        return with_blocks(self._decoded.model, self._decoded.forms)

    @property
    def own_dtype(self) -> str | None:
        return self._decoded.own_dtype

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        forms = self._decoded.forms
        return {n: x.undecoded() if n in forms else x for n, x in self._decoded.stored.items()}

    def tokenizer(self) -> Tokenizer:
        return self._decoded.tokenizer()


def family_of(file: GgufFile) -> GgufFamily:
    """`UserError` for an architecture that is not known."""
    arch = file.metadata.get("general.architecture")
    if arch not in GGUF_FAMILIES:
        raise UserError(
            f"{file.path} has the architecture {arch!r}; supported in GGUF: {', '.join(GGUF_FAMILIES)}"
        )
    return GGUF_FAMILIES[arch]


def _less_one(decode: Decode) -> Decode:
    """llama.cpp's converter adds to norms the 1 that Gemma's own code adds when it runs."""
    return lambda raw: decode(raw).astype(np.float32) - np.float32(1)


def hf_name(name: str, family: GgufFamily) -> str:
    """llama.cpp's tensor name in Hugging Face's words; a name that is not known comes back as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, suffix = match.groups()
    if layer is not None and suffix == "weight" and stem in _EXPERTS:
        return f"model.layers.{layer}.{_EXPERTS[stem]}"
    known = (_TOP if layer is None else {**_BLOCK, **family.names}).get(stem)
    if known is None:
        return name
    return f"{known}.{suffix}" if layer is None else f"model.layers.{layer}.{known}.{suffix}"


def _unpermute(head_dim: int) -> Callable[[np.ndarray], np.ndarray]:
    """Undo llama.cpp's reordering of the rows of q and k of the llama architecture.

    Its rotary kernel turns neighbouring rows (0, 1), (2, 3), … and Hugging Face's turns (0, H/2), (1, H/2 +
    1), …, so the converter interleaves each head's two halves. Nothing crashes without this; perplexity is
    490, not 23.
    """

    def rearrange(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
        return heads.swapaxes(1, 2).reshape(rows.shape)

    return rearrange


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` that this file's metadata amounts to.

    Raises `UserError` for another architecture, one part of a split file, a missing key, a key that is not
    known and may change the result, a value of another type than its key has, and a `rope_freqs.weight` that
    is not the llama3 scaling.
    """
    _check_kinds(file)
    meta, own_family = file.metadata, family_of(file)
    if meta.get("split.count", 0) > 1:
        raise UserError(
            f"{file.path} is one of {meta['split.count']} parts; join them first: llama-gguf-split --merge "
            "<first part> <whole file>"
        )
    prefix = f"{meta['general.architecture']}."
    own = {key[len(prefix) :]: value for key, value in meta.items() if key.startswith(prefix)}
    _reject_unknown(own, prefix, file, own_family)

    def size(key: str, default: int | None = None) -> int:
        value = own.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problem = (
                "is missing" if value is None else f"is {str(value)[:60]} and must be one positive integer"
            )
            raise UserError(f"{file.path}: {prefix}{key} {problem}")
        return value

    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // heads)
    rotary, value_dim = size("rope.dimension_count", head_dim), size("attention.value_length", head_dim)
    window = own.get("attention.sliding_window") or None
    model_type = own_family.model_type
    if model_type == "llama":
        model_type = "mixtral" if own.get("expert_count") else "mistral" if window else "llama"
    family = FAMILIES[model_type]
    partial = "partial_rotary_factor" in family.keys
    if (rotary != head_dim and not partial) or value_dim != head_dim:
        raise UserError(
            f"{file.path}: {prefix}rope.dimension_count={rotary} and "
            f"{prefix}attention.value_length={value_dim} must equal the head size {head_dim}"
        )
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _epsilon(own.get("attention.layer_norm_rms_epsilon"), prefix, file),
        family.act_key: next(iter(family.acts)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": float(own.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(own, prefix, file, head_dim),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(gguf_eos_ids(meta)) or None,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    experts = {"n_experts": "expert_count", "experts_per_token": "expert_used_count"}
    experts |= {"expert_intermediate_size": "expert_feed_forward_length"}
    config |= {key: size(experts[field]) for key, field in family.sizes.items()}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    config |= {key: name in file.tensors for key, name in biases.items() if key in family.keys}
    if family.windows == "from layer" and window:
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    elif family.windows in ("all", "pattern"):
        config |= {"sliding_window": window} if window or family.windows == "all" else {}
    elif window:
        raise UserError(f"{file.path}: {prefix}attention.sliding_window={window} is not supported")
    return config | own_family.fields({**own, "rope.dimension_count": rotary}, config)


def _check_kinds(file: GgufFile) -> None:
    prefix = f"{file.metadata.get('general.architecture')}."
    for key, value in file.metadata.items():
        try:
            msgspec.convert(value, _KINDS.get(key.removeprefix(prefix), Any))
        except msgspec.ValidationError as error:
            why = str(error).replace("`", "")
            raise UserError(f"{file.path}: {key} is {str(value)[:60]!r} ({why}); fetch it again") from None


def _reject_unknown(own: Mapping[str, Any], prefix: str, file: GgufFile, family: GgufFamily) -> None:
    neutral = {**_NEUTRAL_KEYS, **family.neutral}
    read = (_READ_KEYS | family.keys) - family.neutral.keys()
    unknown = sorted(
        f"{prefix}{key}={str(value)[:40]}"
        for key, value in own.items()
        if key not in read and value not in neutral.get(key, ())
    )
    if unknown:
        raise UserError(f"{file.path}: {', '.join(unknown)} is not supported and may change the result")


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(
            f"{file.path}: tensor token_embd.weight is missing; this is no complete language model"
        )
    return embedding.shape[0]  # rows, not the vocabulary's length: models pad the table


def _epsilon(value: Any, prefix: str, file: GgufFile) -> float:
    if not isinstance(value, float):
        raise UserError(f"{file.path}: {prefix}attention.layer_norm_rms_epsilon is missing")
    return short_float(value)


def _rope_scaling(
    own: Mapping[str, Any], prefix: str, file: GgufFile, head_dim: int
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    if LONG_FACTORS in file.tensors:
        return _longrope(file, own)
    factor = float(own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0)) or 1.0)
    scaling: dict[str, Any] | None
    if kind in ("none", "linear"):
        # Files from before rope.scaling.* give a linear factor alone.
        linear = factor != 1.0 and (kind == "linear" or "rope.scaling.type" not in own)
        scaling = {"rope_type": "linear", "factor": factor} if linear else None
    elif kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
            "attention_factor": _yarn_attention_factor(own, factor),
            "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
        }
        scaling = {key: value for key, value in scaling.items() if value is not None}
    else:
        raise UserError(
            f"{file.path}: {prefix}rope.scaling.type={kind!r} is not supported; supported: none, linear, yarn"
        )
    if ROPE_FACTORS not in file.tensors:
        return scaling
    if scaling is not None:
        raise UserError(
            f"{file.path}: {ROPE_FACTORS} beside {prefix}rope.scaling.type={kind!r} is not supported"
        )
    return _llama3_scaling(file, own, head_dim)


def _longrope(file: GgufFile, own: Mapping[str, Any]) -> dict[str, Any]:
    lists = {}
    for key, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        if name not in file.tensors or file.tensors[name].type_name not in SUPPORTED:
            raise UserError(f"{file.path}: {name} is missing, or of a type that is not supported")
        lists[key] = [short_float(x) for x in _numbers(file, name)]
    attention = own.get("rope.scaling.attn_factor")
    return {"type": "longrope", **lists, "attention_factor": attention and short_float(attention)}


def _numbers(file: GgufFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    decode = decoder(tensor.type_name)
    stored = StoredTensor(file.path, tensor.shape, tensor.offset_bytes, tensor.n_bytes, decode)
    return stored.read(np.dtype(np.float32))


def _yarn_attention_factor(own: Mapping[str, Any], factor: float) -> float | None:
    # llama.cpp multiplies its attn_factor with YaRN's own 1 + 0.1 ln(factor); Hugging Face's replaces it.
    extra = own.get("rope.scaling.attn_factor")
    return None if extra in (None, 1.0) else float(extra) * (0.1 * math.log(factor) + 1.0)


def _llama3_scaling(file: GgufFile, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The llama3 rope scaling that `rope_freqs.weight` [H/2] was computed from, checked against the tensor.

    The converter stores the divisor of each frequency and drops the parameters. Every published model uses
    low_freq_factor 1, high_freq_factor 4 and 8192 original tokens; the factor is the largest divisor.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.shape != (head_dim // 2,) or tensor.type_name not in SUPPORTED:
        raise UserError(
            f"{file.path}: {ROPE_FACTORS} has shape {list(tensor.shape)} and must have [{head_dim // 2}]"
        )
    found = _numbers(file, ROPE_FACTORS).astype(np.float64)
    factor = float(np.max(found))
    low, high, original = 1.0, 4.0, 8192
    theta = float(own.get("rope.freq_base", 10000.0))
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(found, expected, rtol=1e-3):
        raise UserError(
            f"{file.path}: {ROPE_FACTORS} is not the llama3 rope scaling (low_freq_factor 1, "
            "high_freq_factor 4, 8192 original tokens) and is not supported; use the Hugging Face folder "
            "of this model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
