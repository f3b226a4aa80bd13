"""KV that is kept by content: the policy against a plain model of it, the store over the ends of processes, and
whole models that go on after what an earlier one has computed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervised import wait_until
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.engine.keeping import Keeping
from jaxlamina.engine.request import Request
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.control.faults import ControlError
from jaxlamina.kv import SlotList
from jaxlamina.kv.kept import EVERY_STEPS, NOTHING_LOST, RECORD, KeptFound, KeptPrefixes, KeptWanted, Lost
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.process import kept_folders
from jaxlamina.process.cuda_driver import CudaDriver, CudaError
from jaxlamina.process.host_memory import memory_folder
from jaxlamina.ranks.kv_copies import RankCopies
from jaxlamina.ranks.kv_room import moving_handlers
from jaxlamina.weights.fingerprint import fingerprint
from jaxlamina.weights.sources import InMemoryModel
from jaxlamina.workers.kept_kv import KeptKV, MappedAhead, kept_prefixes
from jaxlamina.workers.kv_pools import KVPools
from jaxlamina.workers.pinned_pieces import PinnedPieces
from jaxlamina.workers.populating_writers import PopulatingWriters
from jaxlamina.workers.spec import AttentionSpec

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


# --- the policy ---


def test_digests_go_on_from_one_to_the_next():
    prefixes = KeptPrefixes([4])
    tokens = [5, 6, 7, 8, 9]
    whole = prefixes.digests(tokens)
    first = prefixes.digests(tokens[:2])
    rest = prefixes.digests(tokens[2:], first.last)
    joined = first.with_more(rest)
    assert joined.low.tolist() == whole.low.tolist() and joined.high.tolist() == whole.high.tolist()
    other = prefixes.digests([6, 5, 7, 8, 9])  # the order counts, for all that follow, too
    assert not set(other.low.tolist()) & set(whole.low.tolist())
    assert not set(KeptPrefixes([4]).digests(tokens).low.tolist()) & set(
        whole.low.tolist()
    )  # keys of its own


@settings(max_examples=60, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    steps=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 99)),
        max_size=30,
    ),
)
def test_what_is_found_is_what_was_kept(capacities, steps):
    """Each place is known by the prefix that it has; places are one token's at a time, and its keeper's."""
    prefixes = KeptPrefixes(capacities)
    bounds = np.cumsum([0, *capacities])
    at: dict[int, tuple[int, ...]] = {}
    for adds, tokens, number in steps:
        digests = prefixes.digests(tokens)
        if number % 3 == 0:
            prefixes.next_round()
        if adds:
            keepers = (np.arange(len(tokens)) + number) % len(capacities)
            kept = prefixes.add(digests, keepers)
            assert (kept.marks == digests.low[kept.which]).all()
            assert prefixes.find(digests)[: len(kept.at)].tolist() == kept.at.tolist()
            assert kept.at[kept.which].tolist() == kept.places.tolist()
            for which, place in zip(kept.which.tolist(), kept.places.tolist(), strict=True):
                keeper = keepers[which]
                assert bounds[keeper] <= place < bounds[keeper + 1]
                at[place] = tuple(tokens[: which + 1])
        else:
            found = prefixes.find(digests).tolist()
            assert [at[place] for place in found] == [tuple(tokens[: i + 1]) for i in range(len(found))]
        prefixes.check_integrity()
    assert prefixes.n_used <= sum(capacities)


def test_the_oldest_and_last_tokens_go_first():
    prefixes = KeptPrefixes([6])
    old, new = prefixes.digests([1, 2, 3]), prefixes.digests([4, 5, 6])
    zeros = np.zeros(3, int)
    prefixes.add(old, zeros)
    prefixes.next_round()
    prefixes.add(new, zeros)
    prefixes.next_round()
    prefixes.add(prefixes.digests([7, 8]), zeros[:2])
    assert len(prefixes.find(old)) == 1 and len(prefixes.find(new)) == 3
    prefixes.check_integrity()


class Keepers:
    """What `Keeping` asks of an executor: who keeps a slot's KV."""

    n_behind = 0

    def __init__(self, n):
        self.n = n

    def keepers_of(self, slots):
        return slots % self.n

    def keep(self, slots, places, marks):
        pass

    def take_lost(self, places):
        return NOTHING_LOST


@settings(max_examples=60, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 90), min_size=1, max_size=2),
    rounds=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(2, 40), st.booleans()), max_size=3), st.lists(st.integers(0, 9))
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_running_requests_keep_what_a_recovery_goes_on_after(capacities, rounds):
    """Whoever comes and goes beside them: all but the newest tokens where there are places, else as much of
    each."""
    prefixes = KeptPrefixes(capacities)
    keeping = Keeping(Keepers(len(capacities)), prefixes, min_tokens=1, bytes_per_token=1, n_slots=1)
    running: list[Request] = []
    rng = np.random.default_rng(0)
    for come, go in rounds:
        for n, is_alike in come:
            tokens = (np.arange(n) if is_alike else rng.integers(3, 10**6, n)).tolist()
            running.append(Request("", tokens, 999, slots=SlotList(np.arange(999))))
        for i in go:
            running[i : i + 1] = []
        for _ in range(EVERY_STEPS):
            for request in running:
                request.output_token_ids.append(int(rng.integers(3, 10**6)))
            keeping.keep(running)
            prefixes.check_integrity()
        wanted = [prefixes.digests(r.all_token_ids()).part(0, r.n_stored) for r in running]
        found = [len(prefixes.find(digests)) for digests in wanted]
        needed = [
            len({low for digests in wanted for low in digests.low[keeper :: len(capacities)].tolist()})
            for keeper in range(len(capacities))
        ]
        has_room = all(n <= capacity for n, capacity in zip(needed, capacities, strict=True))
        all_kept = [len(digests) - EVERY_STEPS for digests in wanted]
        assert not has_room or all(n >= most for n, most in zip(found, all_kept, strict=True))
        for _ in range(8 * EVERY_STEPS):
            keeping.keep(running)
        found = [len(prefixes.find(digests)) for digests in wanted]
        shortest = min((n for n, most in zip(found, all_kept, strict=True) if n < most), default=999)
        assert all(n <= shortest + len(capacities) for n in found) and (
            has_room or prefixes.n_used >= min(capacities)
        )


def test_one_that_was_preempted_is_kept_again():
    """What was kept of it may have gone meanwhile, and there may be places again."""
    prefixes = KeptPrefixes([200])
    keeping = Keeping(Keepers(1), prefixes, min_tokens=1, bytes_per_token=2**25, n_slots=1)  # few a step
    request = Request("", list(range(100)), 999, slots=SlotList(np.arange(999)))

    def n_kept():
        for _ in range(2 * EVERY_STEPS):
            keeping.keep([request])
        return len(prefixes.find(prefixes.digests(request.all_token_ids())))

    assert n_kept() == 99
    prefixes.clear()
    assert not len(keeping.find(request, 0)) and n_kept() == 99


def test_places_that_do_not_do_are_not_asked_for_again_by_each_request():
    """Finding the oldest of all looks at all, and so does looking for each token of many."""
    prefixes = KeptPrefixes([1000])
    keeping = Keeping(Keepers(1), prefixes, min_tokens=1, bytes_per_token=1, n_slots=1)
    running = [Request("", [i, *range(500)], 999, slots=SlotList(np.arange(999))) for i in range(20)]
    keeping.keep(running)
    asked = []
    evict = prefixes._evict
    prefixes._evict = lambda keeper, times: asked.append(len(times)) or evict(keeper, times)
    for _ in range(3 * EVERY_STEPS):
        for request in running:
            request.output_token_ids.append(5)
        keeping.keep(running)
    assert [len(r.kept_at) for r in running] == [50] * 20 and len(asked) <= 3


