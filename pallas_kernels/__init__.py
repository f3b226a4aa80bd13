"""Attention over token-granular KV slots: kernels, their float64 references and the JAX compatibility file.

This room knows arrays only: nothing of models, requests or who owns a slot.
"""

from __future__ import annotations

from pallas_kernels.attention import (
    Begun,
    append,
    attention_with_own,
    begin_decode_attention,
    combine,
    decode_attention,
    end_decode_attention,
    partial_attention,
    token_partial,
)
from pallas_kernels.causal import causal_attention, causal_partial
from pallas_kernels.dispatch import BACKENDS, use_backend
from pallas_kernels.precision import exact
from pallas_kernels.quantized import (
    ChannelQuantizedPool,
    Pool,
    QuantizedPool,
    channel_scales_of,
    channel_zeros_of,
    make_pool,
)

__all__ = [
    "BACKENDS",
    "Begun",
    "ChannelQuantizedPool",
    "Pool",
    "QuantizedPool",
    "append",
    "attention_with_own",
    "begin_decode_attention",
    "causal_attention",
    "causal_partial",
    "channel_scales_of",
    "channel_zeros_of",
    "combine",
    "decode_attention",
    "end_decode_attention",
    "exact",
    "make_pool",
    "partial_attention",
    "token_partial",
    "use_backend",
]
