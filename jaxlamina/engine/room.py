"""Slots for requests: taken for their tokens, shared with the prefix cache, moved to the host and back, given
up.

Pure: knows a request as tokens and slots; nothing of who waits and who runs, of order or of policy. Nothing
is taken, and nothing is evicted, where it would not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from jaxlamina.engine.request import Request, RequestState
from jaxlamina.errors import UserError
from jaxlamina.kv import HostTier, Move, PrefixCache, SlotAllocator, SlotList, append_each

# Tokens computed in one step of a prompt that is scored: there are logits of each, a row of the vocabulary.
SCORED_CHUNK = 512
_NOTHING_KEPT: dict[str, float] = {
    "kept_kv_slots": 0,
    "kept_kv_slots_used": 0,
    "kept_kv_behind": 0,
    "n_kept_tokens": 0,
    "n_kept_lost_tokens": 0,
    "n_kept_hit_tokens": 0,
    "kept_kv_brought_bytes": 0,
    "kept_kv_brought_s": 0.0,
}


class KeptPlaces(Protocol):
    """What is known of KV that is kept beside the slots (`jaxlamina.engine.keeping.Keeping`)."""

    def find(self, request: Request, n_cached: int) -> Sequence[int] | np.ndarray: ...

    def stats(self) -> dict[str, float]: ...


class Room:
    """One pool's slots, and what shares them. ``prefill_chunk``: a longer prompt is computed in several
    steps; ``always_in_chunks``: by prefill workers, every one."""

    def __init__(
        self,
        slots: SlotAllocator,
        prefix_cache: PrefixCache | None,
        host: HostTier | None,
        *,
        min_prefix_tokens: int,
        prefill_chunk: int | None,
        always_in_chunks: bool,
    ) -> None:
        self.slots, self.prefix_cache, self.host = slots, prefix_cache, host
        self.min_prefix_tokens, self.prefill_chunk = min_prefix_tokens, prefill_chunk
        self._always_in_chunks = always_in_chunks
        self.kept: KeptPlaces | None = None
        self._to_bring: list[Move] = []

    @property
    def n_used(self) -> int:
        """Slots that requests hold; those that only the prefix cache holds are as good as free.
        O(capacity)."""
        cache = self.prefix_cache
        return self.slots.n_used - (0 if cache is None else cache.n_evictable)

    @property
    def n_shared(self) -> int:
        """Slots that several sequences hold. O(capacity)."""
        n_owners = self.slots.owner_counts
        if self.prefix_cache is not None:
            n_owners = n_owners.copy()
            n_owners[self.prefix_cache.owned_slots()] -= 1
        return int((n_owners > 1).sum())

    def check_holds(self, request: Request, *, padded: bool) -> None:
        """``UserError`` if the whole pool could not hold a request at its longest."""
        most = request.width * request.longest if padded else request.most_slots
        if most > self.slots.capacity:
            each = ""
            if request.width > 1 and (padded or request.lockstep):
                each = f", for each of {request.width} {'beams' if request.lockstep else 'sequences'}"
            # Attention reads a running request's KV on the device.
            beside = (
                " (host slots hold requests that wait, not a part of one that runs)"
                if self.host is not None
                else ""
            )
            raise UserError(
                f"the request may need {most} KV slots (prompt {len(request.prompt_token_ids)} "
                f"+ max_tokens {request.max_tokens} - 1{each}), the pool has {self.slots.capacity}{beside}: "
                "lower max_tokens or give more kv_slots"
            )

    def stats(self) -> dict[str, float]:
        """Slots that requests hold, those that several do, slots that only the prefix cache holds, and what
        went to the host and back."""
        host, n_used = self.host, self.n_used
        return (self.kept.stats() if self.kept is not None else _NOTHING_KEPT) | {
            "kv_slots": self.slots.capacity,
            "kv_slots_used": n_used,
            "kv_slots_shared": self.n_shared,
            "kv_slots_cached": self.slots.n_used - n_used,
            "host_kv_slots": host.capacity if host else 0,
            "host_kv_slots_used": host.n_used if host else 0,
            "n_moved_out_tokens": host.moved_out_tokens if host else 0,
            "n_moved_in_tokens": host.moved_in_tokens if host else 0,
            "moved_out_bytes": host.moved_out_bytes if host else 0,
            "moved_in_bytes": host.moved_in_bytes if host else 0,
        }

    def move_in(self, unit: Sequence[Request], margin: int) -> list[Move] | None:
        """Slots for what ``unit`` has on the host, and for each one's coming token; None if there is no
        room."""
        host = self.host
        assert host is not None
        if not self.make(len(on_host(unit)) + len(unit) + margin):
            return None
        moves = []
        for request in unit:
            move = host.plan_in(request.host_slots if request.host_slots is not None else ())
            request.slots, request.host_slots = SlotList(move.slots), None
            moves.append(move)
        append_each([request.slots for request in unit], self.slots.allocate(len(unit)))
        return moves

    def still_wanted(self, move: Move) -> Move | None:
        """Of what came back, what others still have on the host."""
        host = self.host
        assert host is not None
        n = len(move.target)
        if host.n_needed_out(move.target) == n:
            return None
        shared = np.asarray([host.n_needed_out(move.target[i : i + 1]) == 0 for i in range(n)])
        host.moved_out_tokens += int(shared.sum())
        return Move(move.source[shared], move.target[shared], move.source[shared])

    def take(self, unit: Sequence[Request], margin: int, most_new: int | None) -> bool:
        """Slots for all tokens of ``unit``, cached ones shared; False, and no change, if there is no room."""
        if len(unit) > 1:
            return self._take_together(unit, margin, most_new)
        [request] = unit
        tokens = request.all_token_ids()
        cached = self.match(request, tokens)
        has_room = self.make(len(tokens) - len(cached) + margin)
        kept = () if self.kept is None or not has_room else self.kept.find(request, len(cached))
        n_new = len(tokens) - len(cached) - len(kept)
        if not has_room or (most_new is not None and n_new > most_new):
            self.slots.free(cached)
            return False
        chunk = self.chunk_of(request)
        in_chunks = self._always_in_chunks or (chunk is not None and n_new > chunk)
        self._give(request, tokens, cached, None if in_chunks else self.prefix_cache)
        if len(kept):
            to = request.slots.view()[len(cached) : len(cached) + len(kept)].copy()
            self._to_bring.append(Move(to, np.asarray(kept), to))
            request.n_cached += len(kept)
        if in_chunks:
            request.n_computed = request.n_cached
        return True

    def take_brought(self) -> tuple[Move, ...]:
        """Copies from the places that newcomers' KV is kept at to their slots, for the coming step."""
        brought, self._to_bring = tuple(self._to_bring), []
        return brought

    def match(self, request: Request, tokens: Sequence[int]) -> np.ndarray:
        """Slots of the cached prefix."""
        if self.prefix_cache is None or request.scores_prompt:
            return np.empty(0, np.int32)
        found = self.prefix_cache.match(tokens[: request.n_findable])
        if len(found) < self.min_prefix_tokens:
            self.slots.free(found)
            found = found[:0]
        return found

    def n_stored(self, request: Request) -> int:
        """Its first tokens whose KV is there, or kept and there is room for it, as `take` would find them."""
        cached = self.match(request, request.all_token_ids())
        has_room = request.n_tokens - len(cached) <= self.slots.n_free
        kept = () if self.kept is None or not has_room else self.kept.find(request, len(cached))
        self.slots.free(cached)
        return len(cached) + len(kept)

    def _take_together(self, unit: Sequence[Request], margin: int, most_new: int | None) -> bool:
        """As `take`, for sequences that have grown in lockstep: what they have in common is held once."""
        rows = [request.all_token_ids() for request in unit]
        n = n_distinct(rows)
        if (most_new is not None and n > most_new) or not self.make(n + margin):
            return False
        shared = PrefixCache(self.slots) if self.prefix_cache is None else self.prefix_cache
        for request, tokens in zip(unit, rows, strict=True):
            self._give(request, tokens, shared.match(tokens[:-1]), shared)
        if shared is not self.prefix_cache:
            shared.clear()
        return True

    def _give(
        self, request: Request, tokens: list[int], cached: np.ndarray, cache: PrefixCache | None
    ) -> None:
        """Slots for a request that starts after ``cached``. What it is about to compute is cached from now
        on: who is admitted after it in the same step is prefilled after it."""
        request.slots = SlotList(cached)
        request.slots.extend(self.slots.allocate(len(tokens) - len(cached)))
        request.n_cached = len(cached)
        if cache is not None:
            cache.insert(tokens, request.slots.view())

    def make(self, n: int) -> bool:
        """Whether ``n`` slots are free, after evicting what it takes; nothing is evicted if that would not
        do."""
        short = n - self.slots.n_free
        if short <= 0:
            return True
        cache = self.prefix_cache
        if cache is None or cache.n_cached < short or cache.n_evictable < short:
            return False
        return self.evict_for(n)

    def move_out(self, unit: Sequence[Request]) -> list[Move]:
        """Takes the KV of ``unit`` to the host, if all of it fits there."""
        host = self.host
        if host is None or any(request.n_computed is not None for request in unit):
            return []
        held = np.unique(np.concatenate([request.slots.view() for request in unit]))
        if host.n_needed_out(held) > host.n_free:
            return []
        moves = []
        for request in unit:
            move = host.plan_out(request.slots.view())
            request.host_slots, request.slots = move.slots, SlotList()
            moves.append(move)
        return moves

    def release(self, request: Request, *, keep: bool) -> None:
        n = len(request.slots) if request.n_computed is None else request.n_computed
        request.n_computed = request.chunk = None
        if keep and n and self.prefix_cache is not None:
            self.prefix_cache.insert(request.all_token_ids()[:n], request.slots.view()[:n])
        self.slots.free(request.slots.view())
        request.slots = SlotList()
        if request.host_slots is not None and self.host is not None and request.state is RequestState.WAITING:
            self.host.free(request.host_slots)
            request.host_slots = None

    def evict_for(self, n: int) -> bool:
        """Whether ``n`` slots are free, after evicting what cached prefixes it takes."""
        short = n - self.slots.n_free
        return short <= 0 or (self.prefix_cache is not None and self.prefix_cache.evict(short) >= short)

    def chunk_of(self, request: Request) -> int | None:
        """Tokens of its prompt that a step computes at most; None: all."""
        if not request.scores_prompt:
            return self.prefill_chunk
        return min(SCORED_CHUNK, self.prefill_chunk or SCORED_CHUNK)


def on_host(unit: Sequence[Request]) -> np.ndarray:
    """The host slots of ``unit``, each once."""
    held = [request.host_slots for request in unit if request.host_slots is not None]
    return np.unique(np.concatenate(held))


def n_distinct(rows: Sequence[list[int]]) -> int:
    """Tokens of all rows, those of common prefixes counted once."""
    ordered = sorted(rows)
    n = len(ordered[0])
    for before, row in pairwise(ordered):
        shared = next((i for i, (a, b) in enumerate(zip(before, row, strict=False)) if a != b), None)
        n += len(row) - (min(len(before), len(row)) if shared is None else shared)
    return n
