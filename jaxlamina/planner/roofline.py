"""The papers' formulas: what a decode step's products and attention take by the roofline model, which batch
the memory allows, and how fast the network must be.

Pure functions of a model's shape and a device's numbers: bytes, seconds, FLOP. A roofline is a limit: nothing
is faster, and measured times are longer. Products and attention are of a decoder whose every layer has one
attention over all earlier tokens and one MLP; for anything else (experts, sliding windows) `check` raises.

Symbols as in the papers' Tables 2: N parameters, d hidden size, L layers, G query heads that share a KV head,
e bytes of an element, B requests of a batch, l tokens of context.
"""

from __future__ import annotations

import math
from functools import cache

from jaxlamina.errors import UserError
from jaxlamina.models.config import ModelConfig
from jaxlamina.planner.hardware import Rates

ELEMENT_BYTES = 2  # e: FP16 and BF16


@cache
def check(config: ModelConfig) -> None:
    """``UserError`` for a model of which these formulas would say something wrong."""
    if config.n_experts:
        raise UserError(f"model_type={config.model_type!r} has experts, whose cost no formula here knows")
    if any(window is not None for window in config.windows):
        raise UserError(f"model_type={config.model_type!r} has sliding windows, which no formula here knows")
    if config.model_type not in _GATED:
        raise UserError(
            f"model_type={config.model_type!r} is not known to the planner; known: {', '.join(_GATED)}"
        )


_GATED = {"llama": True, "mistral": True, "qwen2": True, "qwen3": True, "opt": False}
"""Whether an MLP has three matrices (gate, up, down) or two."""


def n_mlp_matrices(config: ModelConfig) -> int:
    """Of one layer: gate, up and down, or up and down. ``UserError`` as of `check`."""
    check(config)
    return 3 if _GATED[config.model_type] else 2


def shared_out_evenly(config: ModelConfig, n: int) -> bool:
    """Whether n shards of a model have as many KV heads, and as many columns of its products, each. Weights
    that n does not divide are kept whole by every shard."""
    return not any(x % n for x in (config.num_key_value_heads, config.intermediate_size, config.vocab_size))


@cache
def n_params(config: ModelConfig) -> int:
    """N: all parameters, biases, norms and embeddings among them."""
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    n_matrices = n_mlp_matrices(config)
    matrices = d * (heads + 2 * kv_heads) + heads * d + n_matrices * d * f
    biases = config.qkv_bias * (heads + 2 * kv_heads) + config.o_bias * d
    biases += config.mlp_bias * ((n_matrices - 1) * f + d)
    norm = d * (1 if config.rope is not None else 2)  # with a bias where positions are learned
    norms = 2 * norm + config.qk_norm * 2 * config.head_dim
    embeddings = config.vocab_size * (config.embed_dim or d) * (1 if config.tie_word_embeddings else 2)
    positions = 0 if config.rope is not None else (config.max_position_embeddings + 2) * d
    return layers * (matrices + biases + norms) + config.final_norm * norm + embeddings + positions


@cache
def n_step_params(config: ModelConfig) -> int:
    """N of a decode step: the parameters that it reads and multiplies with.

    All but the embedding of which a step looks up a row for each token. Where embedding and LM head are one
    matrix, it is multiplied with, and counts.
    """
    looked_up = (
        0 if config.tie_word_embeddings else config.vocab_size * (config.embed_dim or config.hidden_size)
    )
    return n_params(config) - looked_up


def group_size(config: ModelConfig) -> int:
    """G; Lamina 2025, §2.2.2."""
    return config.num_attention_heads // config.num_key_value_heads


def kv_bytes_per_token(config: ModelConfig, element_bytes: float = ELEMENT_BYTES) -> float:
    """K and V of one token, all layers: 2 e L d / G (Lamina 2024, §2; with groups Lamina 2025, §2.2.2)."""
    return 2 * element_bytes * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def arithmetic_intensity(config: ModelConfig, batch: float, element_bytes: float = ELEMENT_BYTES) -> float:
    """FLOP per byte of all that is not attention: 2NB / e(N + 2Bd) (Lamina 2025, §2.2.1). Lamina 2024, §3.1,
    has Bd for 2Bd: it does not count what is written."""
    n, d = n_step_params(config), config.hidden_size
    return 2 * n * batch / (element_bytes * (n + 2 * batch * d))


