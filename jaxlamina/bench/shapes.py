"""Of a model's shape: how many bytes there are to be read. Knows no device."""

from __future__ import annotations

from jaxlamina.models import ModelConfig, abstract_params


def weight_bytes(config: ModelConfig, itemsize: int = 4) -> int:
    """Bytes of weights a decode step reads: all but tables of which it looks up a few rows."""
    looked_up = ["embed_positions.weight"]
    if not config.tie_word_embeddings:
        looked_up.append("embed_tokens.weight")
    read = (x.size for name, x in abstract_params(config).items() if not name.endswith(tuple(looked_up)))
    return itemsize * sum(read)


def kv_token_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one token's K and V in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
