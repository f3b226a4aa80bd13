"""KV that is kept beside the pools, by content: what running requests have computed is copied there, and a
prompt goes on after what is there of it.

So a prefix is found again when the pools have had no room for it, and after the end of the process where the
store outlives it. Knows requests, and an executor that copies; nothing of scheduling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlamina.engine.request import Request
from jaxlamina.kv import Move
from jaxlamina.kv.kept import EVERY_STEPS, NO_DIGESTS, Digests, KeptPrefixes
from jaxlamina.run.executor import Executor

_MOST_BEHIND_BYTES = 2**28  # of KV that is to be kept and not written yet
_TRY_AGAIN_S = 60.0  # after memory for kept KV was full


class Keeping:
    """``find`` for a newcomer, ``bring`` what was found before the step that goes on after it, ``keep`` after
    each step."""

    def __init__(
        self, executor: Executor, prefixes: KeptPrefixes, *, min_tokens: int, bytes_per_token: int
    ) -> None:
        self._executor, self._min_tokens, self._bytes_per_token = executor, min_tokens, bytes_per_token
        self._n_brought, self._brought_s = 0, 0.0
        self._most_behind = max(1, _MOST_BEHIND_BYTES // bytes_per_token)
        self.prefixes = prefixes
        self._n_steps, self._is_time = 0, False
        self._lost_marks: list[np.ndarray] = []  # of tokens that running requests may have
        self._try_again_s = math.inf

    def find(self, request: Request, n_cached: int) -> np.ndarray:
        """Places of its tokens after the first ``n_cached``; the last is left out: it must be computed."""
        nothing = np.empty(0, np.int32)
        if request.scores_prompt or not self.prefixes.n_used:
            return nothing
        digests = self._digests(request, request.n_known)
        wanted = digests.part(n_cached, request.n_known - 1)
        found = self.prefixes.find(wanted)
        if not n_cached + len(found) >= self._min_tokens <= len(found):
            return nothing
        # What is being written may find no memory. Until that is known nothing can be said to be kept.
        return self.prefixes.find(wanted) if self._lose(wait=True) else found

    def bring(self, moves: Sequence[Move]) -> None:
        """``source``: places, ``target``: slots."""
        if not moves:
            return
        places, slots = (np.concatenate(x) for x in zip(*((m.source, m.target) for m in moves), strict=True))
        began_s = time.perf_counter()
        self._executor.bring(places, slots)
        self._brought_s += time.perf_counter() - began_s
        self._n_brought += len(slots)

    def keep(self, running: Sequence[Request]) -> None:
        """What of them is in the pools and not kept yet; while keepers are far behind, so much of it that no
        step waits for them."""
        self._lose(wait=False)
        self._go_back(running)
        if time.monotonic() >= self._try_again_s:
            self.prefixes.try_again()
            self._try_again_s = math.inf
        self._n_steps += 1
        is_time = self._is_time = self._is_time or self._n_steps % EVERY_STEPS == 0
        left = self._most_behind - self._executor.n_behind
        slots, places, marks = [], [], []
        for request in running:
            if left <= 0:
                break
            start, stop = request.n_kept, min(request.n_stored, request.n_kept + left)
            is_new = request.n_computed is None and start < len(request.prompt_token_ids) - 1
            if request.lockstep or stop <= start or not (is_time or is_new):
                continue
            of = request.slots.view()[start:stop]
            digests = self._digests(request, stop).part(start, stop)
            kept = self.prefixes.add(digests, self._executor.keepers_of(of))
            request.n_kept = stop
            left -= stop - start
            slots.append(of[kept.which])
            places.append(kept.places)
            marks.append(kept.marks)
        else:
            self._is_time = False
        if sum(map(len, slots)):
            self._executor.keep(*map(np.concatenate, (slots, places, marks)))

    def _lose(self, *, wait: bool) -> bool:
        """Forgets what keepers had no memory for, if anything."""
        lost = self._executor.take_lost(wait=wait)
        if len(lost.places):
            self.prefixes.lose(lost)
            self._lost_marks.append(lost.marks)
            self._try_again_s = time.monotonic() + _TRY_AGAIN_S
        return len(lost.places) > 0

    def _go_back(self, running: Sequence[Request]) -> None:
        """What follows lost tokens is not found. They are kept after all, in place of the oldest ones: where
        those are there is memory."""
        if not self._lost_marks:
            return
        marks, self._lost_marks = np.concatenate(self._lost_marks), []
        for request in running:
            is_lost = np.isin(request.digests.low[: request.n_kept], marks)
            request.n_kept = int(is_lost.argmax()) if is_lost.any() else request.n_kept

    @staticmethod
    def begin_anew(requests: Iterable[Request]) -> None:
        """What was kept of ``requests`` is not where others find it any more."""
        for request in requests:
            request.digests, request.n_kept = NO_DIGESTS, 0

    def stats(self) -> dict[str, float]:
        prefixes = self.prefixes
        return {
            "kept_kv_slots": prefixes.n_places,
            "kept_kv_slots_used": prefixes.n_used,
            "kept_kv_behind": self._executor.n_behind,
            "n_kept_tokens": prefixes.n_kept_tokens,
            "n_kept_lost_tokens": prefixes.n_lost_tokens,
            "n_kept_hit_tokens": self._n_brought,
            "kept_kv_brought_bytes": self._n_brought * self._bytes_per_token,
            "kept_kv_brought_s": self._brought_s,
        }

    def _digests(self, request: Request, n: int) -> Digests:
        """Of a request's first n tokens at least; they are made once."""
        known = request.digests
        if len(known) < n:
            more = self.prefixes.digests(request.tokens_between(len(known), n), known.last)
            request.digests = known.with_more(more)
        return request.digests