def attention_intensity(config: ModelConfig, element_bytes: float = ELEMENT_BYTES) -> float:
    """FLOP per byte of attention, of any batch and context: 2G / e, since each stored element is multiplied
    and added once by each of G queries (Lamina 2025, §2.2.2)."""
    return 2 * group_size(config) / element_bytes


def model_time_s(
    config: ModelConfig, batch: float, rates: Rates, element_bytes: float = ELEMENT_BYTES
) -> float:
    """MTIME(B): one decode step without attention, the longer of 2NB FLOP and e(N + 2Bd) bytes (Lamina 2025,
    §2.2.1)."""
    n, d = n_step_params(config), config.hidden_size
    return max(2 * n * batch / rates.flop_s, element_bytes * (n + 2 * batch * d) / rates.bytes_s)


def attention_time_s(
    config: ModelConfig, batch: float, context: float, rates: Rates, element_bytes: float = ELEMENT_BYTES
) -> float:
    """ATIME(B, l): attention of one decode step in all layers, the longer of reading B l tokens' KV and of
    its FLOP (Lamina 2025, §2.2.2)."""
    check(config)
    kv_bytes = batch * context * kv_bytes_per_token(config, element_bytes)
    flop = kv_bytes * attention_intensity(config, element_bytes)
    return max(kv_bytes / rates.bytes_s, flop / rates.flop_s)


def mfu(config: ModelConfig, batch: float, time_s: float, rates: Rates) -> float:
    """Model FLOPs utilisation of the products: 2NB over what the devices could do in ``time_s`` (Lamina 2024,
    §3.1)."""
    return 2 * n_step_params(config) * batch / (time_s * rates.flop_s)


def roofline_mfu(config: ModelConfig, batch: float, rates: Rates) -> float:
    """The most that `mfu` can be."""
    return mfu(config, batch, model_time_s(config, batch, rates), rates)


def exchanged_bytes(config: ModelConfig, batch: float, element_bytes: float = ELEMENT_BYTES) -> float:
    """What crosses between the pools in a decode step, q, k, v and attention's output: (2 + 2/G) e d B L
    (Lamina 2025, §3.1); 4edBL where G = 1 (Lamina 2024, §4.2)."""
    width = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    return element_bytes * width * batch * config.num_hidden_layers


def least_bandwidth_2024(config: ModelConfig, utilisation: float, rates: Rates) -> float:
    """Bytes a second between the pools under which model workers are not slowed down: 4edBL / (2NB / MFU)
    (Lamina 2024, §4.2), which is 2edL MFU / N.

    The paper's MFU there must be FLOP/s: the utilisation, from 0 to 1, times what the devices can do. The
    batch drops out but for its effect on ``utilisation``.
    """
    time_s = 2 * n_step_params(config) / (utilisation * rates.flop_s)
    return exchanged_bytes(config, 1) / time_s


def least_bandwidth_2025(
    config: ModelConfig, batch: float, context: float, model: Rates, attention: Rates, slowdown: float = 0.2
) -> float:
    """Bytes a second between the pools under which a step takes ``slowdown`` (α) longer at most: (2 + 2/G) e
    d B L / α(MTIME(B) + ATIME(B, l)) (Lamina 2025, §3.1)."""
    time_s = model_time_s(config, batch, model) + attention_time_s(config, batch, context, attention)
    return exchanged_bytes(config, batch) / (slowdown * time_s)


def batch_that_fits(
    config: ModelConfig, context: float, kv_memory_bytes: float, element_bytes: float = ELEMENT_BYTES
) -> int:
    """Requests of ``context`` tokens whose KV fits into so many bytes (Lamina 2025, §2.2.2); 0 for fewer than
    none."""
    return max(0, math.floor(kv_memory_bytes / (context * kv_bytes_per_token(config, element_bytes))))
