"""Messages through another GPU's memory: the kernels' own program with two ranks' memories in numpy, and the
real ones."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu.mail import ADDRESSES, N_FIELDS, Carrier, Ring, add_up
from pallas_kernels.gpu.warp_numpy import Cta, WarpMachine, run_together

RING = Ring(n_slots=2, slot_bytes=4096, n_ctas=2, n_warps=4)


class Pair:
    """Two ranks, or ``n``, each with a ring for each other's messages. Addresses are numbers, as they are for
    a GPU."""

    def __init__(self, ring: Ring, start: int = 0, n: int = 2) -> None:
        self.ring, self.n = ring, n
        marks = ("come", "taken", "sent", "received")
        sizes = {"data": ring.data_bytes} | dict.fromkeys(marks, ring.mark_bytes)
        self.memory: dict[object, np.ndarray] = {}
        pairs = [(rank, peer) for rank in range(n) for peer in range(n) if rank != peer]
        self.places = places = {
            pair: {name: 1 + 10 * k + i for i, name in enumerate(sizes)} for k, pair in enumerate(pairs)
        }
        for of_pair in places.values():
            self.memory |= {place: np.zeros(sizes[name], np.uint8) for name, place in of_pair.items()}
            for name in marks:  # as if there had been messages before
                self.memory[of_pair[name]].view(np.int32)[:] = start
        for rank in range(n):
            table = np.zeros((n, N_FIELDS), np.int32)
            for peer in set(range(n)) - {rank}:
                ends = {"near": places[rank, peer], "far": places[peer, rank]}
                row = [ends[end][what] for end, what in (a.split("_") for a in ADDRESSES)]
                table[peer] = np.array(row, np.int64).view(np.int32)
            self.memory["table", rank] = table.view(np.uint8).reshape(-1)

    def run(self, rank: int, what: str, message: np.ndarray, kind: str = "") -> None:
        """One kernel of one rank, all its CTAs at once. Of "add", the sum takes the message's place."""
        name, done, total = object(), object(), object()
        memory = self.memory
        memory[name], memory[done] = message, np.full(4, 0xFF, np.uint8)
        memory[total] = np.full(message.size, 0xFF, np.uint8)

        def cta(index: int) -> None:
            together = Cta(0, self.ring.n_warps)

            def program(warp: int) -> None:
                w = WarpMachine(memory, together, index, warp)
                if what == "add":
                    known = w, self.ring, ("table", rank), range(self.n), rank, name
                    return add_up(*known, message.size, kind, total)
                carrier = Carrier(w, self.ring, ("table", rank), 1 - rank)
                if what == "put":
                    carrier.put(name, message.size, done)
                else:
                    carrier.take(name, message.size)

            together.run([partial(program, warp) for warp in range(self.ring.n_warps)])

        run_together([partial(cta, index) for index in range(self.ring.n_ctas)])
        if what == "put":
            assert memory[done].view(np.float32)[0] == 0.0
        if what == "add":
            message[:] = memory[total]


def both(pair: Pair, programs: dict[int, list[tuple[Any, ...]]]) -> None:
    """Ranks' kernels, each rank's one after another."""
    errors: list[BaseException] = []

    def life(rank: int) -> None:
        try:
            for what, message, *kind in programs[rank]:
                pair.run(rank, what, message, *kind)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=life, args=(rank,), daemon=True) for rank in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"


def words(rng: np.random.Generator, n_bytes: int) -> np.ndarray:
    return rng.integers(0, 256, n_bytes, np.uint8)


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, RING.slot_bytes // 16).map(lambda n: 16 * n), min_size=1, max_size=7),
    start=st.sampled_from([0, 1, 5, 2**31 - 3, -2]),
    seed=st.integers(0, 1000),
)
def test_messages_arrive_in_order_and_whole_however_far_one_side_is_ahead(sizes, start, seed):
    rng = np.random.default_rng(seed)
    pair = Pair(RING, start)
    sent = [words(rng, n) for n in sizes]
    got = [np.zeros(n, np.uint8) for n in sizes]
    both(pair, {0: [("put", x) for x in sent], 1: [("take", x) for x in got]})
    for a, b in zip(sent, got, strict=True):
        np.testing.assert_array_equal(a, b)


def test_both_ways_at_once_need_no_order_between_them():
    """Each puts first and takes then, as in a swap: with exchanges that wait for their other end nobody would
    go on."""
    rng = np.random.default_rng(0)
    pair = Pair(RING)
    sent = {rank: [words(rng, 256 * (i + 1)) for i in range(3)] for rank in (0, 1)}
    got = {rank: [np.zeros(256 * (i + 1), np.uint8) for i in range(3)] for rank in (0, 1)}
    both(
        pair,
        {r: [step for i in range(3) for step in (("put", sent[r][i]), ("take", got[r][i]))] for r in (0, 1)},
    )
    for rank in (0, 1):
        for a, b in zip(sent[rank], got[1 - rank], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("n", "kind"), [(2, "bf16"), (2, "f32"), (3, "bf16"), (3, "f32")])
def test_ranks_add_up_what_each_has(n, kind):
    """Between other messages, more often than the ring has slots; in float32, in the ranks' order."""
    rng, dtype = np.random.default_rng(n), np.dtype(ml_dtypes.bfloat16 if kind == "bf16" else np.float32)
    pair = Pair(RING, start=-2, n=n)
    sizes = [4096, 48, 1024, 16]
    parts = [[rng.normal(size=size // dtype.itemsize).astype(dtype) for _ in range(n)] for size in sizes]
    given = [[part.view(np.uint8).copy() for part in of_one] for of_one in parts]
    sent, got = words(rng, 64), np.zeros(64, np.uint8)
    programs: dict[int, list[tuple[Any, ...]]] = {
        rank: [("add", of_one[rank], kind) for of_one in given] for rank in range(n)
    }
    if n == 2:
        programs[0].insert(2, ("put", sent))
        programs[1].insert(2, ("take", got))
    both(pair, programs)
    for of_one, found in zip(parts, given, strict=True):
        wanted = of_one[0].astype(np.float32)
        for part in of_one[1:]:
            wanted = wanted + part.astype(np.float32)
        for rank in range(n):
            np.testing.assert_array_equal(found[rank].view(dtype), wanted.astype(dtype))
    assert n > 2 or (got == sent).all()


def test_a_sender_waits_when_the_ring_is_full():
    pair = Pair(RING)
    full = [np.full(64, i, np.uint8) for i in range(RING.n_slots + 1)]
    for message in full[:-1]:
        pair.run(0, "put", message)
    late = threading.Thread(target=pair.run, args=(0, "put", full[-1]), daemon=True)
    late.start()
    late.join(0.3)
    assert late.is_alive()  # until the second take, which says that the first is over
    for want in full:
        got = np.zeros(64, np.uint8)
        pair.run(1, "take", got)
        np.testing.assert_array_equal(got, want)
    late.join(30)
    assert not late.is_alive()


@pytest.mark.parametrize(
    ("n_bytes", "fits"), [(16, True), (4096, True), (4112, False), (24, False), (0, False)]
)
def test_what_fits_into_a_slot(n_bytes, fits):
    assert RING.carries(n_bytes) is fits