def test_more_than_there_are_places_keeps_the_first():
    prefixes = KeptPrefixes([3])
    digests = prefixes.digests(range(10, 20))
    assert prefixes.add(digests, np.zeros(10, int)).which.tolist() == [0, 1, 2]
    assert len(prefixes.find(digests)) == 3


def test_places_that_hold_something_else_are_forgotten():
    records = np.zeros(4, RECORD)
    prefixes = KeptPrefixes([4], records)
    digests = prefixes.digests([1, 2, 3])
    kept = prefixes.add(digests, np.zeros(3, int))
    marks = np.zeros(4, np.uint64)
    marks[kept.places] = kept.marks
    marks[kept.places[1]] = 5  # a process died before this one was written
    again = KeptPrefixes([4], records, prefixes.keys, marks)
    assert len(again.find(digests)) == 1 and again.n_used == 2
    again.check_integrity()


def test_what_is_lost_is_not_found_and_where_it_was_to_be_is_left_alone():
    """Its keeper goes on where it has kept something; others do not mind."""
    prefixes = KeptPrefixes([6, 4])
    old, new = prefixes.digests([1, 2, 3]), prefixes.digests([4, 5])
    kept, zeros = prefixes.add(old, np.zeros(3, int)), np.zeros(2, int)
    of_other = prefixes.add(prefixes.digests([9, 9]), zeros + 1)
    lost = prefixes.add(new, zeros)
    twice = Lost.joined([Lost(lost.places, lost.marks)] * 2)  # two workers with a part of the KV each
    prefixes.lose(twice)
    prefixes.check_integrity()
    assert len(prefixes.find(new)) == 0 and len(prefixes.find(old)) == 3 and prefixes.n_lost_tokens == 2
    prefixes.next_round()
    again = prefixes.add(new, zeros)
    assert set(again.places.tolist()) <= set(kept.places.tolist()) and len(prefixes.find(old)) == 1
    prefixes.lose(Lost(again.places, lost.marks + np.uint64(1)))  # another token's
    assert len(prefixes.find(new)) == 2 and prefixes.n_lost_tokens == 2
    assert len(prefixes.find(prefixes.digests([9, 9]))) == len(of_other.places)
    assert len(prefixes.add(prefixes.digests([7, 7]), zeros + 1).places) == 2
    prefixes.try_again()
    prefixes.check_integrity()
    assert len(prefixes.add(prefixes.digests([8, 8, 8]), np.zeros(3, int)).places) == 3
    assert len(prefixes.find(new)) == 2
    prefixes.clear()
    prefixes.check_integrity()


# --- the store ---


@contextlib.contextmanager
def full(n_bytes):
    """Files may not grow beyond it, as where there is no memory for more. That limit is one of system calls
    alone, so nothing is written by a mapping (`tests/test_populating_writers.py` has a file system that is
    full)."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        with patch.object(PopulatingWriters, "populate", lambda memory: False):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def rows(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 24), np.uint8)


def test_places_that_hold_nothing_are_not_touched():
    """Where memory is full the kernel ends a process that looks at a page which nobody wrote."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        path = Path(folder) / "0.kv"
        store = KeptKV(path, mmap.PAGESIZE, "one", 30, 1)
        some, all_ = np.arange(3, 6), np.arange(30)
        store.put(some, np.ones(3, np.uint64), [np.ones((3, mmap.PAGESIZE), np.uint8)])
        n_blocks = path.stat().st_blocks
        assert (store.rows_at(all_).any(axis=1) == np.isin(all_, some)).all()
        assert store.copied(all_).places.tolist() == some.tolist()
        assert path.stat().st_blocks == n_blocks
        store.close()


def test_a_store_is_found_again_and_another_is_not(tmp_path):
    store = KeptKV(tmp_path / "a" / "0.kv", 24, "one", 10, 1)
    assert store.n_places == 10 and not store.marks.any()
    places, parts = np.asarray([7, 2, 3]), rows(3)
    store.later(places, np.asarray([1, 2, 3], np.uint64), lambda: [parts[:, :8], parts[:, 8:]])
    store.put(places[:0], np.zeros(0, np.uint64), [parts[:0]])  # nothing
    assert (store.rows_at(places) == parts).all() and (store.rows_at(np.asarray([2, 3])) == parts[1:]).all()
    store.close()
    again = KeptKV(tmp_path / "a" / "0.kv", 24, "one", 99, 1)
    assert again.n_places == 10 and again.marks[places].tolist() == [1, 2, 3]
    assert (again.rows_at(places) == parts).all()
    again.close()
    other = KeptKV(tmp_path / "a" / "0.kv", 24, "two", 10, 1)
    assert not other.marks.any()
    other.close()


