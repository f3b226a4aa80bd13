"""Weights: checkpoints of every supported format as one flat dict {Hugging Face tensor name: array}."""

from jaxlamina.model_files import demo
from jaxlamina.process.cache_folder import cache_dir
from jaxlamina.weights.checkpoint import Checkpoint, open_checkpoint
from jaxlamina.weights.convert import convert
from jaxlamina.weights.dummy import DummyCheckpoint

__all__ = ["Checkpoint", "DummyCheckpoint", "cache_dir", "convert", "demo", "open_checkpoint"]
