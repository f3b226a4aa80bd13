"""Finding attention in a model wherever it is written in JAX (docs/your-own-model.md)."""

from splitter.find.check import check_found
from splitter.find.found import FoundAttention, FoundModel, find_attention, leaf_names

__all__ = ["FoundAttention", "FoundModel", "check_found", "find_attention", "leaf_names"]