@pytest.mark.parametrize(("n_writers", "n_parts"), [(1, 2), (1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("at_once", [1, 24, 100, 2**23])
def test_rows_are_where_they_belong_however_many_are_written_at_once(
    at_once, n_writers, n_parts, monkeypatch
):
    """Places in stretches, single ones, and in any order."""
    monkeypatch.setattr("jaxlamina.workers.kept_kv._AT_ONCE_BYTES", at_once)
    store = KeptKV(None, 24, "one", 60, 1, n_writers=n_writers)
    rng, expected = np.random.default_rng(3), np.zeros((60, 24), np.uint8)
    for i, places in enumerate(([*range(10, 40)], [5, 6, 9, 41, 40], rng.permutation(60)[:20].tolist())):
        values = rows(len(places), i)
        parts = [values] if n_parts == 1 else [values[:, :10], values[:, 10:]]
        store.put(np.asarray(places), np.ones(len(places), np.uint64), parts)
        expected[places] = values
    marked = np.flatnonzero(store.marks)
    assert (store.rows_at(marked) == expected[marked]).all() and len(marked) >= 30
    store.close()


@pytest.mark.parametrize("n_writers", [1, 4])
def test_what_is_put_while_it_is_closed_is_written_or_refused(n_writers):
    for _ in range(5):
        store = KeptKV(None, 2**16, "one", 64, 1, n_writers=n_writers)
        places, values = np.arange(64), np.ones((64, 2**16), np.uint8)
        refused = []

        def put(store=store, places=places, values=values, refused=refused):
            try:
                while True:
                    store.put(places, np.ones(64, np.uint64), [values])
            except ValueError as error:
                refused.append(str(error))

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        wait_until(lambda store=store: store.marks.any(), 60)
        store.close()
        thread.join(60)
        assert refused == ["what kept KV is closed"] and store.marks.all()


def test_what_fails_to_be_written_is_heard_of(tmp_path):
    store = KeptKV(None, 24, "one", 4, 1)

    def fails():
        raise OSError("no")

    one = np.zeros(1, int), np.ones(1, np.uint64), fails
    store.later(*one)
    with pytest.raises(OSError, match="no"):
        store.flush()
    for asks in (lambda: store.wait_for(one[0]), lambda: store.later(*one)):
        with pytest.raises(OSError, match="no"):
            asks()
    assert not store.n_behind  # or nobody would be told


def says_full(caplog):
    return [line for line in caplog.messages if "the memory for kept KV is full" in line]


def test_what_there_is_no_memory_for_is_lost_and_the_rest_stays(tmp_path, caplog):
    """Also of a device's rows that do not fit into this process's memory."""
    store = KeptKV(tmp_path / "0.kv", 24, "one", 10, 1)
    marks, values = np.arange(1, 11, dtype=np.uint64), rows(10)

    def later(places):
        store.later(np.asarray(places), marks[places], lambda: [values[places]])

    def no_memory():
        raise MemoryError

    later([0, 1, 2])
    store.flush()
    with full(4096 + 10 * 8 + 5 * 24):
        for places in ([3, 4, 5, 6], [7], [2, 1]):
            later(places)
        store.later(np.asarray([8]), marks[[8]], no_memory)
        store.flush()
    lost = store.take_lost()
    assert lost.places.tolist() == [3, 4, 5, 6, 7, 8] and (lost.marks == marks[lost.places]).all()
    assert not len(store.take_lost().places) and not store.n_behind
    [line] = says_full(caplog)
    assert f"{tmp_path}/0.kv has no room for 4 tokens, 0.0 MiB (File too large)" in line, line
    later([7])
    store.flush()
    store.close()
    again = KeptKV(tmp_path / "0.kv", 24, "one", 10, 1)
    marked = np.asarray([0, 1, 2, 7])
    assert np.flatnonzero(again.marks).tolist() == marked.tolist()
    assert (again.rows_at(marked) == values[marked]).all()
    again.close()


def test_where_nothing_fits_nothing_is_kept(tmp_path, caplog):
    """Neither KV nor what it is found by."""
    with full(4096):
        store = KeptKV(tmp_path / "0.kv", 24, "one", 10, 1)
    assert store.n_places == len(store.marks) == 0
    store.close()
    wanted, found = (
        KeptWanted(str(tmp_path), "one", 10),
        KeptFound(("0",), (10,), "one", np.zeros(10, np.uint64)),
    )
    with full(4096 + 100):
        prefixes = kept_prefixes(wanted, found)
    digests = prefixes.digests([1, 2, 3])
    prefixes.add(digests, np.zeros(3, int))
    assert len(prefixes.find(digests)) == 3
    assert kept_prefixes(wanted, found).n_used == 0
    first, second = says_full(caplog)
    assert (
        "10 tokens" in first and "No KV is kept here" in first and f"{tmp_path}/index has no room" in second
    )


def test_what_is_brought_waits_for_that_to_be_written_and_for_nothing_else():
    spec = AttentionSpec(2, 4, np.dtype(np.float32), 1.0, None, None)
    pools = KVPools([spec], 40, jax.devices()[0])
    pools.open_kept("worker0", KeptWanted(None, "one", 40))
    pools.k = [x.at[:].set(jnp.arange(40.0)[:, None, None]) for x in pools.k]
    kept, old, new = pools.kept, np.arange(5), np.arange(7, 9)
    pools.keep(old, old, np.ones(5, np.uint64))
    kept.flush()
    may_write = threading.Event()

    def slow():
        assert may_write.wait(120)
        return [np.zeros((1, pools.row_bytes), np.uint8)]

    kept.later(np.asarray([20]), np.ones(1, np.uint64), slow)
    pools.keep(new, new, np.ones(2, np.uint64))
    pools.bring(old, old + 30)
    assert kept.rows_at(old).any() and kept.n_behind == 3
    bringing = threading.Thread(target=pools.bring, args=(np.append(old, new), np.arange(10, 17)))
    bringing.start()
    bringing.join(0.3)
    assert bringing.is_alive()
    may_write.set()
    bringing.join(60)
    keys = np.asarray(pools.k[0])[:, 0, 0].tolist()
    assert keys[30:35] == [0, 1, 2, 3, 4] and keys[10:17] == [0, 1, 2, 3, 4, 7, 8]
    kept.close()


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("packs", [False, True])
def test_what_is_brought_is_what_was_kept_there(kv, packs, tmp_path):
    """Many pieces, through the few arrays that they are read into: places at random, in a row, of all sizes;
    one after another with nobody waiting for the device."""
    n = 3000
    spec = AttentionSpec(2, 4, np.dtype(np.float32), 1.0, None, None, kv)
    pools = KVPools([spec] * 2, n, jax.devices()[0])
    pools._packs = packs  # as beside an accelerator
    pools.open_kept("worker0", KeptWanted(str(tmp_path), "one", n))
    rng = np.random.default_rng(0)
    filled = jnp.asarray(rng.integers(-99, 99, (n, 2, 4)), jnp.int8)
    pools.k = [
        jax.tree.map(lambda x, i=i: x.at[:].set(filled + i if x.ndim == 3 else filled[:, :, 0]), of_layer)
        for i, of_layer in enumerate(pools.k)
    ]
    slots = np.arange(n)
    pools.keep(slots, slots, np.ones(n, np.uint64))
    kept = pools.kept_rows(slots).copy()
    assert len(np.unique(kept, axis=0)) > n // 2
    for size in (1, 2, 15, 16, 17, 255, 256, 257, 700, 1500, 2999, 3000):
        rounds = [rng.permutation(n)[:size] for _ in range(3)] + [np.arange(size)]
        to = [rng.permutation(n)[:size] for _ in rounds]
        expected = {}
        for places, at in zip(rounds, to, strict=True):
            pools.bring(places, at)
            expected |= dict(zip(at.tolist(), places.tolist(), strict=True))
        at, places = np.asarray([*expected]), np.asarray([*expected.values()])
        marks = np.ones(len(at), np.uint64)
        pools.keep(at, at, marks)
        assert (pools.kept_rows(at) == kept[places]).all(), size
        pools.kept.put(slots, np.ones(n, np.uint64), [kept])
    with pytest.raises(IndexError, match="places"):
        pools.bring(np.asarray([n]), np.asarray([0]))
    with pytest.raises(IndexError, match="places"):
        pools.bring(np.asarray([-1]), np.asarray([0]))
    pools.kept.close()


def test_without_pinned_memory_kept_kv_goes_by_other_memory(monkeypatch):
    """Both ways. A limit of an accelerator's pinned memory is what JAX says here."""
    put = jax.device_put

    def refused(x, where=None):
        if getattr(where, "memory_kind", None) == "pinned_host":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return put(x, where)

    spec = AttentionSpec(2, 4, np.dtype(np.float32), 1.0, None, None, "auto")
    pools = KVPools([spec] * 2, 64, jax.devices()[0])
    pools._packs = True
    assert pools.host.pinned is not None
    monkeypatch.setattr(jax, "device_put", refused)
    pools.open_kept("worker0", KeptWanted(None, "one", 64))
    slots, marks = np.arange(40), np.ones(40, np.uint64)
    pools.k = [x.at[:].set(np.arange(64)[:, None, None]) for x in pools.k]
    pools.keep(slots, slots, marks)
    kept = pools.kept_rows(slots).copy()
    pools.bring(slots[::-1], slots)
    pools.keep(slots, slots, marks)
    assert (pools.kept_rows(slots) == kept[::-1]).all() and not len(pools.take_lost(slots).places)


def test_a_file_is_mapped_ahead_as_it_fills_and_takes_no_memory(tmp_path):
    """In memory, where reading what nobody has written would take pages."""
    row_bytes = 3 * mmap.PAGESIZE // 2
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "0.kv"
        store = KeptKV(path, row_bytes, "one", 64, 1)
        os.posix_fallocate(store._file, 0, path.stat().st_size)
        ahead = MappedAhead(path, row_bytes, "one")
        taken = path.stat().st_blocks
        rows = np.random.default_rng(0).integers(0, 256, (64, row_bytes), np.uint8)
        for places in ([3, 4, 5, 9], [0, 63], [*range(20, 40)]):
            store.put(np.asarray(places), np.ones(len(places), np.uint64), [rows[places]])
            n = int((store.marks != 0).sum())
            wait_until(lambda n=n: ahead.n_populated == n, 20)
        assert path.stat().st_blocks == taken
        store.close()
        again = KeptKV(path, row_bytes, "one", 64, 1, ahead)
        marked = np.flatnonzero(again.marks)
        assert len(marked) == 26 and (again.rows_at(marked) == rows[marked]).all()
        again.put(np.asarray([7]), np.ones(1, np.uint64), [rows[7:8]])
        assert (again.rows_at(np.asarray([7])) == rows[7]).all()
        again.close()
        assert MappedAhead(path, row_bytes, "two").n_populated == 0
        assert MappedAhead(path, row_bytes, "two").taken(0, 0) is None


class HostCopies:
    """A device's driver where the device's memory is the host's."""

    def __init__(self):
        self.pinned = {}

    def pin(self, address, n_bytes):
        if len(self.pinned) == 40:
            raise CudaError("cuMemHostRegister_v2: out of memory (2)")
        self.pinned[address] = n_bytes

    def unpin(self, address):
        del self.pinned[address]

    def begin_copies(self, to, parts):
        for address, n_bytes in parts:
            assert any(a <= address and address + n_bytes <= a + n for a, n in self.pinned.items())
            ctypes.memmove(to, address, n_bytes)
            to += n_bytes

    def wait_for_copies(self):
        pass


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_what_a_spare_has_pinned_comes_back_with_the_rest(monkeypatch, platform):
    """Rows of pinned pieces, of others, and of pieces that could not be pinned any more."""
    monkeypatch.setattr("jaxlamina.workers.kv_pools._LANDING_BYTES", 2**17)
    monkeypatch.setattr(
        "jaxlamina.workers.kept_kv.PinnedPieces", partial(PinnedPieces, piece_bytes=mmap.PAGESIZE)
    )
    spec = AttentionSpec(2, 12, np.dtype(np.float32), 1.0, None, None, "auto")  # rows of 384 bytes
    n, rng = 2000, np.random.default_rng(0)
    device = jax.devices(platform)[0]
    on_gpu, driver = platform == "gpu", HostCopies()
    monkeypatch.setattr(KVPools, "_new_pins", lambda self: CudaDriver(self.device) if on_gpu else driver)
    filled = rng.normal(size=(4, n, 2, 12)).astype(np.float32)

    def pools_of(value):
        pools = KVPools([spec] * 2, n, device)
        pools._packs = True
        pools.k, pools.v = ([x.at[:].set(v) for x, v in zip(xs, value, strict=True)]
                            for xs, value in ((pools.k, value[:2]), (pools.v, value[2:])))  # fmt: skip
        return pools

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        wanted = KeptWanted(folder, "one", n)
        before, places = pools_of(filled), rng.permutation(n)[: n - 500]
        before.open_kept("worker0", wanted)
        before.keep(np.arange(n - 500), places, np.ones(n - 500, np.uint64))
        early, late = np.arange(0, 1500), np.arange(1500, n)
        spare = pools_of(np.zeros_like(filled))
        spare.open_kept("worker0", wanted._replace(folder=None))
        before.kept.flush()
        spare.open_kept("worker0", wanted._replace(ahead=True))
        ahead = spare._ahead
        wait_until(lambda: ahead.n_populated == len(places), 20)
        where = np.full(n, -1)
        where[places] = np.arange(n - 500)
        rest = np.flatnonzero(where < 0)
        before.keep(np.arange(n - 500, n), rest, np.ones(500, np.uint64))
        where[rest] = np.arange(n - 500, n)
        before.kept.flush()
        wait_until(lambda: ahead.n_populated == n and (ahead.pinned.n_pinned >= 40), 20)
        spare.open_kept("worker0", wanted)
        is_pinned = spare.kept.is_pinned(np.arange(n))
        assert is_pinned.any() and (on_gpu or not is_pinned.all())
        for at in (early, late, rng.permutation(n), np.arange(n)[::-1], np.arange(7, 8)):
            to = rng.permutation(n)[: len(at)]
            spare.bring(at, to)
            for have, want in zip((*spare.k, *spare.v), filled, strict=True):
                assert (np.asarray(have)[to] == want[where[at]]).all()
        with pytest.raises(IndexError, match="places"):
            spare.bring(np.asarray([n]), np.asarray([0]))
        spare.kept.close()
        assert not spare.kept.is_pinned(np.arange(n)).any() and not driver.pinned
        before.kept.close()


def write_for_ever(path, ready, n_writers):
    store = KeptKV(path, 2**16, "one", 64, 1, n_writers=n_writers)
    n = 0
    while True:
        n += 1
        places = np.arange(n % 7, 64, 7)
        values = np.full((len(places), 2**16), n % 251, np.uint8)
        store.put(places, np.full(len(places), n % 251 + 1, np.uint64), [values])
        ready.set()


@pytest.mark.parametrize("n_writers", [1, 4])
def test_a_process_that_is_killed_leaves_no_place_that_says_what_it_has_not(n_writers, tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=write_for_ever, args=(tmp_path / "0.kv", ready, n_writers), daemon=True)
    process.start()
    assert ready.wait(60)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    store = KeptKV(tmp_path / "0.kv", 2**16, "one", 64, 1)
    marked = np.flatnonzero(store.marks)
    assert len(marked) >= 50
    found = store.rows_at(marked)
    assert (found == (store.marks[marked] - 1).astype(np.uint8)[:, None]).all()
    store.close()


def test_an_index_goes_on_with_keepers_that_come_and_go(tmp_path):
    wanted = KeptWanted(str(tmp_path), "model", None)

    def opened(names, identity="model whole", marks=None):
        n = 8 * len(names)
        return kept_prefixes(
            wanted,
            KeptFound(
                tuple(names), (8,) * len(names), identity, np.zeros(n, np.uint64) if marks is None else marks
            ),
        )

    first = opened(["worker0"])
    digests = first.digests([1, 2, 3])
    kept = first.add(digests, np.zeros(3, int))
    marks = np.zeros(16, np.uint64)
    marks[kept.places] = kept.marks
    two = opened(["worker0", "worker1"], marks=marks)
    assert two.keys == first.keys and two.find(digests).tolist() == kept.places.tolist()
    turned = opened(["worker1", "worker0"], marks=np.roll(marks, 8))
    assert turned.find(digests).tolist() == (kept.places + 8).tolist()
    assert opened(["worker0", "worker1"], "other", marks).n_used == 0
    (tmp_path / "index").write_bytes(b"\xff" * 100)
    assert opened(["worker0", "worker1"], marks=marks).n_used == 0


# --- whole models ---


def model(seed=0, **but):
    config = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 256} | but)
    return InMemoryModel(config, random_params(config, seed))


def prompts(lengths=(37, 20, 64)):
    rng = np.random.default_rng(1)
    return [{"prompt_token_ids": rng.integers(3, 60, n).tolist()} for n in lengths]


WAYS = {
    "unsplit": {"split": False},
    "heads": {},
    "two by tokens": {"attention_workers": 2, "partition": "tokens"},
    "two by requests": {"attention_workers": 2, "partition": "requests"},
    "a share of tokens": {"local_attention": 0.5, "partition": "tokens"},
    "a share of heads": {"local_attention": 0.5, "partition": "heads"},
    "int8": {"kv_dtype": "int8"},
    "int8-channel": {"kv_dtype": "int8-channel"},
    "bfloat16": {"dtype": "bfloat16"},
    "chunks": {"max_num_batched_tokens": 16},
    "no prefix cache": {"prefix_caching": False},
}


def tied(wanted, found, within=0.05):
    """Where the two first differ, the other token was as likely but for rounding of bfloat16."""
    pairs = zip(wanted.token_ids, found.token_ids, wanted.logprobs, strict=True)
    differing = next(((a, b, at) for a, b, at in pairs if a != b), None)
    if differing is None:
        return True
    a, b, at = differing
    return b in at and at[a].logprob - at[b].logprob <= within


# What they are made of is in others, too: slow tests.
LIKE_OTHERS = ("unsplit", "two by requests", "a share of heads", "int8-channel", "no prefix cache")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in LIKE_OTHERS)) for way in WAYS]
)
def test_a_later_process_goes_on_after_what_is_kept(way, tmp_path):
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640} | WAYS[way]
    kept = {"kept_kv_slots": 600, "kept_kv_folder": str(tmp_path)}
    first = LLM(model(), **options, **kept)
    outputs = first.generate(prompts(), replace(GREEDY, logprobs=5))
    assert [o.n_cached_tokens for o in outputs] == [0, 0, 0]
    assert first.stats()["kept_kv_brought_s"] == 0
    del first
    # Without a store the tokens are the same.
    assert [o.token_ids for o in LLM(model(), **options).generate(prompts(), GREEDY)] == [
        o.token_ids for o in outputs
    ]
    second = LLM(model(), **options, **kept)
    again = second.generate(prompts(), GREEDY)
    if way == "bfloat16":  # a prompt's last token alone rounds otherwise than with the others
        assert all(tied(a, b) for a, b in zip(outputs, again, strict=True))
    else:
        assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    assert [o.n_cached_tokens for o in again] == [36, 19, 63]  # the last token gives the next one
    stats = second.stats()
    assert stats["n_kept_hit_tokens"] == 36 + 19 + 63 and stats["n_prompt_tokens_computed"] == 3
    # 2 layers of 2 heads of 8, keys and values; int8 has a bfloat16 scale for each head's keys, and values.
    each = {"bfloat16": 128, "int8-channel": 64, "int8": 64 + 16}.get(way, 256)
    assert stats["kept_kv_brought_bytes"] == 118 * each, stats["kept_kv_brought_bytes"] / 118
    assert stats["kept_kv_brought_s"] > 0
    second.engine.check_integrity()
    del second
    # What was written is there, too, but for what came after the last round.
    whole = [[*o.prompt_token_ids, *o.token_ids][:-4] for o in outputs]
    third = LLM(model(), **options, **kept)
    last = third.generate(
        [{"prompt_token_ids": tokens} for tokens in whole],
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    )
    if way != "bfloat16":  # rounds otherwise where it is computed with others
        assert [list(o.token_ids) for o in last] == [list(o.token_ids[-4:]) for o in outputs]
    assert all(len(w) - 17 <= o.n_cached_tokens < len(w) for w, o in zip(whole, last, strict=True))


