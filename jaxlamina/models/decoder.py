"""One decoder driven by `ModelConfig`, and its pure form over a flat dict of arrays.

The flat dict (Hugging Face tensor name -> array) is what weights, models and workers hand to each other; the
NNX modules only give it structure. Knows nothing of files, KV, requests or of how the model is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlamina.errors import UserError
from jaxlamina.models.config import ModelConfig
from jaxlamina.models.experts import SparseMLP
from jaxlamina.models.layers import (
    Embedding,
    FourNormLayer,
    GatedMLP,
    LayerNorm,
    Linear,
    LlamaLayer,
    Make,
    OptLayer,
    rms_norm,
    vocabulary_logits,
)
from jaxlamina.models.rope import rotary_tables

# OPT's table of positions has two rows before position 0, a remnant of fairseq's padding index.
OPT_POSITION_OFFSET = 2


class LlamaStack(nnx.Module):
    """`model.*` of every family but opt."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        self.config = config
        kind = FourNormLayer if config.post_norms else LlamaLayer
        mlps = [SparseMLP if config.has_experts(i) else GatedMLP for i in range(config.num_hidden_layers)]
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, make=make)
        self.layers = nnx.List(
            [kind(config, i, mlp(config, make=make), make=make) for i, mlp in enumerate(mlps)]
        )
        self.norm = rms_norm(config, config.hidden_size, make)

    def hidden(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens, positions [B, T] -> [B, T, D], before the last norm."""
        config = self.config
        x = self.embed_tokens(tokens)
        if config.embed_scale != 1:
            x = x * config.embed_scale  # which is rounded to x's dtype first
        tables = {
            rope: rotary_tables(rope, config.head_dim, positions, x.dtype)
            for rope in dict.fromkeys(config.ropes)
            if rope is not None
        }
        for layer, rope in zip(self.layers, config.ropes, strict=True):
            x = layer(x, None if rope is None else tables[rope])
        return x

    def normed(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class OptStack(nnx.Module):
    """`model.decoder.*` of opt: learned positions, and projections where the embedding is narrower."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        d, e = config.hidden_size, config.embed_dim or config.hidden_size
        rows = config.max_position_embeddings + OPT_POSITION_OFFSET
        self.embed_tokens = Embedding(config.vocab_size, e, make=make)
        self.embed_positions = Embedding(rows, d, make=make)
        self.project_in = Linear(e, d, bias=False, make=make) if e != d else None
        self.project_out = Linear(d, e, bias=False, make=make) if e != d else None
        self.layers = nnx.List([OptLayer(config, i, make=make) for i in range(config.num_hidden_layers)])
        self.final_layer_norm = (
            LayerNorm(d, config.norm_eps, affine=config.norm_affine, make=make) if config.final_norm else None
        )

    def hidden(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens, positions [B, T] -> [B, T, D], before the last norm."""
        x = self.embed_tokens(tokens)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.embed_positions(positions + OPT_POSITION_OFFSET)
        for layer in self.layers:
            x = layer(x, None)
        return x

    def normed(self, x: jax.Array) -> jax.Array:
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        return x if self.project_out is None else self.project_out(x)


class OptModel(nnx.Module):
    """The one level that opt's tensor names have more: `model.decoder`."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        self.decoder = OptStack(config, make=make)


class Decoder(nnx.Module):
    """A causal language model of any supported family.

    `abstract=True` makes parameters of shape and dtype alone: an 80-layer 70B shape costs no memory.
    Otherwise `rngs` (default `nnx.Rngs(0)`) draws them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        abstract: bool = False,
    ) -> None:
        make = _abstract(dtype) if abstract else _drawn(dtype, nnx.Rngs(0) if rngs is None else rngs)
        opt = config.model_type == "opt"
        self.model = OptModel(config, make=make) if opt else LlamaStack(config, make=make)
        width = config.embed_dim or config.hidden_size
        self.logits_divisor, self.logits_softcap = config.logits_divisor, config.logits_softcap
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(width, config.vocab_size, bias=False, make=make)
        )

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, logits_at: jax.Array | None = None
    ) -> jax.Array:
        """tokens, positions [B, T] int32 -> float32 logits [B, T, V]; with logits_at [B], [B, 1, V].

        `logits_at` names one index along T a row, such as the last valid token of a padded prompt.

        Rows are padded on the right; a pad's position repeats the last valid one (`dynamic` and `longrope`
        take a row's length from its largest position). Causal attention runs over T, so with T = 1 a
        whole-model call sees one token: earlier ones are the attention worker's.
        """
        stack = self.model.decoder if isinstance(self.model, OptModel) else self.model
        x = stack.hidden(tokens, positions)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1, mode="clip")
        head = stack.embed_tokens if self.lm_head is None else self.lm_head
        return self._adjusted(vocabulary_logits(stack.normed(x), head.weight[...]))

    def _adjusted(self, logits: jax.Array) -> jax.Array:
        if self.logits_divisor != 1:
            logits = logits / self.logits_divisor
        if self.logits_softcap is not None:
            logits = jnp.tanh(logits / self.logits_softcap) * self.logits_softcap
        return logits


def _abstract(dtype: Any) -> Make:
    return lambda _kind, shape: jax.ShapeDtypeStruct(shape, dtype)


def _drawn(dtype: Any, rngs: nnx.Rngs) -> Make:
    def make(kind: str, shape: tuple[int, ...]) -> jax.Array:
        if kind == "matrix":
            return jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)
        return jnp.ones(shape, dtype) if kind == "scale" else jnp.zeros(shape, dtype)

    return make


@lru_cache(maxsize=16)
def _structure(config: ModelConfig) -> tuple[Any, dict[str, tuple[Any, ...]], dict[str, tuple[int, ...]]]:
    """The module tree without arrays: graph definition, and by tensor name the NNX path and the shape."""
    graph, state = nnx.split(Decoder(config, abstract=True))
    paths: dict[str, tuple[Any, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(str(part) for part in path)
        paths[name] = path
        shapes[name] = tuple(variable.get_value().shape)
    return graph, paths, shapes


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Hugging Face tensor name -> shape and dtype of every parameter. Allocates nothing."""
    _, _, shapes = _structure(config)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def apply(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    tokens: jax.Array,
    positions: jax.Array,
    logits_at: jax.Array | None = None,
) -> jax.Array:
    """`Decoder.__call__` as a pure function of a flat dict of parameters; what gets traced, jitted and split.

    Raises `UserError` if a parameter is missing or there is one the model does not have.
    """
    graph, paths, _ = _structure(config)
    if params.keys() != paths.keys():
        missing, extra = sorted(paths.keys() - params.keys()), sorted(params.keys() - paths.keys())
        raise UserError(f"parameters do not fit the model: missing {missing[:5]}, not known {extra[:5]}")
    state = nnx.from_flat_state([(paths[name], nnx.Param(array)) for name, array in params.items()])
    model: Decoder = nnx.merge(graph, state)
    return model(tokens, positions, logits_at)


def random_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Random parameters that keep activations near unit size; norms and biases are drawn too.

    Drawn by numpy on the host, one tensor at a time, equal for equal seeds on every platform. For shapes
    alone use `abstract_params`.
    """
    params = {}
    for i, (name, spec) in enumerate(abstract_params(config, dtype).items()):
        values = np.random.default_rng([seed, i]).standard_normal(spec.shape, dtype=np.float32)
        if len(spec.shape) >= 2:
            values *= np.float32(spec.shape[-1] ** -0.5)
        else:
            values *= np.float32(0.1)
            if name.endswith(".weight"):
                values += np.float32(1.0)
        params[name] = jnp.asarray(values, dtype)
    return params
