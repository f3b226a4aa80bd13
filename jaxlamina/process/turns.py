"""How long a thread may keep Python's lock from another that waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SHORT_S = 0.0002


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
