"""How long a tensor takes from rank to rank and back inside a program, by size and transport (Lamina 2025,
Figure 13).

Two ranks a transport on this host. All are up at once and take turns, so that a busy moment of the machine
strikes none alone. Knows nothing of how results are shown.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from jaxlamina.bench.exchange_ranks import RankError, Ranks
from jaxlamina.bench.lists import listed
from jaxlamina.bench.rounds import best_rate, record_of
from jaxlamina.errors import UserError
from jaxlamina.process.gpus import n_gpus
from jaxlamina.steps.exchange import Exchange

RANK = "jaxlamina.bench.exchange_rank"
SIZES_BYTES = tuple(4096 * 4**i for i in range(8))  # 4 KiB to 64 MiB
# What the xla transport aims at on GPUs of one host.
ROUND_TRIP_AIM_US = 20.0  # at 4 KiB
LINK_AIM = 0.7  # of the link, at 64 MiB
# A program that is timed runs about so long, so that how far apart its ranks begin does not count.
_RUN_S = 0.1
_TURNS = (4, 5000)
# NVLink's bytes a second of one GPU, one way: NVIDIA's data sheets give both ways together.
_NVLINK = {
    "A100": 300e9, "H20": 450e9, "H100": 450e9, "H200": 450e9, "GH200": 450e9, "B200": 900e9, "GB200": 900e9,
}  # fmt: skip
_NO_NVSWITCH = re.compile(
    "PCIe|NVL", re.IGNORECASE
)  # cards with a bridge to another one, or without any link
_COPIES = "one core's memory copies"


@dataclass(frozen=True)
class ExchangePeer:
    """A transport with environment variables of its own. ``label`` is how results name it."""

    label: str
    transport: str
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> ExchangePeer:
        """From ``mpi``, ``xla`` or ``xla:VAR=VALUE;VAR=VALUE``."""
        transport, _, rest = text.partition(":")
        if transport not in ("mpi", "xla"):
            raise UserError(
                f"--transport {text!r} must be mpi or xla, or one of them with variables: xla:VAR=VALUE"
            )
        pairs = [part.partition("=") for part in rest.split(";") if part]
        if any(not name or not equals for name, equals, _ in pairs):
            raise UserError(f"--transport {text!r}: what follows the colon must be VAR=VALUE, separated by ;")
        return cls(text, transport, tuple((name, value) for name, _, value in pairs))


@dataclass(frozen=True)
class Point:
    """Round trips of one size over one transport; times are of one round trip, in the order of the rounds."""

    peer: str
    size_bytes: int
    n_turns: int
    rounds_us: tuple[float, ...]

    @property
    def round_trip_us(self) -> float:
        return statistics.median(self.rounds_us)

    @property
    def bytes_per_s(self) -> float:
        """One way: the array's bytes over half a round trip."""
        return 2e6 * self.size_bytes / self.round_trip_us


