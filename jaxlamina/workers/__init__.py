"""The two pools at work: model workers hold weights and run slices, attention workers hold KV and attend."""

from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.attention_pool import AttentionPool, attention_pool
from jaxlamina.workers.attention_worker import AttentionWorker
from jaxlamina.workers.local import LocalExecutor
from jaxlamina.workers.model_worker import ModelWorker
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.unsplit import UnsplitExecutor

__all__ = [
    "AttentionPool",
    "AttentionSpec",
    "AttentionWorker",
    "ChannelScales",
    "DecodeBatch",
    "LocalExecutor",
    "ModelWorker",
    "PrefillBatch",
    "Programs",
    "UnsplitExecutor",
    "attention_pool",
]
