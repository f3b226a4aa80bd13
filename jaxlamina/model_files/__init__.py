"""Where a model's files are: a path, the demo model by name, or a repository of the Hugging Face Hub.

Imports no JAX, so that a wrong name is an error at once. Knows file names; what is in a file is for
`jaxlamina.weights` to say.
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxlamina.errors import UserError
from jaxlamina.model_files import demo, hub
from jaxlamina.models.config_files import find_model

_WANTED = (
    "give a Hugging Face folder (config.json beside *.safetensors), a .gguf file, an orbax folder, or a "
    "model of the Hugging Face Hub (org/name, or org/name:file.gguf)"
)


# A function of a module; a drive's letter, or a file of the Hub's, has a slash or a dot after the colon.
_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_code(model: str | Path) -> bool:
    """Whether a model is named as a function of a module that makes it, "package.module:build". A folder or a
    file of that name goes first."""
    return isinstance(model, str) and _CODE.fullmatch(model) is not None and _existing(model) is None


def find(model: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder or ``.gguf`` file that ``model`` stands for, fetched if it must be.

    In this order: a path; "smollm2-135m-instruct", the demo model; ``org/name`` on the Hub, or
    ``org/name:file.gguf``, one file of it. ``revision``: a branch, tag or commit of the Hub's repository.
    ``weights``: False fetches config and tokenizer alone.

    ``UserError`` for a name that is none of these, a folder or a file that cannot be a model, and what the
    Hub refuses.
    """
    path = _existing(model)
    if path is None:
        path = demo.find(str(model))
    if path is None and hub.is_name(str(model)):
        return hub.fetch(str(model), revision, weights=weights)
    if path is None:
        raise UserError(
            f"unknown model {str(model)[:200]!r}: there is no such file or folder, and the only model known "
            f"by name is {', '.join(demo.NAMES)}; {_WANTED}"
        )
    if revision is not None:
        raise UserError(f"revision={revision!r} is for models of the Hub, and {path} is here: leave it out")
    _check(path)
    return path


def find_shape(model: str | Path, revision: str | None = None) -> Path:
    """Where a model's shape is said: a folder with a config.json, a ``.toml`` or ``.json`` file, or a shape
    of configs/models by name; on the Hub, a repository's config. ``UserError`` for none of these."""
    path = _existing(model)
    shape = None if path is not None and path.is_dir() else find_model(model)
    if shape is None and path is None and hub.is_name(str(model)):
        return hub.fetch(str(model), revision, weights=False)
    if revision is not None:
        raise UserError(f"revision={revision!r} is for models of the Hub, and {model} is none: leave it out")
    if shape is not None:
        return shape
    if path is None or not path.is_dir():
        raise UserError(
            f"random weights need a model's shape: {str(model)[:200]!r} is no folder with a config.json, no "
            ".json or .toml file, no name of configs/models and no org/name of the Hugging Face Hub"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json, which says what shape random weights are to have")
    return path


def _existing(model: str | Path) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, ~somebody: no path in any case
        return None


def _check(path: Path) -> None:
    """``UserError`` for what is no model as far as names tell."""
    if not path.is_dir():
        if path.name.endswith((".safetensors", ".safetensors.index.json")) or path.name == "config.json":
            raise UserError(f"{path} is one file of a checkpoint; give its folder, {path.absolute().parent}")
        return
    if (path / "config.json").is_file():
        return
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    if ggufs:
        raise UserError(
            f"{path} has no config.json; to load a GGUF file give the file, such as {path / ggufs[0]}"
        )
    raise UserError(f"{path} has no config.json; {_WANTED}")