@dataclass(frozen=True)
class ExchangeReport:
    """All points; ``limit_bytes_per_s`` is what bounds a transfer here, and ``limit`` says what that is."""

    devices: dict[str, list[str]]
    points: list[Point]
    n_rounds: int
    limit: str
    limit_bytes_per_s: float
    left_out: dict[str, str]

    @property
    def is_of_link(self) -> bool:
        """Whether the limit is a link's."""
        return self.limit != _COPIES

    @property
    def on_gpus(self) -> bool:
        return all(kind != "cpu" for kinds in self.devices.values() for kind in kinds)

    def aims(self) -> list[dict[str, Any]]:
        """What `xla` aims at between GPUs of one host, and what it did; none on other platforms, and of the
        limit only where it is a link's."""
        found = []
        for p in self.points if self.on_gpus else ():
            us, of_limit = p.round_trip_us, p.bytes_per_s / self.limit_bytes_per_s
            aims = {4096: (f"round trip of at most {ROUND_TRIP_AIM_US:g} µs", us, us <= ROUND_TRIP_AIM_US)}
            if self.is_of_link:
                aims[64 * 2**20] = f"at least {LINK_AIM:.0%} of the limit", of_limit, of_limit >= LINK_AIM
            if p.peer.partition(":")[0] == "xla" and p.size_bytes in aims:
                aim, value, met = aims[p.size_bytes]
                found.append(
                    {"peer": p.peer, "size_bytes": p.size_bytes, "aim": aim, "value": value, "met": met}
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        points = [record_of(p, "round_trip_us", "bytes_per_s") for p in self.points]
        return asdict(self) | {"points": points, "aims": self.aims()}


def installed(one_platform: bool = True) -> tuple[list[ExchangePeer], dict[str, str]]:
    """The transports that can run here, and why others cannot. ``one_platform``: both ranks have the same."""
    why = {} if one_platform else {"xla": "has one platform for all ranks"}
    if shutil.which("mpirun") is None:
        why["mpi"] = "no mpirun: apt-get install openmpi-bin libopenmpi-dev"
    elif importlib.util.find_spec("mpi4jax") is None:
        why["mpi"] = "mpi4jax is not installed: make mpi"
    return [ExchangePeer(name, name) for name in ("mpi", "xla") if name not in why], why


def platforms(text: str) -> tuple[str, str]:
    """Rank 0's and rank 1's platform from "auto", "cpu", "cuda" or "cuda,cpu"; auto is GPUs where there are
    two."""
    if text == "auto":
        text = "cuda" if n_gpus(os.environ) >= 2 else "cpu"
    parts = text.split(",")
    if len(parts) > 2 or not set(parts) <= {"cpu", "cuda"}:
        raise UserError(f"--platform {text!r} must be auto, cpu, cuda, or one for each rank: cuda,cpu")
    return parts[0], parts[-1]


def measure(
    peers: Sequence[ExchangePeer],
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    *,
    n_rounds: int = 7,
    platform: tuple[str, str] = ("cpu", "cpu"),
    link_bytes_per_s: float | None = None,
    left_out: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> ExchangeReport:
    """Median round trips of ``n_rounds`` interleaved rounds. Sizes are multiples of 4 bytes.

    link_bytes_per_s: the limit to compare with, one way; else NVLink's of the GPUs, or how fast a core copies
    memory. A peer that fails is left out with its reason; `RankError` if none is left.
    """
    if not peers or n_rounds < 1 or any(size < 4 or size % 4 for size in sizes_bytes):
        raise UserError(
            f"{peers=}, {n_rounds=} and {sizes_bytes=} must be some, at least 1, and multiples of 4"
        )
    if len(set(platform)) > 1 and any(p.transport == "xla" for p in peers):
        raise UserError("transport xla has one platform for all ranks; two are for --transport mpi")
    out = dict(left_out or {})
    with contextlib.ExitStack() as stack:
        running: dict[ExchangePeer, _Running] = {}
        for peer in peers:
            on_progress(f"{peer.label}: starting two ranks")
            try:
                ranks = Ranks(peer.transport, 2, RANK, platforms=platform, environment=dict(peer.environment))
                running[peer] = _Running(peer, stack.enter_context(ranks), sizes_bytes, on_progress)
            except RankError as error:
                out[peer.label] = _brief(error)
        limit, rate = _limit(link_bytes_per_s, [kind for r in running.values() for kind in r.ranks.devices])
        for i in range(n_rounds):
            for size in sizes_bytes:
                on_progress(f"round {i + 1} of {n_rounds}: {size_text(size)}")
                for peer in list(running):
                    try:
                        running[peer].round(size)
                    except RankError as error:
                        out[peer.label] = _brief(error)
                        del running[peer]
        if not running:
            raise RankError("; ".join(f"{label}: {why}" for label, why in out.items()))
        points = [r.point(size) for size in sizes_bytes for r in running.values()]
        devices = {peer.label: r.ranks.devices for peer, r in running.items()}
    return ExchangeReport(devices, points, n_rounds, limit, rate, out)


class _Running:
    """A peer's two ranks with all programs compiled, and the times so far."""

    def __init__(
        self, peer: ExchangePeer, ranks: Ranks, sizes_bytes: Sequence[int], on_progress: Callable[[str], None]
    ) -> None:
        self.peer, self.ranks = peer, ranks
        self._turns: dict[int, int] = {}
        self._times_us: dict[int, list[float]] = {size: [] for size in sizes_bytes}
        for size in sizes_bytes:
            on_progress(f"{peer.label}: compiling {size_text(size)}")
            self._find_turns(size)

    def round(self, size: int) -> None:
        self._times_us[size].append(1e6 * self._seconds(size) / self._turns[size])

    def point(self, size: int) -> Point:
        return Point(self.peer.label, size, self._turns[size], tuple(self._times_us[size]))

    def _find_turns(self, size: int) -> None:
        """As many as take about `_RUN_S`: guessed from fewer, since a short run is mostly how far apart ranks
        begin."""
        n_turns, wanted = 0, _TURNS[0]
        while wanted > 2 * n_turns:
            n_turns = wanted
            self._prepare(size, n_turns)
            self._seconds(size)  # the first run makes connections
            a_turn = self._seconds(size) / n_turns
            wanted = min(int(_RUN_S / a_turn), 30 * n_turns, _TURNS[1])

    def _prepare(self, size: int, n_turns: int) -> None:
        from jaxlamina.transports.exchanges import first_difference

        found = self.ranks.ask({"do": "prepare", "size_bytes": size, "n_turns": n_turns})
        lists = {r: msgspec.convert(f["exchanges"], tuple[Exchange, ...]) for r, f in enumerate(found)}
        line = first_difference(lists)
        if line or any(f["n_exchanges"] != 2 * n_turns for f in found):
            raise RankError(line or f"the programs must have {2 * n_turns} exchanges: {found}")
        self._turns[size] = n_turns

    def _seconds(self, size: int) -> float:
        found = self.ranks.ask({"do": "time", "size_bytes": size})
        if not all(f["right"] for f in found):
            raise RankError(f"what came back was not what was sent, at {size_text(size)}")
        return found[0]["seconds"]


def _brief(error: RankError) -> str:
    """Its first line, and the last of what the ranks wrote."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]}: {lines[-1].strip()}"


def _limit(given: float | None, devices: Sequence[str]) -> tuple[str, float]:
    if given is not None:
        return "the link, as given", given
    name, *others = {_linked(kind) for kind in devices} or {None}
    if name is not None and not others:
        return f"NVLink of a {name}, one way", _NVLINK[name]
    return _COPIES, _copies_bytes_per_s()


def _linked(kind: str) -> str | None:
    """Of `_NVLINK`, the GPU that a device's kind names."""
    words = [] if _NO_NVSWITCH.search(kind) else re.split(r"[\s-]", kind)
    return next((name for name in _NVLINK if name in words), None)


def _copies_bytes_per_s() -> float:
    """How fast one thread copies memory."""
    n_bytes = 64 * 2**20
    source, to = np.ones(n_bytes, np.uint8), np.empty(n_bytes, np.uint8)
    return best_rate(lambda: np.copyto(to, source), n_bytes, passes=5)


def size_text(n_bytes: int) -> str:
    """4096 -> "4 KiB"."""
    for unit, n in (("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= n and n_bytes % n == 0:
            return f"{n_bytes // n} {unit}"
    return f"{n_bytes} B"


def parse_sizes(text: str) -> list[int]:
    """From "4K,1M,64M" or bytes. Raises `UserError`."""
    what = "multiples of 4 bytes separated by commas, e.g. 4K,1M,64M"
    return listed("--sizes", text, _size, what)


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([KkMm]?)(?:i?B)?\s*", text)
    n = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if n < 4 or n % 4:
        raise ValueError(text)
    return n