@pytest.mark.parametrize("way", ["unsplit", "two by tokens"])
def test_a_spare_maps_ahead_what_another_keeps(way, tmp_path):
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640} | WAYS[way]
    first = LLM(model(), **options, kept_kv_folder=str(tmp_path))
    spare = LLM(model(), **options, kept_kv_slots=1)
    spare.foresee_kv(str(tmp_path), None)
    outputs = first.generate(prompts(), GREEDY)
    if way == "unsplit":
        wait_until(lambda: spare.executor.kv._ahead.n_populated >= 36 + 19 + 63, 20)
    del first
    spare.keep_kv(str(tmp_path), None)
    again = spare.generate(prompts(), GREEDY)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    assert [o.n_cached_tokens for o in again] == [36, 19, 63]


def test_other_weights_or_another_kind_of_kv_find_nothing(tmp_path):
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640, "kept_kv_folder": str(tmp_path)}
    LLM(model(), **options).generate(prompts(), GREEDY)
    weights, one_more = model(), model()
    one_more.params["model.norm.weight"] = one_more.params["model.norm.weight"].at[3].add(1e-3)
    scaled = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 256, "rope_theta": 100.0})
    for source, more in (
        (model(1), {}),
        (model(), {"kv_dtype": "int8"}),
        (one_more, {}),
        (InMemoryModel(scaled, weights.params), {}),
        (model(), {}),
    ):
        outputs = LLM(source, **options, **more).generate(prompts(), GREEDY)
        assert [o.n_cached_tokens for o in outputs] == [0, 0, 0]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "bool", "float8_e4m3fn"]
)
@pytest.mark.parametrize("there", [False, True])
def test_every_element_of_a_weight_tells_it_from_another(dtype, there, monkeypatch):
    """``there``: as on an accelerator, which sums."""
    if there:
        monkeypatch.setattr("jaxlamina.weights.fingerprint._PLATFORM_OF_HOST", "")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 2, (300, 7, 11)), dtype)
    found = {fingerprint({"a": x}), fingerprint({"b": x}), fingerprint({"a": x.reshape(300, 77)})}
    places = [tuple(map(int, (rng.integers(n) for n in x.shape))) for _ in range(40)]
    for at in set(places):
        found.add(fingerprint({"a": x.at[at].set(~x[at] if dtype == "bool" else 1 - x[at])}))
    found.add(fingerprint({"a": x[::-1]}))
    assert len(found) == 3 + len(set(places)) + 1


