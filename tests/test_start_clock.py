"""Where a start goes: each phase's seconds, from the process's own beginning."""

from __future__ import annotations

import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.process.start_clock import StartClock


@given(st.lists(st.sampled_from(["imports", "weights", "programs"]), max_size=8))
def test_phases_add_up_to_the_start(phases: list[str]) -> None:
    began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    clock = StartClock(began_s)
    for phase in phases:
        clock.done(phase)
    assert not clock.seconds
    until_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    clock.over()
    clock.done("later")
    assert list(clock.seconds) == list(dict.fromkeys(phases))
    assert all(s >= 0 for s in clock.seconds.values()) and sum(clock.seconds.values()) <= until_s - began_s


def test_what_came_before_a_restart_is_no_part_of_the_start() -> None:
    clock = StartClock(time.clock_gettime(time.CLOCK_BOOTTIME) - 100)
    clock.done("imports")
    clock.restart()
    clock.done("weights")
    clock.over()
    assert list(clock.seconds) == ["weights"] and clock.seconds["weights"] < 50


def test_the_first_phase_begins_with_the_process() -> None:
    script = (
        "import time; time.sleep(0.3)\n"
        "from jaxlamina.process.start_clock import CLOCK\n"
        "CLOCK.done('imports'); CLOCK.over(); print(CLOCK.seconds['imports'], CLOCK)"
    )
    began_s = time.monotonic()
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    took_s, words = said.split(" ", 1)
    assert 0.3 <= float(took_s) <= time.monotonic() - began_s + 0.02
    assert words == f"started in {float(took_s):.1f} s: imports {float(took_s):.1f}\n"
