"""The TOML files of `configs/`: where they lie, which there are, and models' shapes read from them.

The same files serve a checkout and an installed wheel. Knows nothing of weights; what a field means is
`ModelConfig`'s.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.models import ModelConfig

_PACKAGE = Path(__file__).resolve().parents[1]


def configs_dir() -> Path:
    """The folder `configs/`: inside the package where it was installed from a wheel, else of the checkout."""
    packaged = _PACKAGE / "_configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "configs"


def model_names() -> list[str]:
    """Names that `model_config` knows, sorted."""
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.toml"))


def find_model(name: str | Path) -> Path | None:
    """The file of a model's shape: a `.toml` or `.json` path, or a name in `configs/models`; None for
    anything else."""
    text = str(name)
    path = Path(text).expanduser()
    if path.suffix in (".toml", ".json"):
        return path if path.is_file() else None
    if text.lower() in model_names():
        return configs_dir() / "models" / f"{text.lower()}.toml"
    return None


def model_config(name: str | Path) -> ModelConfig:
    """A model's shape, by name (`configs/models/NAME.toml`), from a TOML file of the same fields or a
    config.json.

    Raises `UserError` for an unknown name, a file that cannot be parsed, and a field that is unknown, missing
    or out of range; the message names the file.
    """
    path = find_model(name)
    if path is None:
        raise UserError(
            f"no model shape {str(name)!r}; known: {', '.join(model_names())}, or give a .toml or "
            f"config.json file"
        )
    fields = _read(path)
    from jaxlamina.models import ModelConfig  # here, because it loads JAX

    try:
        return ModelConfig.from_hf(fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError, JSONDecodeError and UnicodeDecodeError are all ValueErrors
        raise UserError(f"{path} is not {path.suffix[1:].upper()}: {error}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold a table of fields, not a {type(fields).__name__}")
    return fields
