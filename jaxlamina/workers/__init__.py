"""The two pools at work: model workers hold weights and run slices, attention workers hold KV and attend."""

from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.model_worker import ModelWorker
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.unsplit import UnsplitExecutor

__all__ = [
    "AttentionSpec",
    "ChannelScales",
    "DecodeBatch",
    "ModelWorker",
    "PrefillBatch",
    "Programs",
    "UnsplitExecutor",
]
