"""Devices as numbers, read from TOML: memory, its bandwidth, arithmetic, links, power and prices, each number
with its source.

`configs/hardware` has those that are known; a user's own file is given by path. Knows no model and no
formula.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

from jaxlamina.errors import UserError
from jaxlamina.models.config_files import configs_dir

GIB = 1 << 30
_MOST = 1e12  # of any number of a device
_YEAR = re.compile(r"\b(19|20)\d\d\b")


class Rates(NamedTuple):
    """What one device, or several that share out the work evenly, do in a second."""

    flop_s: float
    bytes_s: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which arithmetic, and not memory, is the limit."""
        return self.flop_s / self.bytes_s


@dataclass(frozen=True)
class Hardware:
    """One kind of device. Each field is a key of the TOML file; None: not known, and left out there.

    ``source`` has an entry for every number: where it is from, with the year. Raises `UserError` for a value
    of another type or not above 0, and for a number without its source.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float  # of its memory
    tflops_bf16: float | None = None  # dense, as all of these
    tflops_fp16: float | None = None
    tflops_fp8: float | None = None
    chip_link_gb_s: float | None = None  # to its own kind in a host; of NVLink one way
    network_gbit_s: float | None = None  # to other hosts
    power_w: float | None = None
    price_usd: float | None = None  # bought
    price_usd_h: float | None = None  # rented, one device
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise UserError(f"name={self.name!r} must be the device's name, in one line")
        if not isinstance(self.source, Mapping) or not all(
            isinstance(text, str) for text in self.source.values()
        ):
            raise UserError("source must be a table of texts, one for each number")
        for key in _NUMBERS:
            value = getattr(self, key)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value <= _MOST):
                raise UserError(f"{key}={value!r} must be a number above 0 and up to {_MOST:g}")
            if not _YEAR.search(self.source.get(key, "")):
                raise UserError(
                    f'{key}={value:g} has no source with a year: say it under [source], {key} = "…, 2025"'
                )
        for key in self.source:
            if key not in _NUMBERS or getattr(self, key) is None:
                raise UserError(f"[source] has {key!r}, which is no number of this file")

    @classmethod
    def load(cls, name: str | Path) -> Hardware:
        """By name (`configs/hardware/NAME.toml`), or from a TOML file of the same keys.

        Raises `UserError`, naming the file, for one that cannot be read, an unknown or missing key (with the
        known ones) and a bad value.
        """
        path = _find(name)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
            raise UserError(f"{path} is not TOML: {error}") from None
        if unknown := sorted(values.keys() - _KEYS):
            raise UserError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
        if missing := sorted(_REQUIRED - values.keys()):
            raise UserError(f"{path}: {missing[0]} is missing")
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def rates(self, n: int = 1, dtype: Literal["16-bit", "fp8"] = "16-bit") -> Rates:
        """Of ``n`` devices. ``UserError`` where their FLOP/s at ``dtype`` are not known."""
        tflops = self.tflops_fp8 if dtype == "fp8" else self.tflops_bf16 or self.tflops_fp16
        if tflops is None:
            keys = "tflops_fp8 is not" if dtype == "fp8" else "neither tflops_bf16 nor tflops_fp16 is"
            raise UserError(f"{self.name}: {keys} known")
        return Rates(n * 1e12 * tflops, n * 1e9 * self.bandwidth_gb_s)

    def known(self, key: str) -> float:
        """A number that must be known: ``UserError`` where it is not."""
        value: float | None = getattr(self, key)
        if value is None:
            raise UserError(f"{self.name}: {key} is not known")
        return value


_FIELDS = fields(Hardware)
_KEYS = {f.name for f in _FIELDS}
_NUMBERS = [f.name for f in _FIELDS if f.name not in ("name", "source")]
_REQUIRED = {f.name for f in _FIELDS if f.default is MISSING and f.default_factory is MISSING}


def hardware_names() -> list[str]:
    """Names that `Hardware.load` knows, sorted."""
    return sorted(path.stem for path in (configs_dir() / "hardware").glob("*.toml"))


def _find(name: str | Path) -> Path:
    path = Path(name).expanduser()
    if path.suffix == ".toml":
        return path
    if str(name).lower() in hardware_names():
        return configs_dir() / "hardware" / f"{str(name).lower()}.toml"
    raise UserError(f"no device {str(name)!r}; known: {', '.join(hardware_names())}, or give a .toml file")
