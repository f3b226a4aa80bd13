"""Weights: checkpoints of every supported format as one flat dict {Hugging Face tensor name: array}."""

from jaxlamina.weights.checkpoint import Checkpoint, open_checkpoint
from jaxlamina.weights.convert import convert

__all__ = ["Checkpoint", "convert", "open_checkpoint"]
