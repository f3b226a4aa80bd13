"""A causal language model as the runtime takes one, whoever wrote it: ours, or a user's own.

What it computes, its parameters' shapes, its KV heads, and what another process makes the same model of.
Knows no weights, no files and no steps.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.models.config import ModelConfig
from jaxlamina.models.decoder import abstract_params, apply
from jaxlamina.process.user_code import current_folder
from pallas_kernels.blocks import BLOCK, N_BYTES, dequantize


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A model without its weights.

    - ``fn(params, tokens [B, T], positions [B, T], logits_at [B] | None) -> logits [B, T or 1, V]``: causal,
      of parameters by name, with `splitter.attention` as its attention.
    - ``max_len``: tokens that a row may have. ``kv``: KV heads and head size of each attention.
    - ``heads``, ``windows``: query heads and sliding window of each attention. ``looked_up``: parameters of
      which a step reads a few rows.
    - ``like(dtype)``: the parameters' shapes; ``dtype``: the one that the model has, None: any.
    - ``origin``: what `of_origin` makes the same model of in another process; None where nothing does.
    - ``name``: what tells it from other models, for programs kept on disk; None: they are not.
    - ``config``: of a model of ours. ``decoded``: of a model `with_blocks`, the one without.
    """

    fn: Callable[..., jax.Array]
    vocab_size: int
    max_len: int
    kv: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    windows: tuple[int | None, ...]
    like: Callable[[Any], Mapping[str, jax.ShapeDtypeStruct]]
    origin: Mapping[str, Any] | None
    name: Hashable | None
    description: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    config: ModelConfig | None = None
    looked_up: tuple[str, ...] = ()
    decoded: CausalLM | None = None

    @property
    def kv_heads(self) -> list[int]:
        """Of each attention."""
        return [heads for heads, _ in self.kv]

    @property
    def any_dtype(self) -> np.dtype:
        """The dtype that weights have if nobody says."""
        return np.dtype(self.dtype or jnp.float32)


class HasModel(ABC):
    """What holds a model: a checkpoint, a model in memory, a user's own. ``code``: the "package.module:build"
    that made it, if one did."""

    code: str | None = None
    in_memory: ClassVar[bool] = False  # its weights are there already

    @property
    @abstractmethod
    def model(self) -> CausalLM: ...

    @abstractmethod
    def load(self, dtype: Any, device: Any = None, progress: Any = None) -> Mapping[str, jax.Array]:
        """The parameters by name, on ``device``."""

    def later(self, dtype: Any) -> Mapping[str, Any] | None:
        """The parameters as `jaxlamina.weights.later.Later`, each made where it is put, for what is to have
        a share of them; None where they can only be loaded."""
        del dtype
        return None

    def check(self) -> float:
        """The largest relative difference between the model as it is and cut; 0 where there is nothing to
        compare. ``UserError`` where it is more than rounding."""
        return 0.0


class HasConfig(HasModel):
    """What holds a model of ours."""

    config: ModelConfig

    @property
    def model(self) -> CausalLM:
        return decoder(self.config)


@lru_cache(maxsize=16)
def decoder(config: ModelConfig) -> CausalLM:
    """The model of ours that ``config`` describes."""
    hf = config.to_hf()
    return CausalLM(
        fn=partial(apply, config),
        vocab_size=config.vocab_size,
        max_len=config.max_length,
        kv=((config.num_key_value_heads, config.head_dim),) * config.num_hidden_layers,
        heads=(config.num_attention_heads,) * config.num_hidden_layers,
        windows=config.windows,
        like=partial(abstract_params, config),
        origin={"config": hf},
        name=config,
        description=hf,
        config=config,
        looked_up=tuple(name for name in abstract_params(config) if name.endswith(_tables(config))),
    )


def with_blocks(model: CausalLM, forms: Mapping[str, str]) -> CausalLM:
    """``model``, a float32 one, with the matrices of these names as blocks of GGUF of these formats
    (`pallas_kernels.blocks`)."""

    def like(dtype: Any) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {name: _blocks_like(x, forms.get(name)) for name, x in model.like(dtype).items()}

    named = None if model.name is None else (model.name, tuple(sorted(forms.items())))
    origin = None if model.origin is None else {**model.origin, "blocks": dict(forms)}
    fn = partial(_decoding, model.fn, dict(forms))
    return replace(model, fn=fn, like=like, name=named, origin=origin, dtype="float32", decoded=model)


def _decoding(fn: Callable[..., jax.Array], forms: Mapping[str, str], params: Any, *args: Any) -> jax.Array:
    # In the order of layers, 9 before 10: slices of equal layers are one program then.
    names = sorted(params, key=lambda name: [(len(part), part) for part in name.split(".")])
    whole = {n: dequantize(params[n], forms[n]) if n in forms else params[n] for n in names}
    return fn(whole, *args)


def _blocks_like(x: jax.ShapeDtypeStruct, form: str | None) -> jax.ShapeDtypeStruct:
    if form is None:
        return x
    return jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // BLOCK * N_BYTES[form]), np.uint8)


def _tables(config: ModelConfig) -> tuple[str, ...]:
    return ("embed_positions.weight", *(() if config.tie_word_embeddings else ("embed_tokens.weight",)))


def of_origin(origin: Mapping[str, Any]) -> CausalLM:
    """The model that another process's ``CausalLM.origin`` tells of."""
    if "blocks" in origin:
        whole = {key: value for key, value in origin.items() if key != "blocks"}
        return with_blocks(of_origin(whole), origin["blocks"])
    if "config" in origin:
        return decoder(ModelConfig.from_hf(origin["config"]))
    return built(origin["code"]).model


def built(name: str) -> HasModel:
    """What the function "package.module:build" gives; modules of the current folder are found, too. It runs
    that code. ``UserError`` if there is none, it fails, or gives no model."""
    module, _, function = name.partition(":")
    try:
        with current_folder():
            found = getattr(importlib.import_module(module), function)()
    except UserError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise UserError(
            f"the model {name} cannot be built ({type(error).__name__}: {error}): check it; modules are "
            "looked for in PYTHONPATH, among what is installed, and in the current folder"
        ) from error
    if not isinstance(found, HasModel):
        raise UserError(
            f"{name} gives a {type(found).__name__}: it must return a jaxlamina.FlaxModel "
            "(docs/your-own-model.md)"
        )
    found.code = name
    return found