def test_tokens_come_back_where_their_worker_has_no_room(tmp_path):
    """By tokens: what one worker kept goes to the other."""
    options = {"max_num_seqs": 4, "max_model_len": 160, "attention_workers": 2, "partition": "tokens"}
    options |= {"kept_kv_folder": str(tmp_path)}
    [expected] = LLM(model(), **options, kv_slots=640).generate(prompts((100,)), GREEDY)
    small = LLM(model(), **options, kv_slots=141)
    placement = small.executor.book.placement
    taken = np.arange(141 - 60, 141)
    placement.place(taken, np.zeros(60, int))  # most of worker 0's places are somebody's
    [found] = small.generate(prompts((100,)), GREEDY)
    assert found.n_cached_tokens == 99 and found.token_ids == expected.token_ids


@pytest.mark.parametrize("way", ["unsplit", "heads", "two by tokens", "a share of tokens"])
def test_as_many_places_as_are_asked_for(way, tmp_path):
    """Fewer and more than slots; in a folder of an earlier process with another number, too."""
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640} | WAYS[way]

    def found(n):
        llm = LLM(model(), **options, kept_kv_slots=n, kept_kv_folder=str(tmp_path))
        assert not isinstance(n, int) or llm.stats()["kept_kv_slots"] == n
        return llm.generate(prompts((90,)), replace(GREEDY, max_tokens=2))[0].n_cached_tokens

    assert [found(n) for n in (301, 301, 2000, "auto", None)] == [0, 89, 0, 0, 89]


def test_fewer_places_than_were_asked_for_are_told_of(caplog):
    options = {"max_num_seqs": 1, "max_model_len": 64, "kv_slots": 64, "split": False}
    llm = LLM(model(head_dim=1024), **options, kept_kv_slots=10**9)
    n = int(llm.stats()["kept_kv_slots"])
    assert f"kept_kv_slots=1000000000: {n} tokens are kept, since" in caplog.text and n < 10**9
    caplog.clear()
    LLM(model(), **options, kept_kv_slots=900)
    assert "are kept, since" not in caplog.text


