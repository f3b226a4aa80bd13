"""Changes of a job that runs, as operators ask for them: started anew, or with more or fewer workers.

Knows commands as words, and how many workers of each kind a job has; nothing of processes and HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from jaxlamina.job.roles import MOST_LOCAL_RANKS

MOST_S = 3600.0
_OF_WEIGHTS = ("--weights=", "--weights-revision=")


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``restart``: the same job anew, as after an update. ``scale``: with so many workers more, or fewer.
    ``stop_first``: the old one is ended before the new one is made ready. ``timeout``: seconds for that."""

    instruction: Literal["restart", "scale"]
    attention: int = 0
    model: int = 0
    prefill: int = 0
    stop_first: bool = False
    timeout: float = 600.0

    def why_not(self) -> str | None:
        """What is wrong with it."""
        n = (self.attention, self.model, self.prefill)
        if self.instruction == "scale" and not any(n):
            return "scale needs attention, model or prefill: how many workers more, or fewer"
        if self.instruction == "restart" and any(n):
            return f"restart changes no numbers of workers: use scale, or leave them out ({n})"
        if not 1 <= self.timeout <= MOST_S:
            return f"timeout={self.timeout:g} must be from 1 to {MOST_S:g} seconds"
        return None


@dataclass(frozen=True)
class Workers:
    """How many of each kind."""

    model: int
    attention: int
    prefill: int

    def after(self, change: Change) -> Workers:
        return Workers(
            self.model + change.model,
            self.attention + change.attention,
            self.prefill + change.prefill,
        )

    def __str__(self) -> str:
        prefill = f" and {self.prefill} prefill workers" if self.prefill else ""
        return f"DOP ({self.model}, {self.attention}){prefill}"


@dataclass(frozen=True)
class JobCommand:
    """What starts a job. ``workers``: of one over ranks, whose words are `launch.local`'s. ``has_starter``:
    another than this host's starts them (`--starter`)."""

    words: tuple[str, ...]
    workers: Workers | None = None
    has_starter: bool = False

    def and_more(self, *words: str) -> JobCommand:
        return replace(self, words=(*self.words, *words))

    def on_each_host(self, module: str, *changes: str) -> tuple[str, ...]:
        """Of a job over ranks what has each of them run a module's ``main(cluster, rank)``, with ``changes``
        to the cluster file's keys."""
        own = self.words[: self.words.index("--")]
        return (*own, *(word for change in changes for word in ("--set", change)), "--module", module)

    def of_weights(self, model: str, revision: str | None) -> JobCommand:
        """The same with another model's weights, of a command that ends with what its socket follows."""
        *kept, last = (word for word in self.words if not word.startswith(_OF_WEIGHTS))
        of_revision = [] if revision is None else [f"--weights-revision={revision}"]
        return replace(self, words=(*kept, f"--weights={model}", *of_revision, last))

    def after(self, change: Change) -> JobCommand:
        """``ValueError`` for a change that cannot be."""
        if self.has_starter and not change.stop_first:
            raise ValueError(
                f"two jobs cannot have one address for `control`: {change.instruction} with stop_first"
            )
        if change.instruction == "restart":
            return self
        if self.has_starter:
            raise ValueError("how many ranks there are is said in --starter: serve anew with another one")
        if self.workers is None:
            raise ValueError("one process has no workers to add: serve over ranks, by jaxlamina launch")
        new = self.workers.after(change)
        if new.model < 1 or min(new.attention, new.prefill) < 0:
            raise ValueError(f"{new} is no job: it has fewer than one model worker, or than none of others")
        if new.model + new.attention + new.prefill > MOST_LOCAL_RANKS:
            raise ValueError(f"{new} is more than {MOST_LOCAL_RANKS} processes of one host")
        of_them = [f'dop="{new.model},{new.attention}"', f"prefill_workers={new.prefill}"]
        told = [word for key in of_them for word in ("--set", key)]
        at = self.words.index("--")  # what launch.local is told last counts
        return replace(self, words=(*self.words[:at], *told, *self.words[at:]), workers=new)
