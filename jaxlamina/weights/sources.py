"""What `jaxlamina.LLM` makes a model of: a checkpoint of any format, a model of the user's own, or arrays
that are there already.

Opens what a name, a path or code stands for, and says in which form its matrices are loaded. Knows files and
models; no device's memory, no rank and no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxlamina import dtypes
from jaxlamina.errors import UserError
from jaxlamina.model_files import is_code
from jaxlamina.models import ModelConfig
from jaxlamina.models.causal_lm import CausalLM, HasConfig, HasModel, built
from jaxlamina.weights.checkpoint import open_checkpoint
from jaxlamina.weights.dummy import DummyCheckpoint
from jaxlamina.weights.replacing import check_same_arrays, check_same_model
from pallas_kernels import cpu


class ModelSource(Protocol):
    """What ``LLM`` needs of a checkpoint (`jaxlamina.weights.Checkpoint` is one), or of a `FlaxModel`."""

    @property
    def model(self) -> CausalLM: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def own_dtype(self) -> str | None: ...

    @property
    def in_memory(self) -> bool: ...

    def check(self) -> float: ...

    def load(self, dtype: Any, device: Any, progress: Any) -> Mapping[str, jax.Array]: ...

    def later(self, dtype: Any) -> Mapping[str, Any] | None: ...

    def tokenizer(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class InMemoryModel(HasConfig):
    """A model whose parameters are already arrays; without a tokenizer it takes and gives token ids."""

    in_memory: ClassVar[bool] = True
    config: ModelConfig
    params: Mapping[str, jax.Array]
    text: Any | None = None  # a Tokenizer
    eos_token_ids: tuple[int, ...] = ()

    @property
    def own_dtype(self) -> str | None:
        """What most of the parameters are."""
        return dtypes.most_common_dtype((x.dtype.name, x.nbytes) for x in self.params.values())

    def load(self, dtype: Any, device: Any = None, progress: Any = None) -> dict[str, jax.Array]:
        return {name: jax.device_put(jnp.asarray(x, dtype), device) for name, x in self.params.items()}

    def tokenizer(self) -> Any:
        return self.text


def open_source(model: str | Path | ModelSource, load_format: str, revision: str | None) -> ModelSource:
    """``model`` as `jaxlamina.LLM` takes it; ``load_format``: its option, "dummy" for weights that are made
    up; ``revision``: of a model of the Hub."""
    if not isinstance(model, str | Path):
        if not all(hasattr(type(model), name) for name in ("model", "load")):
            raise UserError(
                f"{model!r:.60} is no model by itself: give a name, a folder or a file, or put a module or "
                "function of yours into a FlaxModel, as FlaxModel.from_nnx does (docs/your-own-model.md)"
            )
        return model
    if is_code(model):
        return built(str(model))  # type: ignore[return-value]
    return DummyCheckpoint(model, revision) if load_format == "dummy" else open_checkpoint(model, revision)


def open_weights(
    source: str | Path | ModelSource, revision: str | None, model: CausalLM, dtype: str
) -> ModelSource:
    """A model, as `open_source` takes one, whose weights may take the place of ``model``'s: in the form that
    those have. ``UserError`` for another model."""
    opened = open_source(source, "auto", revision)
    if model.decoded is not None and getattr(opened, "forms", None):
        opened = opened.in_blocks()  # type: ignore[attr-defined]
    where = str(source) if isinstance(source, str | Path) else "the new model"
    check_same_model(model, opened.model, where)
    check_same_arrays(model.like(dtype), opened.model.like(dtype), where)
    return opened


@dataclasses.dataclass(frozen=True)
class OtherWeights(HasModel):
    """``source``, its config, tokenizer and end tokens, with the weights of another model: what runs after
    `jaxlamina.LLM.update_weights`."""

    source: ModelSource
    weights: str
    revision: str | None

    @property
    def model(self) -> CausalLM:
        return self.source.model

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.source.eos_token_ids

    @property
    def own_dtype(self) -> str | None:
        return self.source.own_dtype

    @property
    def forms(self) -> Mapping[str, str] | None:
        return getattr(self.source, "forms", None)

    def in_blocks(self) -> OtherWeights:
        return dataclasses.replace(self, source=self.source.in_blocks())  # type: ignore[attr-defined]

    def load(self, dtype: Any, device: Any = None, progress: Any = None) -> Mapping[str, jax.Array]:
        return open_weights(self.weights, self.revision, self.model, dtype).load(dtype, device, progress)

    def tokenizer(self) -> Any:
        return self.source.tokenizer()


def as_stored(source: ModelSource, asked: str, dtype: str, platform: str, in_shards: bool) -> ModelSource:
    """``source``, with its quantised matrices as they are stored where that is asked for or, with "auto",
    faster. ``asked``: the option ``quantization``; ``platform``: of the model's device; ``in_shards``: with
    ``tensor_parallel`` over ranks. ``UserError`` for what cannot be."""
    forms = getattr(source, "forms", None)
    why_not = (
        "the model has no matrices of Q4_0, Q4_1 or Q8_0, as a .gguf may"
        if not forms
        else f"its products are float32, and dtype is {dtype}"
        if dtype != "float32"
        else "tensor_parallel shares decoded weights out"
        if in_shards
        else None
    )
    if asked == "gguf" and why_not is not None:
        raise UserError(f"quantization='gguf' is not possible: {why_not}; leave it out")
    wanted = asked == "gguf" or (asked == "auto" and cpu.serves(platform))
    return source.in_blocks() if wanted and why_not is None else source  # type: ignore[attr-defined]


def tokenizer_of(source: ModelSource) -> tuple[Any | None, str]:
    """The model's tokenizer, or None and why: token ids can be served without one."""
    try:
        return source.tokenizer(), "this model has none"
    except UserError as error:
        return None, str(error)
