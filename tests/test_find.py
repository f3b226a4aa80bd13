"""Attention found in models of other hands, and what is refused.

The models of `tests/flax_models` are plain Flax and know nothing of this project. What is found of each is
compared with its own function: cut, a prompt, chunks and single tokens give the same logits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxlamina import FlaxModel
from jaxlamina.errors import UserError
from splitter import SplitError
from tests.flax_models import refused

MODELS = sorted(
    path.stem
    for path in (Path(__file__).parent / "flax_models").glob("*.py")
    if path.stem not in ("__init__", "refused", "published")
)


def model_of(name: str) -> FlaxModel:
    module = importlib.import_module(f"tests.flax_models.{name}")
    fn, params = module.build()
    return FlaxModel(fn, params, vocab_size=module.VOCAB_SIZE, max_model_len=module.MAX_LEN)