def test_workers_that_come_back_find_what_they_have_kept(tmp_path):
    """Whoever was there meanwhile, and whatever these have computed again."""
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640, "partition": "requests"}
    options |= {"kept_kv_folder": str(tmp_path)}

    def asked(n_workers, lengths):
        of = {"attention_workers": n_workers} if n_workers else {"split": False, "partition": "auto"}
        llm = LLM(model(), **options | of)
        outputs = llm.generate(prompts((60, 70, 80, 90)[:lengths]), replace(GREEDY, max_tokens=4))
        llm.engine._keeping.prefixes.check_integrity()
        return [output.n_cached_tokens for output in outputs]

    assert asked(4, 4) == [0] * 4
    assert min(asked(1, 2)) == 0  # what the others have
    assert asked(0, 2) == [59, 69] and asked(2, 0) == []
    assert asked(4, 4) == [59, 69, 79, 89]


def test_files_of_workers_that_have_gone_are_removed_where_they_are_of_no_use(tmp_path):
    options = {"max_num_seqs": 1, "max_model_len": 64, "kv_slots": 64, "partition": "heads"}
    (tmp_path / "mine.kv").touch()
    files = []
    for how in (
        {"attention_workers": 2},
        {"attention_workers": 1},
        {"attention_workers": 1, "local_attention": 0.5},
        {"attention_workers": 1},
    ):
        LLM(model(), **options, **how, kept_kv_folder=str(tmp_path))
        files.append({path.name for path in tmp_path.glob("*.kv")} - {"mine.kv"})
    assert files == [{"worker0.kv", "worker1.kv"}, {"worker0.kv"}, {"own.kv", "worker0.kv"}, {"worker0.kv"}]
    assert (tmp_path / "mine.kv").exists()


def test_a_folder_for_kept_kv_is_one_models(tmp_path, monkeypatch):
    """Two would have each other's KV. One that is ending is waited for."""
    code = "import sys, pathlib; from jaxlamina.process import kept_folders as k; "
    code += "x = k.hold_alone(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        monkeypatch.setattr(kept_folders, "_ENDING_S", 0.1)
        with pytest.raises(UserError, match="another process, .*keeps KV in kept_kv_folder=.*of its own"):
            LLM(model(), max_num_seqs=1, max_model_len=64, kept_kv_folder=str(tmp_path))
        monkeypatch.setattr(kept_folders, "_ENDING_S", 60)
        threading.Timer(0.3, other.kill).start()
        llm = LLM(model(), max_num_seqs=1, max_model_len=64, kept_kv_folder=str(tmp_path))
    finally:
        other.kill()
        other.communicate()
    monkeypatch.setattr(kept_folders, "_ENDING_S", 0.1)
    with pytest.raises(UserError, match="or another model of this one, keeps KV in kept_kv_folder=.*"):
        LLM(model(), max_num_seqs=1, max_model_len=64, kept_kv_folder=str(tmp_path))
    assert llm.generate(prompts((20,)), replace(GREEDY, max_tokens=4))[0].n_cached_tokens == 0
    with pytest.raises(UserError, match="/jaxlamina-kv-mine is called as servers' own folders are"):
        LLM(model(), max_num_seqs=1, max_model_len=64, kept_kv_folder=str(tmp_path / "jaxlamina-kv-mine"))
    with pytest.raises(UserError, match="kept_kv_folder=/proc/no cannot be used: .*; give another one"):
        LLM(model(), max_num_seqs=1, max_model_len=64, kept_kv_folder="/proc/no")


def n_writers() -> int:
    return sum(thread.name == "kept KV" for thread in threading.enumerate())


@pytest.mark.parametrize("way", ["unsplit", "two by tokens"])
def test_a_models_memory_for_kept_kv_goes_with_it(way):
    """As do its threads and files, also of one that has put other weights in place."""
    gc.collect()
    time.sleep(0.5)  # of other tests' models
    others, before = n_writers(), len(os.listdir("/proc/self/fd"))
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640} | WAYS[way]
    llm = LLM(model(), **options, kept_kv_slots=600)
    stores = [pool._of_kept for pool in getattr(llm.executor, "pools", [llm.executor.kv])]
    data = weakref.ref(stores[0]._data.base)
    llm.update_weights(model(1))
    llm.generate(prompts(), GREEDY)
    assert n_writers() == others + len(stores)
    del llm, stores
    gc.collect()
    wait_until(lambda: n_writers() == others, 20)
    assert data() is None and len(os.listdir("/proc/self/fd")) == before


AT_EXIT = """
import sys, time
from test_kept import GREEDY, LLM, KeptKV, model, prompts

put = KeptKV.put
def slow_put(*args):
    time.sleep(0.1)
    put(*args)
KeptKV.put = slow_put
llm = LLM(model(), max_num_seqs=4, max_model_len=160, kv_slots=640, split=False, kept_kv_folder=sys.argv[1])
llm.generate(prompts(), GREEDY)
print(llm.executor.n_behind, llm.stats()["kept_kv_slots_used"])
"""


def test_what_is_on_its_way_is_written_at_a_processs_end(tmp_path):
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    words = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120, env=environment)
    n_behind, n_kept = map(int, done.stdout.split())
    assert n_behind > 0 and not done.stderr, done.stderr
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640, "split": False}
    again = LLM(model(), **options, kept_kv_folder=str(tmp_path))
    assert again.stats()["kept_kv_slots_used"] == n_kept


@pytest.mark.usefixtures("unchecked")
def test_a_rank_writes_what_is_on_its_way_when_rank_0_has_gone(tmp_path):
    def send(message):
        if isinstance(message, m.KeptSoFar):
            raise ControlError(0, "rank 0 has gone")

    pools = KVPools([AttentionSpec(2, 4, np.dtype(np.float32), 1.0, None, None)], 64, jax.devices()[0])
    copies = RankCopies(Cluster(), 1, "127.0.0.1")
    handlers = moving_handlers(SimpleNamespace(send=send), lambda: SimpleNamespace(plain=pools), copies)
    handlers[m.OpenKept](m.OpenKept("worker0", *KeptWanted(str(tmp_path), "one", 64), None))
    for slots in np.split(np.arange(64), 4):
        pools.keep(slots, slots, np.ones(16, np.uint64))
    pools.kept.flush()
    assert pools.kept.marks.all()


def test_files_of_an_earlier_start_of_the_host_are_made_anew(tmp_path, monkeypatch):
    """On a disk a row may be lost with the power, and its mark not."""
    store = KeptKV(tmp_path / "0.kv", 24, "one", 4, 1)
    store.put(np.arange(2), np.ones(2, np.uint64), [np.ones((2, 24), np.uint8)])
    again = KeptKV(tmp_path / "0.kv", 24, "one", 4, 1)
    with pytest.raises(ValueError, match="closed"):  # two would write to one file
        store.put(np.arange(2), np.ones(2, np.uint64), [np.ones((2, 24), np.uint8)])
    assert again.marks.tolist() == [1, 1, 0, 0]
    monkeypatch.setattr("jaxlamina.process.host_memory._BOOT_ID", tmp_path / "another")
    assert KeptKV(tmp_path / "0.kv", 24, "one", 4, 1).marks.tolist() == [0] * 4


