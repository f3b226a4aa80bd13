"""Models of random weights, to measure with: a config, maybe a tokenizer, and no file of weights.

Knows configs and shapes; nothing of what a model computes.
"""

from __future__ import annotations

from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.model_files import find_shape
from jaxlamina.models import ModelConfig, abstract_params
from jaxlamina.models.causal_lm import HasConfig
from jaxlamina.models.config_files import model_config
from jaxlamina.text.tokenizer import Tokenizer, tokenizer_from_folder
from jaxlamina.weights.checkpoint import eos_token_ids_of
from jaxlamina.weights.later import Later, made
from jaxlamina.weights.streaming import Progress


class Drawn(HasConfig):
    """Random weights of a config, and no tokenizer."""

    own_dtype: str | None = None  # drawn as one likes
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def load(self, dtype: Any, device: Any = None, progress: Progress | None = None) -> dict[str, jax.Array]:
        """Drawn on ``device``; ``progress(done_bytes, total_bytes)``."""
        with jax.default_device(device):
            return random_weights(self.config, dtype, progress)

    def later(self, dtype: Any) -> dict[str, Later]:
        """The same numbers as `load`'s, each drawn where it is put."""
        return _undrawn(self.config, dtype)

    def tokenizer(self) -> Tokenizer | None:
        return None


class DummyCheckpoint(Drawn):
    """``model``: a Hugging Face folder, or ``org/name`` of the Hub, of which config.json is read, and the
    tokenizer if there is one; or a shape as `jaxlamina.models.config_files.model_config` knows it, which has
    no tokenizer. ``UserError`` for neither."""

    def __init__(self, model: str | Path, revision: str | None = None) -> None:
        self._path = path = find_shape(model, revision)
        self._folder = path if path.is_dir() else None
        super().__init__(model_config(path if self._folder is None else path / "config.json"))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._folder is None:
            raise UserError("a shape alone has no tokenizer; give a folder with tokenizer.json, or token ids")
        return tokenizer_from_folder(self._folder, self.config.eos_token_ids)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return eos_token_ids_of(self.tokenizer, self.config, self._path)


def random_weights(config: ModelConfig, dtype: Any, progress: Progress | None = None) -> dict[str, jax.Array]:
    """Drawn on the default device, tensor by tensor, small enough that activations stay near unit size."""
    undrawn, found, done = _undrawn(config, dtype), {}, 0
    total = sum(x.nbytes for x in undrawn.values())
    for name, x in undrawn.items():
        found[name] = made(x)
        done += x.nbytes
        if progress is not None:
            progress(done, total)
    return found


def _undrawn(config: ModelConfig, dtype: Any) -> dict[str, Later]:
    return {
        name: Later(tuple(s.shape), np.dtype(s.dtype), partial(_drawn_at, i, s.shape, dtype))
        for i, (name, s) in enumerate(abstract_params(config, dtype).items())
    }


def _drawn_at(i: int, shape: tuple[int, ...], dtype: Any, where: jax.sharding.Sharding | None) -> jax.Array:
    drawn: jax.Array = _drawing_at(where)(np.uint32(i), shape, dtype)
    return drawn


@cache
def _drawing_at(where: jax.sharding.Sharding | None) -> Any:
    return jax.jit(_drawn, static_argnums=(1, 2), out_shardings=where)


def _drawn(i: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    key = jax.random.fold_in(jax.random.key(0), i)
    return (jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5).astype(dtype)
