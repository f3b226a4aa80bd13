"""How long a thread may keep Python's lock from others that wait for it, and when it leaves it to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SHORT_S = 0.0002
_waits: ContextVar[Callable[[], object]] = ContextVar("_waits", default=lambda: None)


@contextmanager
def short_turns() -> Iterator[None]:
    """Meanwhile all threads of this process have Python for 0.2 ms at most in turn, and not for 5 ms, half a
    step."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SHORT_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def wait_between_parts(waits: Callable[[], object]) -> None:
    """Has `between_parts` call ``waits`` from now on, in this thread and in those to which it hands its
    context."""
    _waits.set(waits)


def between_parts() -> None:
    """To be called by whatever makes a program, between two parts of that, each of which may keep Python for
    tenths of a second: others may go first. Where it is called nothing is held that others wait for."""
    _waits.get()()
