"""Attention over token-granular KV slots: kernels, their float64 references and the JAX compatibility file.

This room knows arrays only: nothing of models, requests or who owns a slot.
"""

from __future__ import annotations

from pallas_kernels.attention import (
    append,
    causal_attention,
    combine,
    decode_attention,
    make_pool,
    partial_attention,
)
from pallas_kernels.precision import exact

__all__ = [
    "append",
    "causal_attention",
    "combine",
    "decode_attention",
    "exact",
    "make_pool",
    "partial_attention",
]
