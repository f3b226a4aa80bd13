"""Terms and links that were measured on a device, as a file of `configs/calibrations`, or one that
`jaxlamina bench calibrate` has written.

A device without a file of its own has the terms of the nearest one that has, scaled by data sheets'
ratios; `Terms.scaled_from` says so. Knows no model and no formula.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.models.config_files import configs_dir
from jaxlamina.planner.hardware import Hardware, hardware_names
from jaxlamina.planner.terms import LinkTerms, Terms

_GIVEN = ("hardware", "scaled_from")
TERM_NAMES = tuple(f.name for f in fields(Terms) if f.name not in _GIVEN)
_IN_HOST = ("memory", "nccl")
_IN_PROCESS = "sharded"
_KEYS = {"hardware", "device", "versions", "date", "points", "terms", "links"}


@dataclass(frozen=True)
class DeviceCalibration:
    """``links``: by how messages go ("memory", "nccl", "gloo", "mpi"), and "sharded" for XLA's sums over
    devices of one process. ``points``: of the measurements that they were fitted to. ``device``, ``versions``
    and ``date``: of what they were measured on."""

    terms: Terms
    links: Mapping[str, LinkTerms]
    device: str
    versions: Mapping[str, str]
    date: str
    points: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> DeviceCalibration:
        """``UserError``, naming the file, for one that cannot be read, or is not what `save` writes."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path} is not JSON: {error}") from None
        try:
            return _from(found)
        except UserError as error:
            raise UserError(f"{path} is no calibration: {error}") from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise UserError(f"{path} is no calibration: {error!r}") from None

    def to_dict(self) -> dict[str, Any]:
        """What `load` reads. A device of `configs/hardware` is named, another one written out."""
        known = {Hardware.load(name).name: name for name in hardware_names()}
        hardware: Any = known.get(self.terms.hardware.name)
        if hardware is None:
            given = asdict(self.terms.hardware)
            hardware = {key: value for key, value in given.items() if value is not None}
        numbers = {name: getattr(self.terms, name) for name in TERM_NAMES}
        return {
            "hardware": hardware,
            "device": self.device,
            "versions": dict(self.versions),
            "date": self.date,
            "points": list(self.points),
            "terms": {name: value for name, value in numbers.items() if math.isfinite(value)},
            "links": {name: link._asdict() for name, link in self.links.items()},
        }

    def save(self, path: Path) -> None:
        """``UserError`` where it cannot be written."""
        try:
            path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def scaled(self, hardware: Hardware) -> DeviceCalibration:
        """As `Terms.scaled`; a link's bytes go with the chips' links where both data sheets have them."""
        own, other = self.terms.hardware.chip_link_gb_s, hardware.chip_link_gb_s
        ratio = other / own if own and other else 1.0
        links = {name: link._replace(bytes_s=ratio * link.bytes_s) for name, link in self.links.items()}
        return replace(self, terms=self.terms.scaled(hardware), links=links)

    @property
    def in_host(self) -> LinkTerms | None:
        """Between two of these devices in a host: by their memory, else by collectives. None: not measured,
        or on another kind of device, and this one's data sheet has no link."""
        if self.terms.scaled_from is not None and self.terms.hardware.chip_link_gb_s is None:
            return None
        return next((self.links[name] for name in _IN_HOST if name in self.links), None)

    @property
    def in_process(self) -> LinkTerms | None:
        """By which devices of one process that share out a model sum (`jaxlamina.run.sharded`): as measured,
        else as `in_host`."""
        return None if self.in_host is None else self.links.get(_IN_PROCESS, self.in_host)

    @property
    def origin(self) -> str:
        """In words, where the terms are from."""
        name, other = self.terms.hardware.name, self.terms.scaled_from
        where = f"{name}: measured on {self.device}" if other is None else f"{name}: scaled from {other}"
        return f"{where} ({self.date})"

    def link(self, name: str) -> LinkTerms:
        """``UserError`` for one that was not measured."""
        if name not in self.links:
            raise UserError(
                f"no messages by {name!r} were measured on {self.device}; "
                f"measured: {', '.join(self.links) or 'none'}"
            )
        return self.links[name]


def calibration_names() -> list[str]:
    """Devices of `configs/calibrations`, sorted."""
    return sorted(path.stem for path in (configs_dir() / "calibrations").glob("*.json"))


def for_device(name: str, given: DeviceCalibration | None = None) -> DeviceCalibration:
    """Of a device by its name in `configs/hardware` or its file: its own calibration, else the nearest one,
    scaled. Nearest is by the data sheets' bandwidth and FLOP/s, as ratios. ``given``: one more than the
    package has, and in place of the package's of the same device. ``UserError`` for an unknown device."""
    hardware = Hardware.load(name)
    found = [*([] if given is None else [given]), *map(_of_package, calibration_names())]
    if not found:
        raise UserError("configs/calibrations has no calibration to scale from")
    nearest = min(found, key=lambda one: _distance(one.terms.hardware, hardware))  # of two the first
    if nearest.terms.hardware.name == hardware.name:
        return replace(nearest, terms=replace(nearest.terms, hardware=hardware))
    return nearest.scaled(hardware)


@cache
def _of_package(name: str) -> DeviceCalibration:
    return DeviceCalibration.load(configs_dir() / "calibrations" / f"{name}.json")


def _distance(a: Hardware, b: Hardware) -> tuple[bool, float]:
    ratios = zip(a.rates(), b.rates(), strict=True)
    return a.name != b.name, sum(abs(math.log(x / y)) for x, y in ratios)


def _from(found: Any) -> DeviceCalibration:
    if not isinstance(found, dict) or found.keys() != _KEYS:
        raise UserError(f"its keys must be {', '.join(sorted(_KEYS))}")
    given = found["hardware"]
    hardware = Hardware(**given) if isinstance(given, dict) else Hardware.load(given)
    if unknown := sorted(found["terms"].keys() - set(TERM_NAMES)):
        raise UserError(f"unknown term {unknown[0]!r}; known: {', '.join(TERM_NAMES)}")
    numbers: dict[str, Any] = {
        name: value if name == "product_tile" else float(value) for name, value in found["terms"].items()
    }
    terms = Terms(hardware, **numbers)
    links = {
        name: LinkTerms(
            float(link["fixed_s"]),
            float(link["bytes_s"]),
            link["is_rendezvous"],
            link.get("by_nic", False),
        )
        for name, link in found["links"].items()
    }
    for name, link in links.items():
        if not (0 <= link.fixed_s < math.inf and 0 < link.bytes_s < math.inf):
            raise UserError(f"link {name!r} must have fixed_s of at least 0 and bytes_s above 0")
        if not all(isinstance(x, bool) for x in (link.is_rendezvous, link.by_nic)):
            raise UserError(f"link {name!r}: is_rendezvous and by_nic must be true or false")
    texts = (found["device"], found["date"], *found["versions"].values(), *found["points"])
    if not all(isinstance(text, str) for text in texts):
        raise UserError("device, date, versions and points must be texts")
    return DeviceCalibration(
        terms, links, found["device"], dict(found["versions"]), found["date"], tuple(found["points"])
    )