def test_kept_prefixes_are_found_when_the_pool_had_no_room_for_them():
    """Also in one process: it is a second tier of the prefix cache."""
    options = {"max_num_seqs": 1, "max_model_len": 160, "kv_slots": 160, "kept_kv_slots": 600}
    llm = LLM(model(), **options)
    outputs = llm.generate(prompts((70, 75, 80)), GREEDY)
    again = llm.generate(prompts((70, 75, 80)), GREEDY)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    assert [o.n_cached_tokens for o in again] == [69, 74, 79]
    assert llm.stats()["n_kept_hit_tokens"] > 100


@pytest.mark.parametrize("way", ["unsplit", "two by tokens", "chunks", "int8"])
@pytest.mark.parametrize("n_together", [1, 2])
def test_kept_kv_comes_back_while_others_are_looked_at(way, n_together, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxlamina.engine.engine._LOOKED_AT_TOGETHER", n_together)
    brought = []
    bring = Keeping.bring_beside
    monkeypatch.setattr(
        Keeping, "bring_beside", lambda self, moves: brought.append(len(moves)) or bring(self, moves)
    )
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640, "kept_kv_folder": str(tmp_path)}
    options |= WAYS[way]
    wanted = LLM(model(), **options).generate(prompts(), GREEDY)
    assert not brought
    llm = LLM(model(), **options)
    for i in (1, 2):
        found = llm.generate(prompts(), GREEDY)
        assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
        assert sum(brought) == 3 * i and max(brought) == n_together
        llm.engine.check_integrity()
        llm.engine.scheduler.forget_cached()
    stats = llm.stats()
    assert stats["n_kept_hit_tokens"] == 2 * (36 + 19 + 63) and stats["n_prompt_tokens_computed"] == 6


@pytest.mark.parametrize("options", [{}, {"host_kv_slots": 128}, {"prefix_caching": False}])
def test_a_prompt_that_fills_the_pool_is_computed_beside_what_is_kept(options):
    """Nobody gives way for the slot that its last token does not need, and what is kept of it is right."""
    options |= {"max_num_seqs": 2, "max_model_len": 128, "kv_slots": 64}
    long, short = prompts((64,))[0]["prompt_token_ids"], replace(GREEDY, max_tokens=8)
    [wanted] = LLM(model(), **options).generate([{"prompt_token_ids": long[:50]}], short)
    engine = LLM(model(), **options, kept_kv_slots=600).engine
    engine.add_request(long, replace(GREEDY, max_tokens=1))
    assert len(engine.step()) == 1 and engine.idle
    for _ in range(2):
        engine.scheduler.forget_cached()
        engine.add_request(long[:50], short)
        found = []
        while not engine.idle:
            found += [event.token_id for event in engine.step()]
        assert found == list(wanted.token_ids)
    assert engine.stats.n_preemptions == 0


def test_tokens_that_are_there_do_not_wait_for_what_comes_back():
    """Of those who run, and of the last who ran."""
    options = {"max_num_seqs": 2, "max_model_len": 128, "kv_slots": 256, "kept_kv_slots": 900}
    llm = LLM(model(), **options)
    llm.generate(prompts((37, 40)), GREEDY)
    engine, told = llm.engine, []
    engine.scheduler.forget_cached()
    bring = engine.executor.bring
    engine.executor.bring = lambda *of: told.append("brings") or bring(*of)
    engine.meanwhile = lambda: told.append("tells")
    first, second = (prompt["prompt_token_ids"] for prompt in prompts((37, 40)))
    engine.add_request(first, GREEDY)
    for i in range(6):
        if i == 3:
            engine.add_request(second, GREEDY)
        if engine.step():
            told.append("drawn")
    assert [told[i - 1] for i, what in enumerate(told) if what == "brings"] == ["tells"] * 2


@pytest.mark.parametrize("is_behind", [False, True])
def test_what_could_not_come_back_is_the_one_steps_matter(is_behind, monkeypatch):
    """The steps after it go on, and no slot is lost, also where it is heard of as others are looked at."""
    monkeypatch.setattr("jaxlamina.engine.engine._LOOKED_AT_TOGETHER", 2)
    asked = prompts((37, 40, 70))
    asked[2]["prompt_token_ids"][:30] = asked[0]["prompt_token_ids"][:30]
    llm = LLM(model(), max_num_seqs=8, max_model_len=160, kv_slots=800, kept_kv_slots=900)
    wanted = [o.token_ids for o in llm.generate(asked, GREEDY)]
    engine = llm.engine
    engine.scheduler.forget_cached()
    with monkeypatch.context() as fails:
        fails.setattr(type(engine.executor), "n_behind", property(lambda _: int(is_behind)))
        fails.setattr(engine.executor, "bring", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(asked, GREEDY)
    for _ in range(2):
        engine.scheduler.forget_cached()
        assert engine.scheduler.slots.n_free == 800
        engine.check_integrity()
        assert [o.token_ids for o in llm.generate(asked, GREEDY)] == wanted


def test_what_comes_back_goes_to_the_worker_that_has_room_again(monkeypatch):
    """The slots of those who have ended are free there first."""
    options = {"max_num_seqs": 2, "max_model_len": 100, "kv_slots": 200, "kept_kv_slots": 900}
    llm = LLM(model(), **options, **WAYS["two by requests"])
    asked, short = prompts((90, 90)), replace(GREEDY, max_tokens=4)
    llm.generate(asked, short)
    carried: list[int] = []
    worker = type(llm.executor.book._workers[0])
    kept_rows = worker.kept_rows
    monkeypatch.setattr(worker, "kept_rows", lambda *of: carried.append(1) or kept_rows(*of))
    for prompt in asked[::-1]:
        llm.engine.scheduler.forget_cached()
        [found] = llm.generate([prompt], short)
        assert found.n_cached_tokens == 89
    assert not carried


@pytest.mark.parametrize("way", ["unsplit", "two by tokens"])
def test_what_is_forgotten_is_not_found_and_what_runs_is_kept_again(way):
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640} | WAYS[way]
    llm = LLM(model(), **options, kept_kv_slots=900)
    [asked, other], short = prompts((70, 60)), replace(GREEDY, max_tokens=4)

    def n_cached(prompt):
        llm.engine.scheduler.forget_cached()
        return llm.generate([prompt], short)[0].n_cached_tokens

    assert [n_cached(asked) for _ in range(2)] == [0, 69]
    n_hits = llm.stats()["n_kept_hit_tokens"]
    llm.reset_prefix_cache()
    assert n_cached(asked) == 0
    llm.engine.add_request(other["prompt_token_ids"], replace(GREEDY, max_tokens=60))
    for _ in range(5):
        llm.engine.step()
    llm.engine.pause("keep", clear_cache=True)
    llm.engine.resume()
    while not llm.engine.idle:
        llm.engine.step()
    assert (n_cached(asked), n_cached(other)) == (0, 59)
    llm.update_weights(model(1))
    assert llm.stats()["n_kept_hit_tokens"] == n_hits + 59 and n_cached(other) == 0


def test_a_long_request_is_gone_on_with_after_short_ones_that_ran_beside_it(tmp_path):
    """They need more places than there are; it needs fewer."""
    options = {"max_num_seqs": 3, "max_model_len": 256, "kv_slots": 400, "kept_kv_folder": str(tmp_path)}
    engine = LLM(model(), **options).engine
    rng = np.random.default_rng(1)
    long, written, n_short = rng.integers(3, 60, 100).tolist(), [], 0
    its_id = engine.add_request(long, replace(GREEDY, max_tokens=150))
    while len(written) < 120:
        while len(engine.scheduler.waiting) + len(engine.scheduler.running) < 3:
            engine.add_request(rng.integers(3, 60, 60).tolist(), replace(GREEDY, max_tokens=20))
            n_short += 1
        written += [event.token_id for event in engine.step() if event.request_id == its_id]
    assert n_short * 80 > 2 * 400
    tokens = [*long, *written]
    del engine  # as at the end of its process
    [found] = LLM(model(), **options).generate([{"prompt_token_ids": tokens}], replace(GREEDY, max_tokens=2))
    assert len(tokens) - EVERY_STEPS - 2 <= found.n_cached_tokens


