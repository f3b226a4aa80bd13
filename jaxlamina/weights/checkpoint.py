"""A checkpoint, whatever its format: a config, tensors by Hugging Face name, a tokenizer.

Holds what every format shares, and `open_checkpoint`, which finds out which format a path is. Knows nothing
of byte layouts (`safetensors_io`, `gguf_io`, `orbax_io`) or of what a model computes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, abstract_params
from jaxlamina.tokenizer import Tokenizer, generation_eos_ids
from jaxlamina.weights.streaming import Progress, StoredTensor, place, stream, target_dtype

Kind = Literal["safetensors", "gguf", "orbax"]
Placement: TypeAlias = jax.Device | jax.sharding.Sharding


class Checkpoint(ABC):
    """A model on disk. Opening reads headers alone; `load` and `tokenizer` read the rest when called."""

    kind: Kind
    path: Path  # the folder, or the .gguf file

    @property
    @abstractmethod
    def config(self) -> ModelConfig: ...

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

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, made once; `UserError` if it has none."""

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, of config.json, generation_config.json and the tokenizer if there is one."""
        return eos_token_ids_of(self.tokenizer, self.config, self.path)


def eos_token_ids_of(tokenizer: Callable[[], Tokenizer], config: ModelConfig, path: Path) -> tuple[int, ...]:
    """The tokenizer's; without one (`UserError`) those of ``config`` and, if ``path`` is a folder, its generation_config.json."""
    try:
        return tokenizer().eos_token_ids
    except UserError:  # told where text is needed; token ids do without
        return tuple(dict.fromkeys([*config.eos_token_ids, *generation_eos_ids(path)]))


class StreamedCheckpoint(Checkpoint):
    """A checkpoint whose tensors lie in files at known offsets: safetensors and GGUF."""

    @property
    @abstractmethod
    def stored(self) -> dict[str, StoredTensor]:
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
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open the demo model by name, a Hugging Face folder, a `.gguf` file or a folder `convert` wrote.

    Raises `UserError` for a name that is neither a path nor known, for a folder without config.json or
    weights, and for files that are not what they should be.
    """
    # The formats build on this module, so they are imported when one is needed.
    from jaxlamina.weights import demo

    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):  # too long, or a NUL in it: no path in any case
        exists = False
    if not exists:
        known = demo.find(str(model))
        if known is None:
            names = ", ".join(demo.NAMES)
            raise UserError(
                f"unknown model {str(model)!r}: there is no such file or folder, and the only model known by name "
                f"is {names}; give a Hugging Face folder (config.json beside *.safetensors), a .gguf file or an "
                "orbax folder"
            )
        path = known
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    from jaxlamina.weights.gguf_io import GgufCheckpoint

    if path.name.endswith((".safetensors", ".safetensors.index.json")) or path.name == "config.json":
        raise UserError(f"{path} is one file of a checkpoint; give its folder, {path.resolve().parent}")
    return GgufCheckpoint(path)


def _open_folder(path: Path) -> Checkpoint:
    from jaxlamina.weights.orbax_io import OrbaxCheckpoint, is_orbax_folder
    from jaxlamina.weights.safetensors_io import SafetensorsCheckpoint

    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        if ggufs:
            raise UserError(
                f"{path} has no config.json; to load a GGUF file give the file, such as {path / ggufs[0]}"
            )
        raise UserError(
            f"{path} has no config.json; give a Hugging Face folder (config.json beside *.safetensors), "
            "a .gguf file or an orbax folder"
        )
    return OrbaxCheckpoint(path) if is_orbax_folder(path) else SafetensorsCheckpoint(path)
