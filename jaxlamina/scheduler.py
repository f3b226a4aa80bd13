"""Which requests run in a step, and on which KV slots: iteration-level scheduling.

Pure policy on plain data: no device, no clock, no text. It knows requests as token lists and a slot
allocator; what the tokens mean, and what runs them, is the engine's business.

Every step decodes all running requests, each of which takes one slot more, and admits waiting requests in
the order they came as long as they fit. When slots run out, the youngest running request gives all of its
slots back and waits again at the head of the queue; its tokens are kept and prefilled again later
("recompute"). So the oldest requests are always served first and always finish.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.kv import SlotAllocator


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """Tokens in, tokens out so far, and the slots of those whose KV is in the pool.

    ``slots[p]`` holds the KV of position p. A running request between steps has one token more than it
    has slots: the newest, which the next decode step takes in. ``payload`` is the engine's own.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    payload: Any = None
    output_token_ids: list[int] = field(default_factory=list)
    slots: array = field(default_factory=lambda: array("i"))
    state: State = State.WAITING
    n_preemptions: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def most_slots(self) -> int:
        """Slots it holds at its longest: the last token is never taken in, so it needs none."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]


@dataclass(frozen=True)
class StepPlan:
    """What one step runs: ``decodes`` oldest first, then ``prefills``; ``preempted`` lost their slots."""

    prefills: tuple[Request, ...]
    decodes: tuple[Request, ...]
    preempted: tuple[Request, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.decodes + self.prefills


class Scheduler:
    """Waiting requests in the order they came, running ones oldest first, slots between them."""

    def __init__(self, slots: SlotAllocator, *, max_num_seqs: int, max_prefill_tokens: int = 8192) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"{max_num_seqs=} must be at least 1")
        if max_prefill_tokens < 1:
            raise ValueError(f"{max_prefill_tokens=} must be at least 1")
        self.slots = slots
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queues a request; ``UserError`` if the whole pool could not hold it at its longest."""
        if request.most_slots > self.slots.capacity:
            raise UserError(
                f"the request may need {request.most_slots} KV slots (prompt {len(request.prompt_token_ids)} "
                f"+ max_tokens {request.max_tokens} - 1), the pool has {self.slots.capacity}: "
                "lower max_tokens or give more kv_slots"
            )
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Takes the slots of the coming step and says who runs. After a preemption nobody is admitted."""
        decodes, preempted = self._grow_running()
        prefills = [] if preempted else self._admit()
        return StepPlan(tuple(prefills), tuple(decodes), tuple(preempted))

    def finish(self, request: Request) -> None:
        """Ends a waiting or running request: its slots are free again."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        self._release(request)
        request.state = State.FINISHED

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless the running requests own exactly the slots that are in use."""
        self.slots.check_integrity({request.request_id: request.slots for request in self.running})

    def _grow_running(self) -> tuple[list[Request], list[Request]]:
        decodes: list[Request] = []
        preempted: list[Request] = []
        for request in tuple(self.running):
            if request.state is not State.RUNNING:
                break  # it and all younger ones have been preempted
            while self.slots.n_free == 0 and request.state is State.RUNNING:
                preempted.append(self._preempt_youngest())
            if request.state is State.RUNNING:
                request.slots.extend(self.slots.allocate(1))
                decodes.append(request)
        return decodes, preempted

    def _preempt_youngest(self) -> Request:
        victim = self.running.pop()
        self._release(victim)
        victim.state = State.WAITING
        victim.n_preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        n_prefill_tokens = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            n_prefill_tokens += request.n_tokens
            if admitted and n_prefill_tokens > self.max_prefill_tokens:
                break
            # Everyone running must be able to take one step more, or the newcomer would be thrown out
            # at once. Alone it needs no such margin: `add` saw to it that the pool holds it.
            margin = len(self.running) + 1 if self.running else 0
            if request.n_tokens + margin > self.slots.n_free:
                break
            self.waiting.popleft()
            request.slots.extend(self.slots.allocate(request.n_tokens))
            request.state = State.RUNNING
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _release(self, request: Request) -> None:
        self.slots.free(request.slots)
        del request.slots[:]
