"""Random operations on allocator, prefix cache, forks and host tier together, against plain dictionaries.

The dictionaries say, of every moment, which prefixes are cached under which slot and since when, and who owns
what. Beside them are two pools of integers instead of KV, into which the copies that the host tier plans are
really made: every request's slots must hold what was written for its tokens, wherever they have been.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxlamina.kv import HostTier, OutOfSlots, PrefixCache, SlotAllocator, SlotList, append_each

N_SLOTS, N_HOST_SLOTS, N_REQUESTS = 64, 32, 7
FEW = st.integers(0, N_REQUESTS - 1)  # picks one of the requests there are
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
Prefix = tuple[int, ...]


class CacheModel:
    """The prefix cache as a dictionary from every cached prefix to the slot of its last token and its
    time."""

    def __init__(self) -> None:
        self.cached: dict[Prefix, list[int]] = {}  # [slot, time]
        self.time = 0

    def find(self, tokens: Prefix) -> list[int]:
        """The slots of the longest cached prefix, which is used now."""
        self.time += 1
        slots = []
        for n in range(1, len(tokens) + 1):
            if tokens[:n] not in self.cached:
                break
            self.cached[tokens[:n]][1] = self.time
            slots.append(self.cached[tokens[:n]][0])
        return slots

    def keep(self, tokens: Prefix, slots: list[int]) -> int:
        n_known = len(self.find(tokens))
        for n in range(n_known, len(tokens)):
            self.cached[tokens[: n + 1]] = [slots[n], self.time]
        return len(tokens) - n_known

    def evict(self, n: int, idle: set[int]) -> int:
        """Token by token: the oldest leaf whose slot is idle; if there is none, the oldest one with any idle
        slot before it is forgotten."""
        freed = 0
        while freed < n:
            followed = {prefix[:-1] for prefix in self.cached}
            leaves = sorted((self.cached[p][1], p) for p in self.cached if p not in followed)
            assert len({time for time, _ in leaves}) == len(leaves)  # so that the order is the only one
            oldest = next((p for _, p in leaves if self.cached[p][0] in idle), None)
            if oldest is None:
                oldest = next((p for _, p in leaves if self._slots(p) & idle), None)
                if oldest is None:
                    break
            else:
                freed += 1
            del self.cached[oldest]
        return freed

    def _slots(self, prefix: Prefix) -> set[int]:
        return {self.cached[prefix[:n]][0] for n in range(1, len(prefix) + 1)}


class Request:
    def __init__(self, name: str, tokens: Prefix) -> None:
        self.name = name
        self.tokens = tokens
        self.slots = SlotList()  # on the device, or while it is parked
        self.host = np.empty(0, np.int32)  # on the host
        self.parked = False


class KvMachine(RuleBasedStateMachine):
    n_operations = 0  # of all machines together

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(N_SLOTS)
        self.cache = PrefixCache(self.slots)
        self.tier = HostTier(self.slots, N_HOST_SLOTS, bytes_per_token=100)
        self.model = CacheModel()
        self.requests: list[Request] = []
        self.n_requests = 0
        self.device_pool = np.zeros(N_SLOTS, np.int64)
        self.host_pool = np.zeros(N_HOST_SLOTS, np.int64)
        self.n_copied = [0, 0]

    @rule(tokens=TOKENS)
    def submit(self, tokens: list[int]):
        """A prompt: the longest cached prefix is shared, the rest gets slots of its own."""
        r = self._new_request(tuple(tokens))
        expected = self.model.find(r.tokens)
        before = self.cache.hit_tokens, self.cache.missed_tokens
        assert self.cache.match_length(tokens) == len(expected)
        r.slots.extend(self.cache.match(tokens))
        n_missing = len(tokens) - len(expected)
        assert list(r.slots) == expected
        assert (self.cache.hit_tokens, self.cache.missed_tokens) == (
            before[0] + len(expected),
            before[1] + n_missing,
        )
        if self._make_room(n_missing):
            r.slots.extend(self.slots.allocate(n_missing))
            self._write(r, len(expected))
        else:
            self._drop(r)

    @precondition(lambda self: self.model.cached)
    @rule(which=st.integers(0, 1000), tokens=st.lists(st.integers(0, 2), max_size=2))
    def submit_again(self, which: int, tokens: list[int]):
        """A prompt that begins with something that is cached, and is it more often than not."""
        known = sorted(self.model.cached)
        self.submit([*known[which % len(known)], *tokens])

    @rule(tokens=st.lists(st.integers(0, 2), min_size=N_REQUESTS, max_size=N_REQUESTS))
    def decode(self, tokens: list[int]):
        """One token more for everyone who runs, in slots allocated at once."""
        running = [r for r in self.requests if not r.parked]
        while not self._make_room(len(running)):
            self._drop(running.pop())
        append_each([r.slots for r in running], self.slots.allocate(len(running)))
        for r, token in zip(running, tokens, strict=False):
            r.tokens += (token,)
            self._write(r, len(r.tokens) - 1)

    @precondition(lambda self: self.requests)
    @rule(which=FEW, ends=st.booleans())
    def insert(self, which: int, ends: bool):
        """A request's KV is kept, at its end or when its prompt is computed."""
        r = self._pick(which)
        if not r.parked:
            self._insert(r)
        if ends:
            self._drop(r)

    @precondition(lambda self: self.requests)
    @rule(which=FEW, n=st.integers(0, 14))
    def sample_another(self, which: int, n: int):
        """Parallel sampling: a second request shares the first one's slots, or some of them."""
        r = self._pick(which)
        twin = self._new_request(r.tokens[:n])
        if r not in self.requests:  # it was the oldest
            twin.tokens = ()
            return
        twin.parked = r.parked
        if r.parked:
            twin.host = r.host[:n].copy()
            self.tier.fork(twin.host)
        else:
            twin.slots.extend(r.slots[:n])
            self.slots.fork(twin.slots)

    @precondition(lambda self: self.requests)
    @rule(which=FEW)
    def abort(self, which: int):
        self._drop(self._pick(which))

    @rule(n=st.integers(0, 20))
    def evict(self, n: int):
        self._evict(n)

    @precondition(lambda self: self.requests)
    @rule(which=FEW)
    def park_or_bring_back(self, which: int):
        """A request's KV moves to the host or back, if there is room."""
        r = self._pick(which)
        plan, room = (
            (self.tier.plan_in, lambda: self.slots.n_free - self.tier.n_needed_in(r.host))
            if r.parked
            else (self.tier.plan_out, lambda: self.tier.n_free - self.tier.n_needed_out(r.slots))
        )
        if room() < 0:
            counts = self.slots.owner_counts.copy()
            with pytest.raises(OutOfSlots, match="slots asked for"):
                plan(r.host if r.parked else r.slots)
            assert (self.slots.owner_counts == counts).all()
            return
        move = plan(r.host if r.parked else r.slots)
        if r.parked:
            self.device_pool[move.target] = self.host_pool[move.source]
            r.slots.extend(move.slots)
            r.host = r.host[:0]
        else:
            self.host_pool[move.target] = self.device_pool[move.source]
            r.host = move.slots
            r.slots.clear()
        self.n_copied[r.parked] += len(move.source)
        r.parked = not r.parked

    @rule(slot=st.integers(0, N_SLOTS - 1))
    def misuse_changes_nothing(self, slot: int):
        if self.slots.n_owners(slot) == 0:
            for wrong in (self.slots.free, self.slots.fork, self.tier.plan_out):
                with pytest.raises(ValueError, match=f"slot={slot} has"):
                    wrong([slot])
            with pytest.raises(ValueError, match=f"slot={slot} has 0 owner"):
                self.cache.insert([7], [slot])
        with pytest.raises(OutOfSlots):
            self.slots.allocate(self.slots.n_free + 1)

    @rule(really=st.integers(0, 9))
    def clear(self, really: int):
        if really == 0:
            self.cache.clear()
            self.model.cached.clear()

    @invariant()
    def agrees(self):
        KvMachine.n_operations += 1
        owners = {r.name: r.slots for r in self.requests if not r.parked}
        cached = sorted(slot for slot, _ in self.model.cached.values())
        assert self.cache.owned_slots().tolist() == cached and self.cache.n_cached == len(cached)
        assert self.cache.n_evictable == len(self._idle())
        self.slots.check_integrity({"cache": cached, **owners})
        self.tier.check_integrity({r.name: r.host for r in self.requests if r.parked})
        self.cache.check_integrity()
        for r in self.requests:
            pool, at = (self.host_pool, r.host) if r.parked else (self.device_pool, r.slots.view())
            assert pool[at].tolist() == written(r.tokens)
        for prefix, (slot, _) in self.model.cached.items():
            assert self.device_pool[slot] == hash(prefix)
        assert self.n_copied == [self.tier.moved_out_tokens, self.tier.moved_in_tokens]
        assert self.tier.moved_out_bytes == 100 * self.n_copied[0]

    def teardown(self):
        for r in list(self.requests):
            self._drop(r)
        self.cache.clear()
        assert self.slots.n_used == 0 and self.tier.n_used == 0

    def _insert(self, r: Request) -> None:
        n_kept = self.cache.insert(r.tokens, r.slots)
        assert n_kept == self.model.keep(r.tokens, list(r.slots))

    def _new_request(self, tokens: Prefix) -> Request:
        """A newcomer; the oldest ends if there are too many."""
        if len(self.requests) == N_REQUESTS:
            if not self.requests[0].parked:
                self._insert(self.requests[0])
            self._drop(self.requests[0])
        self.n_requests += 1
        self.requests.append(Request(f"request {self.n_requests}", tokens))
        return self.requests[-1]

    def _pick(self, which: int) -> Request:
        return self.requests[which % len(self.requests)]

    def _write(self, r: Request, begin: int) -> None:
        self.device_pool[r.slots[begin:]] = written(r.tokens)[begin:]

    def _drop(self, r: Request) -> None:
        self.requests.remove(r)
        if r.parked:
            self.tier.free(r.host)
        else:
            self.slots.free(r.slots)

    def _idle(self) -> set[int]:
        """Slots that only the cache owns."""
        in_use = {slot for r in self.requests if not r.parked for slot in r.slots}
        return {slot for slot, _ in self.model.cached.values()} - in_use

    def _make_room(self, n: int) -> bool:
        short = n - self.slots.n_free
        return short <= 0 or self._evict(short) == short

    def _evict(self, n: int) -> int:
        idle = self._idle()
        freed = self.cache.evict(n)
        assert freed == self.model.evict(n, idle) == min(n, len(idle))
        return freed


def written(tokens: Prefix) -> list[int]:
    """What stands for each token's KV: it depends on all tokens up to it."""
    return [hash(tokens[:n]) for n in range(1, len(tokens) + 1)]


@pytest.mark.parametrize("n_operations", [4_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_any_order_of_operations_agrees_with_dictionaries(n_operations: int):
    KvMachine.n_operations = 0
    steps = 200
    while KvMachine.n_operations < n_operations:  # some end early
        run_state_machine_as_test(
            KvMachine,
            settings=settings(
                max_examples=n_operations // steps,
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.generate, Phase.shrink),
            ),
        )
