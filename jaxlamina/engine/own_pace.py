"""Prompts' chunks that prefill workers compute at their own pace: which worker is at what, and what it can
begin with next.

Pure policy on plain data, as the scheduler is, whose steps take in what is done. Knows requests and workers;
no slot, no clock and no device.
"""

from __future__ import annotations

from collections.abc import KeysView

from jaxlamina.engine.request import Request
from jaxlamina.engine.room import SCORED_CHUNK
from jaxlamina.engine.scheduled_step import OwnChunk


class ChunksAtOwnPace:
    """``n_tokens``: of a prompt at once; 0: prefill workers keep step with those who decode."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        # By worker, what it computes, or has computed.
        self._at_work: dict[int, OwnChunk] = {}
        self._done: set[int] = set()  # workers that have
        # By worker, whose tokens it has computed last, in which of its lives, and how many.
        self._last_computed: dict[int, tuple[Request, int, int]] = {}

    @property
    def workers(self) -> KeysView[int]:
        """Those at work, or done with what no step has taken in."""
        return self._at_work.keys()

    @property
    def is_awaited(self) -> bool:
        """Whether a worker computes something that has not been said to be done."""
        return bool(self._at_work.keys() - self._done)

    def computed(self, worker: int) -> None:
        """A worker is done with its chunk: the next step takes it in."""
        self._done.add(worker)

    def take(self) -> list[OwnChunk]:
        """What is done, but for what nobody wants any more."""
        found: list[OwnChunk] = []
        for worker in sorted(self._done):
            chunk = self._at_work.pop(worker)
            request, (_, stop) = chunk.request, chunk.span
            if request.chunk is chunk:  # it has not ended, nor given way
                request.chunk = None
                self._last_computed[worker] = request, request.n_preemptions, stop
                found.append(chunk)
        self._done.clear()
        return found

    def first(self, request: Request) -> int | None:
        """From which position on its worker can compute the next chunk at its own pace: it has all tokens
        before that. None: it cannot. Where a beginning is stored on attention workers alone, it computes that
        again, if it is less than a chunk."""
        start = request.n_computed
        if not self._n_tokens or start is None or request.worker is None:
            return None
        if self._last_computed.get(request.worker) == (request, request.n_preemptions, start):
            return start
        is_short = start < self._n_tokens and not request.scores_prompt
        return 0 if start == 0 or is_short else None

    def begin(self, request: Request) -> OwnChunk:
        start, first = request.n_computed, self.first(request)
        assert start is not None and first is not None and request.worker is not None
        most = min(self._n_tokens, SCORED_CHUNK) if request.scores_prompt else self._n_tokens
        self._last_computed.pop(request.worker, None)  # its memory holds something else from now on
        chunk = OwnChunk(request, (start, min(request.n_tokens, first + most)), first)
        request.chunk = self._at_work[request.worker] = chunk
        return chunk
