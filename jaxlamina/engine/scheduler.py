"""Which requests run in a step, and on which KV slots: iteration-level scheduling.

Pure policy on plain data: no device, no clock, no text. It knows requests as token lists, a slot allocator,
and, where they are given, a prefix cache and a host tier; what the tokens mean, and what runs them, is the
engine's business.

Every step decodes all running requests, each of which takes one slot more, and admits waiting requests in the
policy's order as long as they fit, beside what those that run are expected to take yet (`headroom`). Requests
of equal rank whose callers are named take turns, so that one caller's many do not keep the others waiting. A
prompt longer than ``prefill_chunk`` is computed in several steps, between which the others decode; until it
is done nobody of the same rank is admitted. A newcomer starts from the longest prefix whose KV is cached.
When slots run out, cached prefixes that nobody uses go first; then the running request that is last in the
policy's order gives all of its slots back and waits again: its KV moves to the host if there is room
("swap"), else its tokens are kept and prefilled again later ("recompute"). So the first in the order is
always served and always finishes.

Where the policy is preemptive, running requests of a greater rank give way to the first that waits, too: one
by one until it fits. A prompt of theirs that is being computed in chunks, and may keep its slots, is
interrupted for it.

With prefill workers every prompt is computed by one of them, and each does one prompt or chunk a step, or one
at its own pace (`jaxlamina.engine.own_pace`), which a step takes in once the worker is done. Until then the
worker is asked for nothing else, whoever comes or gives way; what it computes for one who has given way is
dropped. Whoever needs one is admitted as soon as one can begin with it, of several the one with the fewest
prompt tokens to be computed.

A request of several sequences starts as one, and is branched once its prompt is computed
(`Scheduler.branch`): its slots then have several owners. From there on each sequence is a request of its own,
unless they run in lockstep, as beams do: then all of them run in a step, or none.

A step may be scheduled while the tokens of the one before it are in flight, that is, drawn and not known yet.
A request whose last token is in flight gives its slots back; one that turns out to have ended earlier ran a
step too many, whose slot `Scheduler.finish` takes back. That a step which is still running writes to a slot
that is free again does no harm: what is stored there next is stored after it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlamina.engine.chunk_size import ChunkSize
from jaxlamina.engine.headroom import Headroom, most_wanted
from jaxlamina.engine.own_pace import ChunksAtOwnPace
from jaxlamina.engine.policies import Fifo, Policy, Turns
from jaxlamina.engine.request import Request, RequestState
from jaxlamina.engine.room import Room, n_distinct, on_host
from jaxlamina.engine.scheduled_step import ScheduledStep
from jaxlamina.errors import UserError
from jaxlamina.kv import HostTier, Move, PrefixCache, SlotAllocator, SlotList, append_each, extend_each


class Scheduler:
    """Waiting requests in the policy's order, running ones as they were admitted, slots between them.

    With ``padded`` the running sequences are counted as a rectangle, as a contiguous KV cache holds them:
    each as long as the longest of them may become, none sharing slots with another. Whoever does not fit
    waits, so that nobody runs out of slots (FineInfer §3.3.3, the SimpleReqManager). ``prefix_cache`` and
    ``host`` must be of the same ``slots``. Cached prefixes shorter than ``min_prefix_tokens`` are not used:
    starting after a handful of tokens saves nothing, and runs other programs than a whole prompt does. A
    prompt that is scored uses none, and comes in chunks of at most `SCORED_CHUNK`. ``headroom``: which share
    of what requests may still write has room when others are admitted, 0 to 1; None: as others have written.
    ``n_prefill_workers``: 0 if prompts are computed by who decodes. ``own_pace_tokens``: how many tokens of a
    prompt they compute at once at their own pace; 0: they keep step with those who decode. So does, in any
    case, a prompt of which a longer beginning than that is there already, which only who decodes reaches.
    ``local_prefill_tokens``: who decodes also computes what a prompt lacks after stored tokens, if it is no
    more than so many: several such prompts a step.
    ``chunk_size``: chooses ``prefill_chunk``, at most the one given, for each step; while others write, all
    prompts of a step have as many tokens together. Not with prefill workers.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        *,
        max_num_seqs: int,
        max_prefill_tokens: int = 8192,
        prefill_chunk: int | None = None,
        prefix_cache: PrefixCache | None = None,
        min_prefix_tokens: int = 16,
        host: HostTier | None = None,
        policy: Policy | None = None,
        padded: bool = False,
        headroom: float | None = None,
        n_prefill_workers: int = 0,
        own_pace_tokens: int = 0,
        local_prefill_tokens: int = 0,
        chunk_size: ChunkSize | None = None,
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_prefill_tokens": max_prefill_tokens}
        for name, n in {
            **sizes,
            "prefill_chunk": prefill_chunk,
            "min_prefix_tokens": min_prefix_tokens,
        }.items():
            if n is not None and n < 1:
                raise ValueError(f"{name}={n} must be at least 1")
        self.slots = slots
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.prefill_chunk = prefill_chunk
        self.prefix_cache = prefix_cache
        self.min_prefix_tokens = min_prefix_tokens
        self.host = host
        self.policy = Fifo() if policy is None else policy
        self.padded = padded
        self.headroom = Headroom(headroom)
        self.n_prefill_workers = n_prefill_workers
        self.own_pace = ChunksAtOwnPace(own_pace_tokens)
        self._local_prefill_tokens = local_prefill_tokens
        self._not_local: Request | None = None  # of those that wait: what it lacks is prefill workers'
        self.chunk_size = chunk_size
        self.room = Room(
            slots,
            prefix_cache,
            host,
            min_prefix_tokens=min_prefix_tokens,
            prefill_chunk=prefill_chunk,
            always_in_chunks=n_prefill_workers > 0,
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._ahead: list[Request] = []  # who is let in, and whose prompts the next step computes
        self.held: list[Request] | None = None  # who has come while newcomers are kept out
        self._n_added = 0
        self._longest_output = 0  # that anybody has asked for
        self._turns = Turns()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queues a request; ``UserError`` if the whole pool could not hold it at its longest."""
        if request.width > self.max_num_seqs:
            raise UserError(
                f"the request has {request.width} sequences, {self.max_num_seqs} run at once: ask for fewer, "
                "or raise max_num_seqs"
            )
        self.room.check_holds(request, padded=self.padded)
        request.arrival, request.turn = self._n_added, self._turns.take(request.caller)
        self._n_added += 1
        self._longest_output = max(self._longest_output, request.max_tokens)
        if self.held is None:
            self._queue([request])
        else:
            request.rank = self.policy.rank(request)
            self.held.append(request)

    def keep_out(self) -> None:
        """Newcomers wait until `let_in`, whoever else runs or waits."""
        self.held = [] if self.held is None else self.held

    def let_in(self) -> None:
        held, self.held = self.held or [], None
        for request in held:
            self._queue([request])

    def admit_ahead(self, most: int) -> tuple[Move, ...]:
        """Lets in some who would begin in the next step, before that: what is kept of their KV, as the moves
        say, can be brought while others are looked at. Only while nobody runs; () where there are none, or
        nothing is to be brought."""
        if self.n_prefill_workers or len(self.running) > len(self._ahead) or not self.waiting:
            return ()
        if any(request.host_slots is not None for request in self.waiting):  # whose moves a step begins with
            return ()
        self._admit(self._choose_chunk([], []), self._ahead, most)
        return self.room.take_brought()

    def schedule(self) -> ScheduledStep:
        """Takes the slots of the coming step and says who runs. After a preemption nobody is admitted, but
        the request for which it was: the tokens of the preempted may be in flight."""
        in_flight = [r for r in self.running if r.n_in_flight]
        for request in [r for r in in_flight if r.n_in_flight + len(r.output_token_ids) == r.max_tokens]:
            self._end(request, keep=True)
        preempted: list[Request] = []
        moves_out: list[Move] = []
        may_admit = True
        if not self._ahead:  # else nobody runs who could give way, and they have all of their slots
            preempted, moves_out = self._preempt_for_room()
            may_admit = not preempted
            if may_admit:
                preempted, moves_out = self._displace()
        prefills, self._ahead = self._ahead, []
        decodes = [request for request in self.decoding() if request not in prefills]
        append_each([request.slots for request in decodes], self.slots.allocate(len(decodes)))
        computed = self.own_pace.take()
        for chunk in computed:
            self._computed_until(chunk.request, chunk.span[1])
        moves_in: list[Move] = []
        begun = sorted((r for r in self._begun() if r not in prefills), key=self._place)
        most = self._choose_chunk(decodes, begun)
        if may_admit and (self.n_prefill_workers or not begun or self._displaces(begun[0])):
            only_first = bool(preempted or (begun and not self.n_prefill_workers))
            resumed, moves_in = self._admit(most, prefills, 1 if only_first else self.max_num_seqs)
            decodes += resumed
        busy = {request.worker for request in prefills} | self.own_pace.workers
        for request in begun:
            if request.worker not in busy:
                busy.add(request.worker)
                prefills.append(request)
        at_own_pace = [r for r in prefills if self.own_pace.first(r) is not None]
        prefills = [request for request in prefills if request not in at_own_pace]
        return ScheduledStep(
            tuple(prefills),
            tuple(decodes),
            tuple(preempted),
            tuple(moves_out),
            tuple(moves_in),
            tuple(filter(None, map(self.room.still_wanted, moves_in))),
            tuple(map(self._next_chunk, prefills)),
            self.room.take_brought(),
            tuple(computed),
            tuple(map(self.own_pace.begin, at_own_pace)),
        )

    def _choose_chunk(self, decodes: Sequence[Request], begun: Sequence[Request]) -> int:
        """Chooses ``prefill_chunk`` where that is to be; prompt tokens of the coming step at most."""
        if self.chunk_size is None or not (begun or self.waiting):
            return self.max_prefill_tokens
        n_stored = sum([len(request.slots) for request in decodes]) - len(decodes)
        first = begun[0].n_computed or 0 if begun else 0
        n = self.chunk_size.next(len(decodes), n_stored, first)
        self.prefill_chunk = self.room.prefill_chunk = n
        return min(n, self.max_prefill_tokens) if decodes else self.max_prefill_tokens

    def _next_chunk(self, request: Request) -> tuple[int, int]:
        """A prompt's positions that this step computes. With the last, the prefix cache gets the prompt."""
        n_tokens, start = request.n_tokens, request.n_computed
        if start is None:
            return request.n_cached, n_tokens
        stop = min(n_tokens, start + (self.room.chunk_of(request) or n_tokens))
        self._computed_until(request, stop)
        return start, stop

    def _computed_until(self, request: Request, stop: int) -> None:
        request.n_computed = stop if stop < request.n_tokens else None
        if request.n_computed is None and self.prefix_cache is not None:
            self.prefix_cache.insert(request.all_token_ids(), request.slots.view())

    def n_steps_alike(self) -> int:
        """How many further steps are sure to decode all running requests and do nothing else, unless somebody
        comes or ends: a lower bound."""
        if not self.running or self._begun():
            return 0
        n_until_end = min([r.max_tokens - r.n_in_flight - len(r.output_token_ids) for r in self.running])
        n_steps = min(n_until_end, self.slots.n_free // len(self.running))
        if n_steps <= 0 or not self.waiting:
            return n_steps
        unit = self._next_unit()
        if self.policy.preemptive or self.prefix_cache is not None or unit[0].host_slots is not None:
            return 0
        if not self._has_rows(unit):
            return n_steps
        # A step takes a slot of each row, and from what is left free for their growth one for each row and
        # for the newcomer at most. So what the newcomer lacks becomes less by one slot a step at most.
        lacks = sum(request.n_tokens for request in unit) + self._margin(unit) - self.slots.n_free
        return min(n_steps, max(0, lacks))

    def skip(self, n_steps: int) -> None:
        """Takes the slots of so many steps, at most `n_steps_alike`, as `schedule` would one by one."""
        n_rows = len(self.running)
        slots = self.slots.allocate(n_steps * n_rows).reshape(n_steps, n_rows)
        extend_each([request.slots for request in self.running], slots)

    def branch(self, members: Sequence[Request], parents: Sequence[int]) -> list[Request]:
        """As many sequences as ``parents``, the j-th going on from ``members[parents[j]]`` and sharing its
        slots.

        ``members``: all running sequences of a request, in order. They are used again where there are enough;
        the others are new requests with the first's payload, or finished. ``output_token_ids`` come along.
        """
        old = [(member.slots, member.output_token_ids) for member in members]
        moved = [j for j, parent in enumerate(parents) if parent != j]
        left = [j for j in range(len(members)) if j >= len(parents) or parents[j] != j]
        if moved:
            self.slots.fork(np.concatenate([old[parents[j]][0].view() for j in moved]))
        if left:
            self.slots.free(np.concatenate([old[j][0].view() for j in left]))
        found = list(members[: len(parents)])
        first = members[0]
        found += [first.branched(j) for j in range(len(members), len(parents))]
        for j in moved:
            slots, tokens = old[parents[j]]
            found[j].slots, found[j].output_token_ids = SlotList(slots.view()), list(tokens)
        for member in members[len(parents) :]:
            member.slots, member.state = SlotList(), RequestState.FINISHED
        first.width = 1
        at = self.running.index(first)
        assert self.running[at : at + len(members)] == list(members)
        self.running[at : at + len(members)] = found
        return found

    def finish(self, request: Request, *, keep: bool = True) -> None:
        """Ends a waiting or running request: its slots are free again, or with ``keep`` the prefix cache's.

        Its token in flight is not wanted, nor is the slot that was taken for the step which draws that token.
        """
        if request.n_in_flight and request.state is RequestState.RUNNING:
            self.slots.free(request.slots.view()[-1:])
            request.slots.truncate(len(request.slots) - 1)
        request.n_in_flight = 0
        self._end(request, keep=keep)

    def _end(self, request: Request, *, keep: bool) -> None:
        if request.state is RequestState.RUNNING:
            self._runs_no_more(request)
        elif request.state is RequestState.WAITING:
            waits = self.held if self.held and request in self.held else self.waiting
            waits.remove(request)
            self._not_local = None
        self.headroom.ended(request)
        self.room.release(request, keep=keep)
        request.state = RequestState.FINISHED

    def forget_kv(self) -> None:
        """All KV is computed again from tokens: that of prefixes, and that of requests, which wait for their
        turn as after a preemption. No token may be in flight."""
        for request in self.waiting:
            self.room.release(request, keep=False)
        for request in self.running[::-1]:
            assert not request.n_in_flight, "a step is launched"
            self._wait_again(request, keep=False)
            self._queue([request])
        self.forget_cached()

    def forget_cached(self) -> None:
        """Empties the prefix cache."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless running requests and prefix cache own exactly the slots that are in
        use, and waiting requests those of the host that are."""
        owners: dict[Any, Any] = {(r.request_id, r.index): r.slots.view() for r in self.running}
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
            owners["prefix cache"] = self.prefix_cache.owned_slots()
        self.slots.check_integrity(owners)
        if self.host is not None:
            moved = {(r.request_id, r.index): r.host_slots for r in self.waiting}
            self.host.check_integrity({name: slots for name, slots in moved.items() if slots is not None})

    # --- room for those who run ---

    def _preempt_for_room(self) -> tuple[list[Request], list[Move]]:
        """Sees to it that everyone who decodes can take a slot: by eviction, then by preemption."""
        preempted: list[Request] = []
        moves: list[Move] = []
        # A prompt that is being computed has all of its slots.
        while not self.room.evict_for(len(self.decoding())):
            unit = self._last()
            preempted += reversed(unit)
            moves += self._give_way(unit)
        return preempted, moves

    def _displace(self) -> tuple[list[Request], list[Move]]:
        """Has running requests give way until the first that waits fits; none, where not even all that it may
        displace are enough."""
        if not (self.running and self._displaces(self._last()[0]) and self._could_fit()):
            return [], []
        preempted: list[Request] = []
        moves: list[Move] = []
        while self.running and self._displaces((last := self._last())[0]) and not self._would_fit():
            preempted += reversed(last)
            moves += self._give_way(last)
        return preempted, moves

    def _displaces(self, running: Request) -> bool:
        """Whether the first that waits may take the place of ``running``."""
        if not self.policy.preemptive or not self.waiting:
            return False
        return bool(self.waiting[0].rank < self.policy.rank(running))

    def _place(self, request: Request) -> tuple[Any, int, int, int]:
        """Where a running request stands in the policy's order."""
        return self.policy.rank(request), request.turn, request.arrival, request.index

    def _queue(self, unit: Sequence[Request]) -> None:
        rank = self.policy.rank(unit[0])
        for request in unit:
            request.rank = rank
            insort(self.waiting, request, key=lambda r: (r.rank, r.turn, r.arrival, r.index))

    def _give_way(self, unit: Sequence[Request]) -> list[Move]:
        moves = self.room.move_out(unit)
        for request in reversed(unit):
            self._wait_again(request, keep=True)
        self._queue(unit)
        return moves

    def _runs_no_more(self, request: Request) -> None:
        self.running.remove(request)
        if request in self._ahead:
            self._ahead.remove(request)

    def _wait_again(self, request: Request, *, keep: bool) -> None:
        self._runs_no_more(request)
        self.room.release(request, keep=keep)
        request.state = RequestState.WAITING
        request.n_preemptions += 1

    def _last(self) -> list[Request]:
        """The running request that gives way first, with those it runs in lockstep with."""
        last = max(self.running, key=self._place)
        if not last.lockstep:
            return [last]
        return [request for request in self.running if request.request_id == last.request_id]

    # --- newcomers, and those who come back ---

    def _admit(self, room: int, prefills: list[Request], most: int) -> tuple[list[Request], list[Move]]:
        """Adds to ``prefills`` whose prompts the step computes. (to decode since their KV comes back from the
        host, the copies for that). ``room``: prompt tokens of a step at most, of who decodes; ``most``:
        requests."""
        resumed: list[Request] = []
        moves: list[Move] = []
        room -= sum(request.n_tokens - request.n_cached for request in prefills)
        while most and self.waiting and (self.n_prefill_workers or not (prefills and _goes_on(prefills[-1]))):
            if self.n_prefill_workers and room <= 0:
                break
            unit = self._next_unit()
            worker = self._worker_for(unit, prefills)
            if not self._has_rows(unit) or (worker is None and not self._lacks_little(unit)):
                break
            margin = self._margin(unit)
            if unit[0].host_slots is not None:
                found = self.room.move_in(unit, margin)
                if found is None:
                    break
                moves += found
                resumed += unit
            else:
                # one prefill always goes, however long
                bound = room if prefills and not self.n_prefill_workers else None
                if not self.room.take(unit, margin, bound):
                    break
                if self._is_local(unit, unit[0].n_cached):
                    worker = None
                if worker is None or not self.n_prefill_workers:
                    room -= sum(request.n_tokens - request.n_cached for request in unit)
                prefills += unit
            del self.waiting[: len(unit)]
            self._not_local = None
            self._turns.came(unit[0].turn)
            for request in unit:
                request.state, request.worker = RequestState.RUNNING, worker
                self.running.append(request)
            most -= 1
        return resumed, moves

    def decoding(self) -> list[Request]:
        """Running requests whose prompts are computed."""
        return [request for request in self.running if request.n_computed is None]

    def _begun(self) -> list[Request]:
        """Running requests whose prompts are being computed."""
        return [request for request in self.running if request.n_computed is not None]

    def _worker_for(self, unit: Sequence[Request], admitted: Sequence[Request]) -> int | None:
        """The prefill worker for the first that waits, or 0 if it needs none; None if all have a prompt that
        goes before, of this step's ``admitted`` ones or of those that have begun."""
        if not self.n_prefill_workers or unit[0].host_slots is not None:
            return 0
        outstanding = [0] * self.n_prefill_workers
        busy = {request.worker for request in admitted} | self.own_pace.workers
        for request in self._begun():
            if request.worker is None:
                continue
            outstanding[request.worker] += request.n_tokens - (request.n_computed or 0)
            if not self._displaces(request):
                busy.add(request.worker)
        free = [worker for worker in range(self.n_prefill_workers) if worker not in busy]
        return min(free, key=outstanding.__getitem__, default=None)

    def _lacks_little(self, unit: Sequence[Request]) -> bool:
        """Whether who decodes would compute the prompt of the first that waits. What is long once is not
        looked for again while it waits."""
        [first, *_] = unit
        if not self._local_prefill_tokens or first is self._not_local:
            return False
        found = self._is_local(unit, self.room.n_stored(first))
        self._not_local = None if found else first
        return found

    def _is_local(self, unit: Sequence[Request], n_stored: int) -> bool:
        """Whether who decodes computes what comes after ``n_stored`` tokens, though there are prefill
        workers."""
        [first, *others] = unit
        if not self.n_prefill_workers or not n_stored or others:
            return False
        most = min(self._local_prefill_tokens, self.room.chunk_of(first) or self._local_prefill_tokens)
        return first.n_tokens - n_stored <= most

    def _has_rows(self, unit: Sequence[Request]) -> bool:
        """Whether the first that waits may run beside those that do."""
        return self._may_run([*self.running, *unit])

    def _may_run(self, requests: Sequence[Request]) -> bool:
        """Whether so many sequences may run, and padded ones have room for their longest."""
        n_rows = _n_rows(requests)
        if self.padded:
            longest = max(request.longest for request in requests)
            return n_rows <= min(self.max_num_seqs, self.slots.capacity // longest)
        return n_rows <= self.max_num_seqs

    def _margin(self, unit: Sequence[Request]) -> int:
        """Slots to leave free beside those of ``unit``: for what everyone running is expected to take, and
        for one step more of each at least, or the newcomer would be thrown out at once. Who gives way to it
        needs no more than that. Alone it needs none: `add` saw to it that the pool holds it."""
        if not self.running:
            return 0
        if self.padded:  # they have had their room from the beginning
            return _n_rows([*self.running, *unit])
        n_new = len(unit) * unit[0].n_tokens
        if self.slots.n_free - n_new > self.max_num_seqs * (self._longest_output + 1):
            return 0  # there is room for all that could be wanted: how much that is, need not be known
        rows = [*self.running, *unit]
        to_come = self.headroom.of(rows)
        if self.policy.preemptive:
            to_come[[i for i, request in enumerate(self.running) if self._displaces(request)]] = 1
        # What was there before one came may be others'.
        held = np.array([len(r.slots) - r.n_cached for r in self.running] + [r.n_tokens for r in unit])
        n_more = np.array([request.width - 1 for request in rows])  # sequences, which begin with nothing
        if n_more.any():
            to_come, held = (
                np.append(to_come, np.repeat(to_come, n_more)),
                np.append(held, np.zeros(n_more.sum(), int)),
            )
        return most_wanted(to_come, held)

    def _could_fit(self) -> bool:
        """Whether the first that waits might be admitted if all that it may displace gave way: as if nobody
        else held what these hold."""
        unit = self._next_unit()
        gone, stay = list[Request](), list[Request]()
        for request in self.running:
            (gone if self._displaces(request) else stay).append(request)
        if not self._may_run([*stay, *unit]):
            return False
        held = np.zeros(self.slots.capacity, bool)  # sooner done than a sorted list of each once
        held[np.concatenate([request.slots.view() for request in gone])] = True
        n_free = self.slots.capacity - self.room.n_used + int(held.sum())
        n_new, cached = self._needs(unit)
        self.slots.free(cached)
        return n_new + len(stay) <= n_free

    def _would_fit(self) -> bool:
        """Whether the first that waits can be admitted in this step, whose decodes have not taken their slots
        yet."""
        unit = self._next_unit()
        if not self._has_rows(unit):
            return False
        n_new, cached = self._needs(unit)
        fits = self.room.make(self._margin(unit) + len(self.decoding()) + n_new)
        self.slots.free(cached)
        return fits

    def _needs(self, unit: Sequence[Request]) -> tuple[int, np.ndarray]:
        """Slots that ``unit`` takes beside those that are cached for it, which are held until they are
        freed."""
        cached = np.empty(0, np.int32)
        if unit[0].host_slots is not None:
            return len(on_host(unit)) + len(unit), cached
        rows = [request.all_token_ids() for request in unit]
        if len(unit) == 1:
            cached = self.room.match(unit[0], rows[0])
        return n_distinct(rows) - len(cached), cached

    def _next_unit(self) -> list[Request]:
        """The first waiting request, with those it runs in lockstep with."""
        first = self.waiting[0]
        if not first.lockstep:
            return [first]
        unit = []
        for request in self.waiting:
            if request.request_id != first.request_id:
                break
            unit.append(request)
        return unit


def _goes_on(prompt: Request) -> bool:
    """Whether more than one step computes it."""
    return prompt.n_computed is not None


def _n_rows(requests: Sequence[Request]) -> int:
    """Sequences that run once newcomers among them have branched."""
    return sum([request.width for request in requests])
