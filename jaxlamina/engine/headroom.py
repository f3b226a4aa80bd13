"""How many KV slots running requests will come to want: what admission leaves free for them.

Pure policy on numbers. A newcomer for whom there is room now, and for whose growth there is none, is thrown
out again, or throws another out, and its prompt is computed twice. If every request wrote ``max_tokens``,
what is wanted at most would be known; most end before. So the share of ``max_tokens`` that others have
written stands for what these will write (after the past-future scheduler of Gong et al., ASPLOS 2025, who
draw lengths from those of requests that have ended). Where it is too low, requests give way, as without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxlamina.options import EngineOptions, definitions

if TYPE_CHECKING:
    from jaxlamina.engine.request import Request

_FIRST, _FIRST_TOKENS = 0.5, 512  # the share before any request has ended, and of how many tokens at most
_MEMORY = 64  # requests: those longer ago count for less and less


class Headroom:
    """The share of what requests may still write that they are expected to: ``fixed`` (0: only the next token
    is, 1: all), or for None as others have ended."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = definitions(EngineOptions)["kv_headroom"].checked(fixed)
        self._learned, self._n_seen = _FIRST, 0

    @property
    def share(self) -> float:
        return self._learned if self._fixed is None else self._fixed

    def ended(self, request: Request) -> None:
        """Learns from one that runs no more, however it ended."""
        if request.n_generated:
            self._n_seen = min(_MEMORY, self._n_seen + 1)
            self._learned += (request.n_generated / request.max_tokens - self._learned) / self._n_seen

    def of(self, request: Request) -> int:
        """Slots that a request is expected to take after those that it has, or will start with: 1 at least.
        The last token takes none."""
        n = math.ceil(self.share * (request.max_tokens - request.n_generated - 1))
        if self._fixed is None and not self._n_seen:  # a chat's max_tokens may be all that the model can
            n = min(n, _FIRST_TOKENS)
        return max(1, n)


def most_wanted(rows: Iterable[tuple[int, int]]) -> int:
    """Slots that will be wanted at once beside those in use, for rows of ``(slots to come, slots given back
    at its end)`` that all take one a step. The most are wanted when one of them is about to end."""
    ordered = sorted(rows, reverse=True)
    held_in_all = sum(held for _, held in ordered)
    most = held = 0
    for n_longer, (to_come, own) in enumerate(ordered):
        held += own
        # Those before it in this order run on; those after it have ended, and given back all they took.
        most = max(most, (n_longer + 1) * to_come - (held_in_all - held))
    return most
