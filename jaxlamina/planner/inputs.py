"""From names to what the planner reckons with: devices with what they reach in this runtime, links, models,
traces and SLOs as a user writes them.

A device's terms are those of its calibration, or of the nearest one's, scaled by data sheets; `terms_note`
says which.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxlamina.errors import UserError
from jaxlamina.models.config_files import find_model, model_names
from jaxlamina.planner import calibration, traces
from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.costs import LinkTerms
from jaxlamina.planner.hardware import Hardware, hardware_names
from jaxlamina.planner.question import MOST_IN_HOST, Device
from jaxlamina.planner.workload import Workload

# Between hosts, one way: NCCL over RoCE of 400 Gbit/s, 66.6 µs there and back and 35.5 GB/s (Lamina 2025,
# §6.3).
_NETWORK_FIXED_S, _NETWORK_SHARE = 33.3e-6, 35.5 / 50
_NETWORK_GBIT_S = 400.0  # where a data sheet says none


@dataclass(frozen=True)
class Linked:
    """A link, and one line on where its numbers are from."""

    link: LinkTerms
    note: str


def device(name: str, usd_h: float | None = None, given: DeviceCalibration | None = None) -> Device:
    """By name or TOML file; ``usd_h`` in place of the file's price. ``given``: as `calibration.for_device`
    takes it. ``UserError`` where its FLOP/s are not known."""
    found = calibration.for_device(name, given)
    price = found.terms.hardware.price_usd_h if usd_h is None else usd_h
    return Device(found.terms, price, found.in_host, found.origin, found.in_process)


def terms_note(*devices: Device) -> str:
    """Where the devices' terms are from."""
    return "; ".join(dict.fromkeys(device.origin for device in devices))


def in_one_host(one: Device, other: Device, n: int) -> bool:
    """Whether so many devices together are taken to be in one host, where nobody says so: if they are of one
    kind, and no more than a host has."""
    return one.name == other.name and n <= MOST_IN_HOST


def link_between(
    one: Device,
    other: Device,
    gb_s: float | None = None,
    us: float | None = None,
    same_host: bool = False,
) -> Linked:
    """What joins two devices: as given (``gb_s`` one way, ``us`` for an empty message), else within a host as
    the slower device's calibration has it, and between hosts by NCCL, whose ends meet."""
    if same_host and one.in_host and other.in_host:
        found = min(one.in_host, other.in_host, key=lambda link: link.bytes_s)
        note = "within a host, as it was calibrated"
    else:
        hardware = [device.terms.hardware for device in (one, other)]
        gbit_s = min(h.network_gbit_s or _NETWORK_GBIT_S for h in hardware)
        found = LinkTerms(_NETWORK_FIXED_S, _NETWORK_SHARE * gbit_s / 8 * 1e9, is_rendezvous=True)
        missing = [h.name for h in hardware if not h.network_gbit_s]
        assumed = f"; {' and '.join(dict.fromkeys(missing))}: {gbit_s:g} Gbit/s is assumed" if missing else ""
        note = f"NCCL on a network of {gbit_s:g} Gbit/s, as Lamina 2025 (§6.3) measured it{assumed}"
    check_link(gb_s, us)
    link = found._replace(
        fixed_s=found.fixed_s if us is None else us / 1e6,
        bytes_s=found.bytes_s if gb_s is None else gb_s * 1e9,
    )
    if gb_s is not None:
        note = "as given" if us is not None else f"as given; an empty message: {note}"
    return Linked(
        link, f"link of {link.bytes_s / 1e9:.1f} GB/s, {1e6 * link.fixed_s:.1f} µs a message: {note}"
    )


def check_link(gb_s: float | None, us: float | None) -> None:
    """``UserError`` for what no link has."""
    if gb_s is not None and not 1e-3 <= gb_s <= 1e6:
        raise UserError(f"link_gb_s={gb_s:g} must be within 0.001 … 1,000,000")
    if us is not None and not 0 <= us <= 1e6:
        raise UserError(f"link_us={us:g} must be within 0 … 1,000,000")


def model_name(name: str) -> str:
    """A model's name as `configs/models` has it, where it is written as the papers do (LLaMA3-70B); others as
    they are."""
    if find_model(name) is not None:
        return name
    same = [known for known in model_names() if _plain(known) == _plain(name)]
    return same[0] if len(same) == 1 else name


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def workload(trace: str, context: float | None = None) -> Workload:
    """Of a trace that comes with the package or a file of one, at another mean context if ``context`` says
    so."""
    found = Workload.of_trace(trace, traces.named(trace))
    return found if context is None else found.at_context(context)


def slo_s(text: str) -> float:
    """ "tpot=100": the 99th percentile of TPOT, at most so many milliseconds."""
    name, _, value = text.partition("=")
    if name.strip() != "tpot":
        raise UserError(f"--slo {text!r} must be tpot=MILLISECONDS, such as tpot=100; nothing else is known")
    return tpot_s(value, f"--slo {text!r}")


def tpot_s(text: str, said: str) -> float:
    """Of milliseconds; ``said``: as a user wrote them, for an error."""
    number = _number(text)
    if number is None:
        raise UserError(f"{said}: {text!r} must be a number of milliseconds above 0")
    return number / 1e3


def prices(words: list[str]) -> dict[str, float]:
    """ "h100=3.49" and the like: dollars an hour of one device, by name."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        number = _number(value)
        if number is None or not 1e-3 <= number <= 1e6:
            raise UserError(
                f"--price {word!r} must be DEVICE=DOLLARS, an hour of one, such as h100=3.49; within 0.001 … "
                "1,000,000"
            )
        found[known(name)] = number
    return found


def counts(text: str) -> dict[str, int]:
    """ "h100=2,h20=4": devices at hand, by name, in this order."""
    found: dict[str, int] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if not re.fullmatch(r"\s*[1-9]\d{0,5}\s*", value):
            raise UserError(f"--devices {text!r} must be names with numbers, such as h100=2,h20=4")
        if (device := known(name)) in found:
            raise UserError(f"--devices {text!r} names {device} twice: say how many there are in all")
        found[device] = int(value)
    return found


def matching(kind: str) -> str | None:
    """The device whose name in `configs/hardware` has only words that JAX's name has ("NVIDIA H100 80GB HBM3"
    → "h100"), of several the longest; None for none."""
    words = kind.lower().replace(" lite", "e").replace("-", " ").split()  # "TPU v5 lite" is a v5e
    fits = [name for name in hardware_names() if set(name.split("-")) <= {*words, *_sizes(words)}]
    return max(fits, key=len, default=None)


def _sizes(words: list[str]) -> set[str]:
    """ "80GB" as files' names have it: "80g"."""
    return {word.removesuffix("b") for word in words if word.endswith("gb")}


def known(name: str) -> str:
    """A device's name as in `configs/hardware`, or a file of its own. ``UserError`` for one that is not
    known."""
    name = name.strip()
    Hardware.load(name)  # or an error that names the known ones
    return name if name.endswith(".toml") else name.lower()


def _number(text: str) -> float | None:
    """A finite number above 0, else None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
