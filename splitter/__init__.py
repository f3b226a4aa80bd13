"""Cut a JAX model at its attention operators into slices (Lamina 2025, §4.2).

Works on any JAX function. Knows nothing of KV caches, requests, pools or transports.
"""

from splitter.operator import attention, attention_p, dot_product_attention_p
from splitter.report import SplitReport
from splitter.slices import AttentionSite, Slice, SplitModel, split
from splitter.trace import SplitError, Traced, trace

__all__ = [
    "AttentionSite",
    "Slice",
    "SplitError",
    "SplitModel",
    "SplitReport",
    "Traced",
    "attention",
    "attention_p",
    "dot_product_attention_p",
    "split",
    "trace",
]
