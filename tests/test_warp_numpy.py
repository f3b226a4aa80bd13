"""The warp machine sees what a GPU would answer with a fault or by never ending."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pallas_kernels.gpu.warp_numpy import Cta, WarpMachine

BARRIER, TO = 0, 64
N_BYTES = 1024  # of the array `x`


def run(*programs: Callable[[WarpMachine], Any], shared_bytes: int = 256) -> None:
    """Each program as a warp of one CTA; the first makes the barrier, for one arrival."""
    cta, memory = Cta(shared_bytes, len(programs)), {"x": np.zeros(N_BYTES, np.uint8)}

    def warp(index: int, program: Callable[[WarpMachine], Any]) -> None:
        w = WarpMachine(memory, cta, 0, index)
        w.init_barrier(BARRIER, 1, (w.lane == 0) & (index == 0))
        w.sync_cta()
        program(w)

    cta.run([lambda i=i, p=p: warp(i, p) for i, p in enumerate(programs)])


def copy(w: WarpMachine, at: Any = 0, to: Any = TO, n_bytes: int = 16, announced: int = 16) -> None:
    """One lane copies, and all wait for it."""
    w.expect(BARRIER, announced, w.lane == 0)
    w.copy_rows(w.i32(to), "x", w.i64(at), n_bytes, BARRIER, w.lane == 0)
    w.wait(w.i32(BARRIER), w.i32(0))


def test_a_copy_that_a_gpu_would_do() -> None:
    run(copy)
    run(lambda w: copy(w, at=N_BYTES - 32, to=256 - 32, n_bytes=32, announced=32))


@pytest.mark.parametrize(
    "wrong,error",
    [
        ({"n_bytes": 12, "announced": 12}, "misaligned"),  # a row of three heads' float32 scales
        ({"at": 6}, "misaligned copy"),
        ({"to": TO + 8}, "misaligned in shared memory"),
        ({"at": N_BYTES}, "copy from outside x"),
        ({"at": -16}, "copy from outside x"),
        ({"to": 256}, "outside shared memory"),
        ({"announced": 2**20}, "more bytes than a barrier can count"),
    ],
)
def test_a_copy_that_a_gpu_would_not_do(wrong: dict[str, Any], error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        run(lambda w: copy(w, **wrong))


def test_bytes_that_nobody_sends_are_a_deadlock_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="lacks 0 arrivals and 16 bytes, waits for ever"):
        run(lambda w: copy(w, announced=32), lambda w: w.wait(w.i32(BARRIER), w.i32(0)))
    assert time.monotonic() - began < 30


def test_bytes_that_nobody_waits_for_are_found_at_the_end() -> None:
    with pytest.raises(AssertionError, match="copies on their way"):
        run(lambda w: w.expect(BARRIER, 16, w.lane == 0))


def test_waiting_for_a_warp_that_works_is_no_deadlock() -> None:
    def slow(w: WarpMachine) -> None:
        time.sleep(0.2)
        w.arrive(BARRIER, w.lane == 0)

    run(slow, *[lambda w: w.wait(w.i32(BARRIER), w.i32(0))] * 3)


@pytest.mark.parametrize("at,error", [(254, "outside"), (-4, "outside"), (2, "misaligned")])
def test_words_of_shared_memory(at: int, error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        run(lambda w: w.load_shared(w.i32(at)))
    with pytest.raises(AssertionError, match=error):
        run(lambda w: w.store_shared(w.i32(at), w.i32(1), w.lane == 3))
