"""Finding attention in a model wherever it is written in JAX (docs/your-own-model.md)."""

from splitter.find.found import FoundAttention, FoundModel, find_attention

__all__ = ["FoundAttention", "FoundModel", "find_attention"]
