"""What llama.cpp's architectures have of their own: tensor names, how weights are stored, metadata.

One entry an architecture; what they share is in `gguf_io`. Knows llama.cpp's words and Hugging Face's; reads
no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Own = Mapping[str, Any]  # metadata under `<architecture>.`
Fields = dict[str, Any]  # of a config.json


@dataclass(frozen=True)
class GgufFamily:
    """One architecture.

    - `names`: of a block's tensors, where they are not those that most have. `keys`: of metadata, likewise.
    - `permuted`: rows of q and k are interleaved. `norm_plus_one`: norms are stored with 1 added.
    - `fields`: what metadata and the fields found so far amount to, further or otherwise.
    """

    model_type: str
    permuted: bool = False
    norm_plus_one: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys with what changes nothing
    fields: Callable[[Own, Fields], Fields] = lambda own, found: {}


def short_float(value: float) -> float:
    """A float32 of the metadata as the shortest decimal that names it: 1e-05 and not
    9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _granite(own: Own, found: Fields) -> Fields:
    scales = {
        "attention_multiplier": own.get("attention.scale") or found["head_dim"] ** -0.5,
        "embedding_multiplier": own.get("embedding_scale") or 1.0,
        "residual_multiplier": own.get("residual_scale") or 1.0,
        "logits_scaling": own.get("logit_scale") or 1.0,
    }
    return {key: short_float(value) for key, value in scales.items()}


def _phi3(own: Own, found: Fields) -> Fields:
    original = own.get("rope.scaling.original_context_length", found["max_position_embeddings"])
    rotary = own.get("rope.dimension_count", found["head_dim"])
    return {
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotary / found["head_dim"],
    }


def _gemma_scale(found: Fields, n_layers_27b: int) -> Fields:
    # No key says it. llama.cpp knows the one size by its number of layers whose authors took another number.
    if found["num_hidden_layers"] == n_layers_27b:
        return {"query_pre_attn_scalar": found["hidden_size"] // found["num_attention_heads"]}
    return {"query_pre_attn_scalar": found["head_dim"]}


def _gemma2(own: Own, found: Fields) -> Fields:
    caps = {f"{name}_logit_softcapping": own.get(f"{name}_logit_softcapping") for name in ("attn", "final")}
    return _gemma_scale(found, 46) | {key: short_float(x) for key, x in caps.items() if x is not None}


def _gemma3(own: Own, found: Fields) -> Fields:
    fields = _gemma_scale(found, 62) | {"rope_local_base_freq": own.get("rope.freq_base_swa", 1e4)}
    cap = own.get("final_logit_softcapping")
    fields["final_logit_softcapping"] = cap and short_float(cap)
    pattern = own.get("attention.sliding_window_pattern", 6)
    if not own.get("attention.sliding_window"):
        fields["layer_types"] = ["full_attention"] * found["num_hidden_layers"]
    elif isinstance(pattern, list):
        fields["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    else:
        fields["sliding_window_pattern"] = pattern
    return fields


_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_EXPERTS = frozenset({"expert_count", "expert_used_count"})

GGUF_FAMILIES: dict[str, GgufFamily] = {
    # And mistral, which has a sliding window, and mixtral, which has experts.
    "llama": GgufFamily("llama", permuted=True, keys=_EXPERTS),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        keys=_EXPERTS | {"expert_feed_forward_length"},
        fields=lambda own, found: {"norm_topk_prob": True, "use_sliding_window": False},  # as llama.cpp does
    ),
    "granite": GgufFamily(
        "granite",
        permuted=True,
        keys=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
        neutral={"rope.scaling.finetuned": (True,)},  # false: no positions at all
        fields=_granite,
    ),
    "smollm3": GgufFamily("smollm3", permuted=True),  # every fourth layer without positions, as by default
    "phi3": GgufFamily(
        "phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields=_phi3,
    ),
    "gemma": GgufFamily("gemma", norm_plus_one=True),
    "gemma2": GgufFamily(
        "gemma2",
        norm_plus_one=True,
        names=_FOUR_NORMS,
        keys=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
        fields=_gemma2,
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        norm_plus_one=True,
        names=_FOUR_NORMS,
        keys=frozenset({"final_logit_softcapping", "rope.freq_base_swa", "attention.sliding_window_pattern"}),
        fields=_gemma3,
    ),
}
