"""Of a model's shape: how many bytes there are to be read. Knows no device."""

from __future__ import annotations

from jaxlamina.models.causal_lm import CausalLM


def weight_bytes(model: CausalLM, itemsize: int = 4) -> int:
    """Bytes of weights a decode step reads: all but tables of which it looks up a few rows."""
    return itemsize * sum(
        x.size for name, x in model.like(model.any_dtype).items() if name not in model.looked_up
    )


def kv_token_bytes(model: CausalLM, itemsize: int) -> int:
    """Bytes of one token's K and V in all layers."""
    return 2 * itemsize * sum(heads * head_dim for heads, head_dim in model.kv)
