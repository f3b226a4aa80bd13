"""How many KV slots running requests will come to want: what admission leaves free for them.

Pure policy on numbers. A newcomer for whom there is room now, and for whose growth there is none, is thrown
out again, or throws another out, and its prompt is computed twice. If every request wrote ``max_tokens``,
what is wanted at most would be known; most end before. So the share of ``max_tokens`` that others have
written stands for what these will write (after the past-future scheduler of Gong et al., ASPLOS 2025, who
draw lengths from those of requests that have ended). Where it is too low, requests give way, as without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

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

    def of(self, requests: Sequence[Request]) -> Int64[np.ndarray, " n"]:
        """Slots that each is expected to take after those that it has, or will start with: 1 at least. The
        last token takes none."""
        left = np.array([request.n_tokens_left - 1 for request in requests])
        n = np.ceil(self.share * left).astype(np.int64)
        if self._fixed is None and not self._n_seen:  # a chat's max_tokens may be all that the model can
            n = np.minimum(n, _FIRST_TOKENS)
        return np.maximum(1, n)


def most_wanted(to_come: Int64[np.ndarray, " n"], held: Int64[np.ndarray, " n"]) -> int:
    """Slots that will be wanted at once beside those in use, by rows that all take one a step, each as many
    as are ``to_come``, and gives back those and the ``held`` ones at its end. The most are wanted when one of
    them is about to end."""
    if not len(to_come):
        return 0
    order = np.lexsort((held, to_come))[::-1]
    to_come, held = to_come[order], held[order]
    # Those before one in this order run on; those after it have ended, and given back all they took.
    given_back = held.sum() - np.cumsum(held)
    return max(0, int((np.arange(1, len(order) + 1) * to_come - given_back).max()))
