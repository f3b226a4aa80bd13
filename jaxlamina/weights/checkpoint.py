"""A checkpoint, whatever its format: a config, tensors by Hugging Face name, a tokenizer.

Holds what every format shares, and `open_checkpoint`, which finds out which format a model has. Knows nothing
of byte layouts (`safetensors_io`, `gguf_io`, `orbax_io`) or of what a model computes.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.model_files import find
from jaxlamina.models import ModelConfig, abstract_params
from jaxlamina.models.causal_lm import HasConfig
from jaxlamina.text.tokenizer import Tokenizer, generation_eos_ids, tokenizer_from_folder
from jaxlamina.weights.streaming import Progress, Stored, place, stream, target_dtype

Kind = Literal["safetensors", "gguf", "orbax"]
Placement: TypeAlias = jax.Device | jax.sharding.Sharding


class Checkpoint(HasConfig):
    """A model on disk. Opening reads headers alone; `load` and `tokenizer` read the rest when called."""

    kind: Kind
    path: Path  # the folder, or the .gguf file
    config: ModelConfig

    @property
    @abstractmethod
    def own_dtype(self) -> str | None:
        """What most bytes of the weights are stored as: float32, bfloat16, float16, …; None for a quantised
        form."""

    @abstractmethod
    def load(
        self, dtype: Any = "float32", device: Placement | None = None, progress: Progress | None = None
    ) -> dict[str, jax.Array]:
        """Hugging Face tensor name -> array, linears as [out, in], exactly `abstract_params(config)`'s names.

        `dtype`: float32, bfloat16 or float16. `device`: where every array goes, a device or a sharding.
        `progress(done_bytes, total_bytes)` counts bytes of the file. Raises `UserError` for a truncated or
        corrupt file and, all at once, for missing, unexpected and mis-shaped tensors.
        """

    @abstractmethod
    def host_tensors(self, dtype: Any, progress: Progress | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Every (name, array) of `load`, on the host and one at a time, for a writer that keeps none."""

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, made once; `UserError` if it has none."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_from_folder(self.path, self.config.eos_token_ids)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, of config.json, generation_config.json and the tokenizer if there is
        one."""
        return eos_token_ids_of(self.tokenizer, self.config, self.path)


def eos_token_ids_of(tokenizer: Callable[[], Tokenizer], config: ModelConfig, path: Path) -> tuple[int, ...]:
    """The tokenizer's; without one (`UserError`) those of ``config`` and, if ``path`` is a folder, its
    generation_config.json."""
    try:
        return tokenizer().eos_token_ids
    except UserError:  # told where text is needed; token ids do without
        return tuple(dict.fromkeys([*config.eos_token_ids, *generation_eos_ids(path)]))


class StreamedCheckpoint(Checkpoint):
    """A checkpoint whose tensors lie in files at known offsets: safetensors and GGUF."""

    @property
    @abstractmethod
    def stored(self) -> Mapping[str, Stored]:
        """Model name -> where it lies, already checked against the config."""

    def load(
        self, dtype: Any = "float32", device: Placement | None = None, progress: Progress | None = None
    ) -> dict[str, jax.Array]:
        return {name: place(array, device) for name, array in self.host_tensors(dtype, progress)}

    def host_tensors(self, dtype: Any, progress: Progress | None = None) -> Iterator[tuple[str, np.ndarray]]:
        return stream(self.stored, target_dtype(dtype), progress)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in abstract_params(config).items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that must be there; `UserError` names the file otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); fetch it again") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply; fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Open what `jaxlamina.model_files.find` finds: the demo model by name, a Hugging Face folder, a `.gguf`
    file, a folder `convert` wrote, or a model of the Hugging Face Hub.

    Raises `UserError` for a name that is neither a path nor known, for a folder without config.json or
    weights, and for files that are not what they should be.
    """
    # The formats build on this module, so they are imported when one is needed.
    from jaxlamina.weights.gguf_io import GgufCheckpoint
    from jaxlamina.weights.orbax_io import OrbaxCheckpoint, is_orbax_folder
    from jaxlamina.weights.safetensors_io import SafetensorsCheckpoint

    path = find(model, revision)
    if not path.is_dir():
        return GgufCheckpoint(path)
    return OrbaxCheckpoint(path) if is_orbax_folder(path) else SafetensorsCheckpoint(path)
