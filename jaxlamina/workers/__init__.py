"""The two pools at work: model workers hold weights and run slices, attention workers hold KV and attend."""

from jaxlamina.workers.attention_worker import AttentionSpec, AttentionWorker
from jaxlamina.workers.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.local import LocalExecutor
from jaxlamina.workers.model_worker import ModelWorker
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.unsplit import UnsplitExecutor

__all__ = [
    "AttentionSpec",
    "AttentionWorker",
    "DecodeBatch",
    "LocalExecutor",
    "ModelWorker",
    "PrefillBatch",
    "Programs",
    "UnsplitExecutor",
]
