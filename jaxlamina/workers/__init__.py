"""The two pools at work: model workers hold weights and run slices, attention workers hold KV and attend."""

from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.spec import AttentionSpec, ChannelScales

__all__ = [
    "AttentionSpec",
    "ChannelScales",
    "DecodeBatch",
    "PrefillBatch",
]