def test_samples_penalties_and_log_probabilities_go_on_the_same(tmp_path):
    options = {"max_num_seqs": 8, "max_model_len": 160, "kv_slots": 1200, "kept_kv_folder": str(tmp_path)}
    several = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, n=2, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=4, max_tokens=24, presence_penalty=0.6, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True),
    ]
    first = LLM(model(), **options).generate(prompts(), several)
    again = LLM(model(), **options).generate(prompts(), several)
    for a, b in zip(first, again, strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        assert b.n_cached_tokens == len(a.prompt_token_ids) - 1


@pytest.mark.parametrize("way", ["unsplit", "two by requests"])
def test_no_step_waits_for_what_is_kept(way, monkeypatch):
    """While a keeper writes nothing, no more than so much is on its way; what is left is kept afterwards."""
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640} | WAYS[way]
    expected = [o.token_ids for o in LLM(model(), **options).generate(prompts(), GREEDY)]
    llm = LLM(model(), **options, kept_kv_slots=600)
    keeping = llm.engine.scheduler.room.kept
    keeping._most_behind = 50
    may_write, put = threading.Event(), KeptKV.put

    def slow_put(*args):
        assert may_write.wait(120)
        put(*args)

    monkeypatch.setattr(KeptKV, "put", slow_put)
    most = []
    look = lambda event: most.append(llm.engine.executor.n_behind)
    assert [o.token_ids for o in llm.generate(prompts(), GREEDY, on_token=look)] == expected
    assert 0 < max(most) <= 50 and llm.stats()["n_kept_tokens"] <= 50 * len(llm.engine.executor.held())
    may_write.set()
    wait_until(lambda: llm.engine.executor.n_behind == 0, 60)
    others = [{"prompt_token_ids": p["prompt_token_ids"][::-1]} for p in prompts()]
    llm.generate(
        others, GREEDY, on_token=lambda event: wait_until(lambda: not llm.engine.executor.n_behind, 60)
    )
    stats = llm.stats()
    assert stats["n_kept_tokens"] > 37 + 20 + 64 + 2 * 30
    llm.engine.check_integrity()


@pytest.mark.parametrize("way", ["unsplit", "heads", "two by tokens"])
def test_a_job_whose_memory_for_kept_kv_is_full_goes_on(way, tmp_path):
    """The same tokens, also by what is found then; and what is newest is kept, in place of the oldest."""
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640, "prefix_caching": False} | WAYS[way]
    n_tokens, other = (
        37 + 20 + 64 + 3 * 40,
        [{"prompt_token_ids": p["prompt_token_ids"][::-1]} for p in prompts()],
    )
    plain = LLM(model(), **options)
    expected = [[o.token_ids for o in plain.generate(asked, GREEDY)] for asked in (prompts(), other)]
    llm = LLM(model(), **options, kept_kv_slots=600, kept_kv_folder=str(tmp_path))
    [*files] = tmp_path.glob("*.kv")
    n_sharing = len(files) if way == "two by tokens" else 1
    n_places, n_fit = 600 // n_sharing, n_tokens // n_sharing
    row = max((file.stat().st_size - 4096) // n_places - 8 for file in files)

    def tokens_of(llm, asked):
        return [o.token_ids for o in llm.generate(asked, GREEDY)]

    with full(4096 + n_places * 8 + n_fit * row):
        for _ in range(2):
            assert [tokens_of(llm, asked) for asked in (prompts(), other)] == expected
            llm.engine.check_integrity()
            llm.engine.scheduler.room.kept.prefixes.check_integrity()
        stats = llm.stats()
        assert 20 < stats["n_kept_lost_tokens"] < 600 and stats["kept_kv_slots_used"] <= n_tokens
        found = llm.generate(other, replace(GREEDY, max_tokens=1))
        assert sum(o.n_cached_tokens for o in found) > 30
    del llm
    later = LLM(model(), **options, kept_kv_slots=600, kept_kv_folder=str(tmp_path))
    found = later.generate(other, GREEDY)
    assert [o.token_ids for o in found] == expected[1]
    assert sum(o.n_cached_tokens for o in found) > 30
    assert tokens_of(later, prompts()) == expected[0] and not later.stats()["n_kept_lost_tokens"]


def test_what_runs_is_kept_again_once_there_is_memory_again():
    """And not only whoever comes later."""

    class Full(Keepers):
        lost = NOTHING_LOST
        n_fit = 80

        def keep(self, slots, places, marks):
            is_lost = places >= self.n_fit
            self.lost = Lost(places[is_lost], marks[is_lost])

        def take_lost(self, places):
            lost, self.lost = self.lost, NOTHING_LOST
            return lost

    keepers, prefixes = Full(1), KeptPrefixes([10_000])
    keeping = Keeping(keepers, prefixes, min_tokens=1, bytes_per_token=2**20, n_slots=1)
    request = Request("", list(range(100)), 999, slots=SlotList(np.arange(999)))
    for _ in range(2 * EVERY_STEPS):
        keeping.keep([request])
    assert len(prefixes.find(prefixes.digests(request.all_token_ids()))) == 80 and prefixes.n_lost_tokens
    keepers.n_fit, keeping._try_again_s = 999, 0.0  # as after a minute
    for _ in range(2 * EVERY_STEPS):
        request.output_token_ids.append(5)
        keeping.keep([request])
        prefixes.check_integrity()
    assert len(prefixes.find(prefixes.digests(request.all_token_ids()))) >= 100


def test_memory_that_is_there_again_is_used_again(monkeypatch):
    monkeypatch.setattr("jaxlamina.engine.keeping._TRY_AGAIN_S", 0.0)
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640, "kept_kv_slots": 600, "split": False}
    llm = LLM(model(), **options)
    with full(4096 + 600 * 8):
        llm.generate(prompts(), GREEDY)
    assert llm.stats()["n_kept_lost_tokens"] > 100 and not llm.stats()["n_kept_hit_tokens"]
    other = [{"prompt_token_ids": p["prompt_token_ids"][::-1]} for p in prompts()]
    llm.generate(other, GREEDY)
    assert llm.stats()["kept_kv_slots_used"] >= 37 + 20 + 64 + 3 * 20


@pytest.mark.parametrize("way", ["unsplit", "two by tokens"])
def test_nothing_is_found_that_turns_out_to_be_lost(way, monkeypatch):
    """Whoever looks for it while it is written."""
    options = {"max_num_seqs": 4, "max_model_len": 160, "kv_slots": 640, "prefix_caching": False} | WAYS[way]
    expected = [o.token_ids for o in LLM(model(), **options).generate(prompts(), GREEDY)]
    llm = LLM(model(), **options, kept_kv_slots=600)
    put = KeptKV.put

    def slow_put(*args):
        time.sleep(0.5)
        put(*args)

    monkeypatch.setattr(KeptKV, "put", slow_put)
    with full(4096 + 600 * 8):
        llm.generate(prompts(), replace(GREEDY, max_tokens=3))
        assert llm.executor.n_behind
        again = llm.generate(prompts(), GREEDY)
    assert [o.token_ids for o in again] == expected and [o.n_cached_tokens for o in again] == [0, 0, 0]
