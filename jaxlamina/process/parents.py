"""What becomes of a process when another one ends. Linux only; elsewhere nothing."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when the one that started it is gone, however that ended.


    SIGKILL for a rank: jax.distributed handles SIGTERM, and goes on.
    """
    pr_set_pdeathsig = 1
    _prctl(pr_set_pdeathsig, int(number))


def take_orphans() -> None:
    """Has processes that a child of this one leaves behind become its own children."""
    pr_set_child_subreaper = 36
    _prctl(pr_set_child_subreaper, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
