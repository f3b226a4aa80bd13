"""A request as the scheduler sees it: tokens, slots and a state. Knows no text, no device and no clock."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxlamina.kv import SlotList
from jaxlamina.kv.kept import NO_DIGESTS, NOTHING_KEPT, Digests


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence: tokens in, tokens out so far, and the slots of those whose KV is in the pool.

    ``slots[p]`` holds the KV of position p. A running request between steps has one token more than it has
    slots: the newest, which the next decode step takes in. ``payload`` is the engine's own, and so is
    ``n_in_flight``: tokens after ``output_token_ids`` that have been drawn and are not known yet, at most one
    when a step is scheduled.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    payload: Any = None
    index: int = 0  # among the sequences of its ``request_id``
    width: int = 1  # how many sequences it becomes once its prompt is computed
    lockstep: bool = False  # those sequences run in the same steps
    priority: int = 0  # lower goes first, where the policy looks at it
    caller: Hashable | None = None  # whose it is: callers take turns
    turn: int = 0  # its place among those of other callers
    scores_prompt: bool = False  # how likely its prompt is, is wanted: so all of it is computed
    output_token_ids: list[int] = field(default_factory=list)
    slots: SlotList = field(default_factory=SlotList)
    host_slots: np.ndarray | None = None  # [n] int32, while its KV is on the host
    most_found: int | None = None  # of its prompt: so many tokens' KV is found at most, None: any number's
    n_cached: int = 0  # positions whose KV was there when it was admitted: its prefill starts after them
    n_computed: int | None = None  # positions with KV, while its prefill goes on over several steps
    worker: int | None = 0  # which prefill worker computes its prompt; None: who decodes does
    chunk: object = None  # of its prompt, while a prefill worker computes it at its own pace
    state: RequestState = RequestState.WAITING
    n_preemptions: int = 0
    n_counted: int = 0  # positions of its prompt that statistics have
    n_in_flight: int = 0
    arrival: int = 0  # how many requests were queued before it
    rank: Any = None  # by the policy, while it waits
    digests: Digests = NO_DIGESTS  # of its first tokens, where KV is kept by content
    n_kept: int = 0  # positions that are kept so, or that there was no place for
    kept_at: Int32[np.ndarray, " n"] = field(default_factory=lambda: NOTHING_KEPT)  # places, without a gap

    @property
    def n_generated(self) -> int:
        """Tokens out, those in flight counted."""
        return len(self.output_token_ids) + self.n_in_flight

    @property
    def n_tokens(self) -> int:
        """Tokens in and out, those in flight counted."""
        return len(self.prompt_token_ids) + self.n_generated

    @property
    def n_findable(self) -> int:
        """Its first tokens whose KV may be found. The last one must be computed, for what comes after it."""
        n = self.n_known - 1
        return n if self.most_found is None or self.output_token_ids else min(n, self.most_found)

    @property
    def n_tokens_left(self) -> int:
        """Tokens that it may still write."""
        return self.max_tokens - self.n_generated

    @property
    def longest(self) -> int:
        """Slots of one of its sequences at its longest: the last token is never taken in, so it needs
        none."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def most_slots(self) -> int:
        """Slots that must be there for it to finish, even alone."""
        n_together = self.width if self.lockstep else 1
        return len(self.prompt_token_ids) + n_together * (self.max_tokens - 1)

    def branched(self, index: int) -> Request:
        """One more sequence of this running request, without slots and tokens of its own yet."""
        return Request(
            self.request_id, self.prompt_token_ids, self.max_tokens, self.payload, index,
            lockstep=self.lockstep, priority=self.priority, caller=self.caller, turn=self.turn,
            n_cached=len(self.slots), state=self.state, arrival=self.arrival, digests=self.digests,
            n_kept=min(self.n_kept, len(self.prompt_token_ids)),
            kept_at=self.kept_at[: len(self.prompt_token_ids)], n_counted=self.n_counted,
        )  # fmt: skip

    @property
    def n_known(self) -> int:
        """Tokens in and out that are known."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def n_stored(self) -> int:
        """Of a running request, known tokens whose KV is in the pool once all launched steps have run."""
        return self.n_known - 1 if self.n_computed is None else self.n_computed

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Those at positions from ``start`` on, before ``stop``; known ones."""
        n = len(self.prompt_token_ids)
        return [
            *self.prompt_token_ids[start:stop],
            *self.output_token_ids[max(0, start - n) : max(0, stop - n)],
        ]

    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]
