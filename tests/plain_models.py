"""The models of `tests/flax_models` as `FlaxModel`, and what each function says by itself, without this project."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina import FlaxModel

NAMES = sorted(
    path.stem
    for path in (Path(__file__).parent / "flax_models").glob("*.py")
    if path.stem not in ("__init__", "refused", "published")
)
PROMPTS = ([5, 9, 11, 3, 4, 17, 8, 2, 1, 6, 12, 40, 41, 50, 51, 52, 53, 54, 55], [7, 8], [30, 2, 9, 9, 1])


def built(name: str) -> tuple[Any, Any, int, int]:
    """(function, parameters, vocabulary, tokens at most)"""
    module = importlib.import_module(f"flax_models.{name}")
    fn, params = module.build()
    return fn, params, module.VOCAB_SIZE, module.MAX_LEN


def flax_model(name: str) -> FlaxModel:
    fn, params, vocab_size, max_len = built(name)
    return FlaxModel(fn, params, vocab_size=vocab_size, max_model_len=max_len)


def greedy_of_the_function(name: str, prompts: Any = PROMPTS, n_tokens: int = 64) -> list[list[int]]:
    """Each next token from all logits of the whole row, computed anew: no cache, no slices. Rows are filled up
    with tokens behind, which a causal model does not see."""
    fn, params, _, max_len = built(name)
    run = jax.jit(fn)
    tokens = np.zeros((len(prompts), max_len), np.int32)
    lengths = np.array([len(p) for p in prompts])
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    places = jnp.broadcast_to(jnp.arange(max_len, dtype=jnp.int32), tokens.shape)
    rows = np.arange(len(prompts))
    for _ in range(n_tokens):
        logits = run(params, jnp.asarray(tokens), places)
        tokens[rows, lengths] = np.asarray(logits[rows, lengths - 1]).argmax(-1)
        lengths += 1
    return [tokens[i, len(p) : lengths[i]].tolist() for i, p in enumerate(prompts)]


def __getattr__(name: str) -> Any:
    """Each model as a command's `--model plain_models:NAME`, a function that builds it."""
    if name not in NAMES:
        raise AttributeError(name)
    return partial(flax_model, name)
