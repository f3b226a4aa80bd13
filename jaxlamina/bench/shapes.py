"""Of a model's shape: how many bytes there are to be read. Knows no device."""

from __future__ import annotations

import numpy as np

from jaxlamina.models.causal_lm import CausalLM


def weight_bytes(model: CausalLM, itemsize: int = 4) -> int:
    """Bytes of weights a decode step reads: all but tables of which it looks up a few rows. ``itemsize``: of
    what is no block of GGUF."""
    read = [x for name, x in model.like(model.any_dtype).items() if name not in model.looked_up]
    return sum(x.size * (1 if x.dtype == np.uint8 else itemsize) for x in read)


def n_weights(model: CausalLM) -> int:
    """Numbers among those bytes."""
    whole = (model.decoded or model).like(model.any_dtype)
    return sum(x.size for name, x in whole.items() if name not in model.looked_up)


def kv_token_bytes(model: CausalLM, itemsize: int) -> int:
    """Bytes of one token's K and V in all layers."""
    return 2 * itemsize * sum(heads * head_dim for heads, head_dim in model.kv)
