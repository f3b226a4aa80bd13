"""KV that is kept beside the pools, by content: what running requests have computed is copied there, and a
prompt goes on after what is there of it.

So a prefix is found again when the pools have had no room for it, and after the end of the process where the
store outlives it. Knows requests, and an executor that copies; nothing of scheduling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from jaxlamina.engine.request import Request
from jaxlamina.kv import Move
from jaxlamina.kv.kept import EVERY_STEPS, NO_DIGESTS, NOTHING_KEPT, Digests, KeptPrefixes
from jaxlamina.run.executor import Executor

# Of KV that is to be kept and not written yet: a part of a worker's KV, so that what a step of prompts stores
# is handed over after it, as far as devices surely have memory for it beside their KV.
_LEAST_BEHIND_BYTES, _MOST_BEHIND_BYTES, _PART_BEHIND = 2**28, 2**30, 16
_LOOK_STEPS = 4  # so that not all are kept after one step, and those that are are copied together
_TRY_AGAIN_S = 60.0  # after memory for kept KV was full

KEPT_TOTALS = (
    *("n_kept_tokens", "n_kept_lost_tokens", "n_kept_hit_tokens"),
    *("kept_kv_brought_bytes", "kept_kv_brought_s"),
)
"""Of `Keeping.stats`, what only grows."""


class Keeping:
    """``find`` for a newcomer, ``bring`` what was found before the step that goes on after it, ``keep`` after
    each step."""

    def __init__(
        self,
        executor: Executor,
        prefixes: KeptPrefixes,
        *,
        min_tokens: int,
        bytes_per_token: int,
        n_slots: int,
    ) -> None:
        self._executor, self._min_tokens, self._bytes_per_token = executor, min_tokens, bytes_per_token
        self._n_brought, self._brought_s = 0, 0.0
        self._beside: ThreadPoolExecutor | None = None
        self._bringing: list[Future[None]] = []
        part = n_slots * bytes_per_token // _PART_BEHIND
        most_bytes = max(_LEAST_BEHIND_BYTES, min(part, _MOST_BEHIND_BYTES))
        self._most_behind = max(1, most_bytes // bytes_per_token)
        self.prefixes = prefixes
        self._n_steps = 0
        self._has_lost = False
        self._is_old = False  # whether what runs was not looked at in this round
        self._try_again_s = math.inf

    def find(self, request: Request, n_cached: int) -> np.ndarray:
        """Places of its tokens after the first ``n_cached``."""
        # Of one that was preempted nobody looked after what is kept.
        request.n_kept, request.kept_at = 0, NOTHING_KEPT
        if request.scores_prompt or not self.prefixes.n_used:
            return NOTHING_KEPT
        digests = self._digests(request, request.n_known)
        wanted = digests.part(n_cached, request.n_findable)
        found = self.prefixes.find(wanted)
        if not n_cached + len(found) >= self._min_tokens <= len(found):
            return NOTHING_KEPT
        # What is being written may find no memory. Until that is known nothing can be said to be kept.
        if self._lose(found):
            found = self.prefixes.find(wanted)
        if not n_cached:
            request.n_kept, request.kept_at = len(found), found
        return found

    def bring_beside(self, moves: Sequence[Move]) -> None:
        """As `bring`, by another thread. Until `brought` the executor is told to do nothing else."""
        if moves:
            if self._beside is None:
                self._beside = ThreadPoolExecutor(1, "kept KV comes back")
            self._bringing.append(self._beside.submit(self.bring, moves))

    def brought(self) -> None:
        """Waits for what is being brought beside, and raises what that met."""
        if self._beside is not None:
            with self._beside:
                self._beside = None
                begun, self._bringing = self._bringing, []
                for one in begun:
                    one.result()

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
        self._lose(NOTHING_KEPT)
        if time.monotonic() >= self._try_again_s:
            self.prefixes.try_again()
            self._try_again_s = math.inf
            self._has_lost = True  # of what runs there is more to be kept now
        if not self.prefixes.n_places:
            return
        self._n_steps += 1
        is_time = self._n_steps % _LOOK_STEPS == 0
        if self._has_lost or self._n_steps % EVERY_STEPS == 0:
            self.prefixes.next_round()
            self._is_old = True
        left = self._most_behind - self._executor.n_behind
        # As long as there are free places nothing goes, and the look is left out: 20 ms for 500,000 tokens.
        if self._has_lost or (self._is_old and self.prefixes.fewest_free < left):
            self._look_again(running)
        slots, places, marks = [], [], []
        for request in running:
            if left <= 0:
                break
            start = request.n_kept
            is_new = request.n_computed is None and start < len(request.prompt_token_ids) - 1
            if not (is_new or is_time):  # as of most requests in most steps
                continue
            stop = min(request.n_stored, start + left)
            is_due = is_new or request.n_stored - start > EVERY_STEPS - _LOOK_STEPS
            has_gap = len(request.kept_at) < start
            if request.lockstep or has_gap or stop <= start or not is_due:
                continue
            of = request.slots.view()[start:stop]
            digests = self._digests(request, stop).part(start, stop)
            kept = self.prefixes.add(digests, self._executor.keepers_of(of))
            request.n_kept, request.kept_at = stop, np.concatenate([request.kept_at, kept.at])
            left -= len(kept.which)
            slots.append(of[kept.which])
            places.append(kept.places)
            marks.append(kept.marks)
        if sum(map(len, slots)):
            self._executor.keep(*map(np.concatenate, (slots, places, marks)))

    def _look_again(self, running: Sequence[Request]) -> None:
        """What is kept of ``running`` is in use, all of it: its first tokens are what the rest is found by.
        What follows a token that has gone, or had no place, is to be kept again."""
        self._has_lost = self._is_old = False
        for request in running:
            n = self.prefixes.use(request.kept_at, request.digests)
            request.n_kept, request.kept_at = n, request.kept_at[:n]

    def _lose(self, places: np.ndarray) -> bool:
        """Forgets what keepers had no memory for, if anything, once it is known of ``places``."""
        if self._bringing and self._executor.n_behind:  # it may have to ask a rank that is being told
            wait(self._bringing)  # what it met is for `brought` to raise
        lost = self._executor.take_lost(places)
        if len(lost.places):
            self.prefixes.lose(lost)
            self._try_again_s = time.monotonic() + _TRY_AGAIN_S
            self._has_lost = True
        return len(lost.places) > 0

    def forget(self, live: Iterable[Request]) -> None:
        """Everything that is kept. What is there of requests that are ``live`` is kept again."""
        self.prefixes.clear()
        self.begin_anew(live)

    @staticmethod
    def begin_anew(requests: Iterable[Request]) -> None:
        """What was kept of ``requests`` is not where others find it any more."""
        for request in requests:
            request.digests, request.n_kept, request.kept_at = NO_DIGESTS, 0, NOTHING_KEPT

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
