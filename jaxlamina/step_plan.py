"""What one step runs, as the scheduler says it and the engine does it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxlamina.kv import Move
from jaxlamina.request import Request


@dataclass(frozen=True)
class StepPlan:
    """What one step runs: first the copies of KV to the host or back, then ``decodes`` oldest first, then ``prefills``.

    ``preempted`` lost their slots. A prefill may start from KV that one before it computes; ``spans`` has for each from
    which position to which it goes, and one that does not reach the last token gives none yet. ``moves_again``: KV that
    came back to the device and that others on the host still wait for; it must go to the same host slots again where
    taking it from the host empties them.
    """

    prefills: tuple[Request, ...]
    decodes: tuple[Request, ...]
    preempted: tuple[Request, ...]
    moves_out: tuple[Move, ...] = ()
    moves_in: tuple[Move, ...] = ()
    moves_again: tuple[Move, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.decodes + self.prefills
