"""The watchdog: who is late is told once, in time, with how far it has come; who is not never is."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxlamina.job.control.messages import Compiles, Computed
from jaxlamina.job.control.watchdog import Watchdog
from jaxlamina.job.group import PREPARE_DEADLINE_S, OwnPaceChunks


@pytest.fixture
def clocked():
    """A watchdog whose clock the test moves, and what it told. Its own thread sleeps on real time
    meanwhile."""

    class Clock:
        seconds = 1000.0
        where = ""

    lines: list[str] = []
    watchdog = Watchdog(60, lines.append, now=lambda: Clock.seconds, where=lambda: Clock.where)
    yield watchdog, Clock, lines
    watchdog.close()


def test_late_is_told_once_with_how_far_it_has_come(clocked):
    watchdog, clock, lines = clocked
    ticket = watchdog.begin("step 3 (decode, batch 8, context 256)")
    clock.where = "last completed exchange 12 of 93"
    clock.seconds += 59.5
    assert watchdog.check() == pytest.approx(0.5)
    assert lines == []
    clock.seconds += 0.5
    assert watchdog.check() == 60
    said = "step 3 (decode, batch 8, context 256) was not done within 60 s (last completed exchange 12 of 93)"
    assert lines == [said]
    clock.seconds += 1000
    watchdog.check()
    clock.where = "too late"
    watchdog.done(ticket)
    assert lines == [said]


def test_what_cannot_say_how_far_it_is_is_told_all_the_same():
    """The driver of a GPU that waits for another did not answer."""
    for_ever, lines = threading.Event(), queue.SimpleQueue()

    def where():
        for_ever.wait()
        return "never"

    watchdog = Watchdog(0.1, lines.put, where=where)
    try:
        watchdog.begin("step 1")
        assert (
            lines.get(timeout=30)
            == "step 1 was not done within 0.1 s (how far it is was not known within 0.5 s)"
        )
    finally:
        for_ever.set()
        watchdog.close()


def test_what_is_done_in_time_is_not_told(clocked):
    watchdog, clock, lines = clocked
    first, second = watchdog.begin("first"), watchdog.begin("second")
    clock.seconds += 30
    third = watchdog.begin("third")
    watchdog.done(first)
    clock.seconds += 30
    assert watchdog.check() == pytest.approx(30)
    assert lines == ["second was not done within 60 s"]
    watchdog.done(third)
    watchdog.done(second)
    clock.seconds += 300
    assert watchdog.check() == 60
    assert len(lines) == 1


def test_what_waited_for_something_that_is_done_has_its_time_again(clocked):
    watchdog, clock, lines = clocked
    first, second = watchdog.begin("first"), watchdog.begin("second")
    long = watchdog.begin("long", 1000)
    clock.seconds += 50
    watchdog.done(first)
    watchdog.restart()
    clock.seconds += 59
    assert watchdog.check() == pytest.approx(1) and lines == []
    clock.seconds += 1
    watchdog.check()
    assert lines == ["second was not done within 60 s"]
    watchdog.done(second)
    watchdog.restart()  # what was told is not begun again
    clock.seconds += 1000
    watchdog.check()
    assert lines[1:] == ["long was not done within 1000 s"]
    watchdog.done(long)


def test_a_chunk_is_late_whatever_steps_go_on_but_may_take_longer_to_compile(clocked):
    watchdog, clock, lines = clocked
    chunks = OwnPaceChunks(watchdog, 60)
    first, second, third = (chunks.begin(f"prefill worker {i}") for i in range(3))
    for _ in range(5):
        clock.seconds += 10
        watchdog.restart()  # a step is done
    chunks.hear(Compiles(second))
    chunks.hear(Computed(third))
    clock.seconds += 10
    watchdog.check()
    late = "chunk 1 of a prompt, by prefill worker 0, was not done within 60 s"
    assert lines == [late] and chunks.computed() == [third]
    clock.seconds += PREPARE_DEADLINE_S
    watchdog.check()
    assert lines == [late]
    chunks.hear(Computed(second))
    chunks.hear(Computed(7))  # nobody was told of it
    clock.seconds += 100
    watchdog.check()
    assert lines == [late] and chunks.computed(wait_s=1) == [second] and chunks.computed() == []
    chunks.hear(Computed(first))


def test_the_thread_tells_of_every_late_ticket_in_real_time():
    told: queue.Queue[tuple[str, float]] = queue.Queue()
    watchdog = Watchdog(0.3, lambda line: told.put((line, time.monotonic())))
    try:
        time.sleep(0.2)  # it is in the middle of a sleep when the tickets come
        began = time.monotonic()
        tickets = [watchdog.begin(f"step {i}") for i in range(3)]
        watchdog.done(tickets[1])
        lines = [told.get(timeout=5) for _ in range(2)]
        assert [line for line, _ in lines] == [f"step {i} was not done within 0.3 s" for i in (0, 2)]
        assert all(0.3 <= at - began < 1.5 for _, at in lines)
        for i in range(200):
            watchdog.done(watchdog.begin(f"quick {i}"))
        time.sleep(0.7)
        assert told.empty()
    finally:
        watchdog.close()


def test_nothing_is_late_after_close():
    told: list[str] = []
    watchdog = Watchdog(0.1, told.append)
    watchdog.begin("step")
    watchdog.close()
    time.sleep(0.3)
    assert told == []


def test_on_late_may_close_it():
    closed: queue.Queue[str] = queue.Queue()

    def on_late(line: str) -> None:
        watchdog.close()
        closed.put(line)

    watchdog = Watchdog(0.1, on_late)
    watchdog.begin("step")
    assert closed.get(timeout=5) == "step was not done within 0.1 s"


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan")])
def test_a_deadline_is_above_0(deadline_s):
    with pytest.raises(ValueError, match="must be above 0"):
        Watchdog(deadline_s, print)


STOPPED = """
import time
from jaxlamina.job.control.messages import Compiles, Computed
from jaxlamina.job.control.watchdog import Watchdog
from jaxlamina.job.group import PREPARE_DEADLINE_S, OwnPaceChunks
watchdog = Watchdog(2.0, lambda line: print(line, flush=True))
watchdog.begin("step")
print("began", flush=True)
time.sleep(30)
"""


def test_a_process_that_was_stopped_is_not_late_for_that():
    """Ctrl-Z and fg: the time in between counts for nobody."""
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "began\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        resumed = time.monotonic()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "step was not done within 2 s\n"
        assert time.monotonic() - resumed > 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
