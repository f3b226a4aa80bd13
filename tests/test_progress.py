"""How far a step that hangs has come: marks of two ranks' memories in numpy, and the compiled text of a
program."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from test_mail import RING, Pair, words

from jaxlamina.job.control.watchdog import Watchdog
from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports.exchanges import xla_exchanges
from jaxlamina.transports.mailbox import n_messages
from jaxlamina.transports.progress import Launches, messages_of, n_done, place_of

# A model rank's step of two layers and two batches, in the order in which the device runs it: part of it in a
# call, as XLA puts what is captured into a CUDA graph.
HLO = """HloModule jit_step, is_scheduled=true

%graph (g: f32[8]) -> f32[1] {
  %g = f32[8]{0} parameter(0)
  %s2 = f32[8]{0} add(%g, %g), metadata={op_name="jit(step)/slice.1.batch.0/add"}
  ROOT %p2 = f32[1]{0} custom-call(%s2), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/put.1/x"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %s0 = f32[8]{0} add(%a, %a), metadata={op_name="jit(step)/slice.0.batch.0/add"}
  %p0 = f32[1]{0} custom-call(%s0), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/put.1/x"}
  %s1 = f32[8]{0} add(%a, %a), metadata={op_name="jit(step)/slice.0.batch.1/add"}
  %p1 = f32[1]{0} custom-call(%s1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/put.1/x"}
  %t0 = f32[8]{0} custom-call(%p1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/take.1/x"}
  %c = f32[1]{0} call(%t0), to_apply=%graph
  ROOT %t1 = f32[8]{0} custom-call(%c), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/take.1/x"}
}
"""
# An attention rank takes a layer's q before it attends, and puts the answer after.
ATTENDS = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8]) -> f32[1] {
  %a = f32[8]{0} parameter(0)
  %t0 = f32[8]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/take.0/x"}
  %s0 = f32[8]{0} add(%t0, %t0), metadata={op_name="jit(step)/attention.0.batch.0/add"}
  %p0 = f32[1]{0} custom-call(%s0), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/put.0/x"}
  %t1 = f32[8]{0} custom-call(%p0), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/take.0/x"}
  %s1 = f32[8]{0} add(%t1, %t1), metadata={op_name="jit(step)/attention.1.batch.0/add"}
  ROOT %p1 = f32[1]{0} custom-call(%s1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/put.0/x"}
}
"""


class Text:
    """A compiled program, as far as progress looks at it."""

    def __init__(self, hlo: str, rank: int) -> None:
        self._hlo, self._rank = hlo, rank

    def exchanges(self) -> tuple[Exchange, ...]:
        return xla_exchanges(self._hlo, self._rank)

    def hlo(self) -> str:
        return self._hlo


def test_each_exchange_has_its_layer_and_batch():
    ops = [e.op for e in xla_exchanges(HLO, 0)]
    assert ops == ["put", "put", "take", "put", "take"]
    places = [place_of(HLO, 0, i) for i in range(5)]
    assert places[:2] == ["of layer 0, batch 0", "of layer 0, batch 1"] and places[3] == "of layer 1, batch 0"
    found = [place_of(ATTENDS, 1, i) for i in range(4)]
    assert found == [f"of layer {n}, batch 0" for n in (0, 0, 1, 1)]


def test_what_is_done_follows_from_the_messages_of_each_way():
    put, take = Exchange("put", 1, (8,), "float32"), Exchange("take", 1, (8,), "float32")
    other, every = Exchange("put", 2, (8,), "float32"), Exchange("all", -1, (8,), "float32")
    exchanges = [put, every, take, other, put]
    for n_put, n_taken, n_other, want in (
        (0, 0, 0, 0),
        (1, 0, 0, 1),
        (1, 1, 0, 3),
        (1, 1, 1, 4),
        (2, 1, 1, 5),
    ):
        assert n_done(exchanges, {("put", 1): n_put, ("take", 1): n_taken, ("put", 2): n_other}) == want
    assert n_done([every], {}) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("start", [0, 2**31 - 2, -3])
def test_a_program_that_waits_for_ever_is_found_by_the_marks_of_its_memory(start):
    """Rank 0's kernels run until the peer is silent; another thread reads where they are, beside them."""
    rng, pair, launches = np.random.default_rng(0), Pair(RING, start), Launches()
    own, peer = Text(HLO, 0), Text(ATTENDS, 1)
    before = {("put", 1): start, ("take", 1): start}
    launches._total.update(before)  # as if there had been messages before
    for _ in range(3):  # two steps that are done, and one in which the peer stops
        launches.add(own, messages_of(own.exchanges()))
    sent = [words(rng, 32) for _ in range(8)]

    def model_rank() -> None:
        for _ in range(3):
            for e in own.exchanges():
                pair.run(0, e.op, sent[0].copy())

    silent_no_more = threading.Event()

    def attention_rank() -> None:
        for step in range(3):
            for i, op in enumerate(("take", "take", "put", "take", "put")):
                if (step, i) == (2, 3):
                    assert silent_no_more.wait(60)
                pair.run(1, op, sent[1].copy())

    lives = [threading.Thread(target=life, daemon=True) for life in (model_rank, attention_rank)]
    for life in lives:
        life.start()

    def counts() -> dict[tuple[str, int], int]:
        places = pair.places[0, 1]
        marks = b"".join(
            pair.memory[places[name]].tobytes() for name in ("come", "taken", "sent", "received")
        )
        n_put, n_taken = n_messages(marks)
        return {("put", 1): n_put, ("take", 1): n_taken}

    lines: list[str] = []
    watchdog = Watchdog(60, lines.append, where=lambda: launches.where(counts(), 0))
    ticket = watchdog.begin("step 3 (decode)")
    until = time.monotonic() + 60
    want = "last completed exchange 4 of 5; the next, receive float32[8] from rank 1, is of layer 1, batch 0"
    while launches.where(counts(), 0) != want:
        assert time.monotonic() < until, launches.where(counts(), 0)
        time.sleep(0.01)
    watchdog._jobs[ticket].until = 0.0
    watchdog.check()
    watchdog.close()
    assert lines == [f"step 3 (decode) was not done within 60 s ({want})"]
    assert peer.exchanges()
    silent_no_more.set()
    for life in lives:
        life.join(60)
        assert not life.is_alive()
