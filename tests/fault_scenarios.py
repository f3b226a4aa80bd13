"""What a scenario of faults is: plain data, as tests/faults/*.toml have it and tests/faults_product.py makes it.

tests/faults/README.md says what each field means. Knows nothing of processes.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

FOLDER = Path(__file__).parent / "faults"


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that happens, once all that it waits for is there."""

    # What it waits for.
    after_tokens: int = 0
    after_spares: int = 0
    after_ready: int = 0
    after_recoveries: int = 0
    during: Literal["", "prompts", "compiling", "recovering", "scaling"] = ""
    # What happens.
    ask: bool = False
    pause: bool = False
    resume: bool = False
    apply: dict[str, Any] = {}
    status: int | None = 200
    whom: str = ""
    signal: str = ""
    spin_engine: bool = False
    no_memory: bool = False
    full_disk: bool = False
    cut: bool = False
    for_s: float = 0.0
    lift: bool = False
    start: bool = False

    @property
    def is_for_streams(self) -> bool:
        """Whether it waits until all streams have begun."""
        return not (self.during or self.resume or self.lift or self.start)


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be true afterwards."""

    recoveries: int
    recoveries_at_most: int = 0  # 0: as many as ``recoveries``
    cause: str = ""
    causes: tuple[str, ...] = ()
    recomputed_at_most: int | None = None
    streams_may_end: bool = False
    drawn_may_differ: bool = False


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: tuple[str, ...]
    options: tuple[str, ...]
    events: tuple[Event, ...]
    check: Check
    slow: bool = False
    mpi: bool = False
    hosts: tuple[int, ...] = ()  # ranks on each, where there are two
    compiles: bool = False  # no program is on disk
    full_disk: bool = False  # the journal is on a small disk of its own
    n_tokens: int = 0  # of long answers; 0: as many as `supervised.N`

    @property
    def restarts_supervisor(self) -> bool:
        return any(event.start for event in self.events)


def read(path: Path) -> Scenario:
    return msgspec.convert(tomllib.loads(path.read_text()), Scenario)


SCENARIOS = {path.stem: read(path) for path in sorted(FOLDER.glob("*.toml"))}
