"""Python's garbage collection while steps are run: what lives as long as the process is not looked through
again and again.

A traced and compiled model is some hundred thousand Python objects. Going through them takes a tenth of a
second or more, in which no step is launched, and Python does so whenever enough has been made since.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 1_000_000
_USUAL = gc.get_threshold()


def hold() -> None:
    """Until `settle` collections look through what was made lately, and never through all that there is. For
    a process that begins: imports, weights and programs stay."""
    gc.set_threshold(*_USUAL[:2], _NEVER)


def settle() -> None:
    """Leaves what there is out of collections to come, once what is garbage of it is gone. For a process that
    runs steps and nothing else: cycles among what there is are not found any more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)


def unsettle() -> None:
    """Before what there was is given up for something else."""
    gc.unfreeze()


@contextmanager
def young_only() -> Iterator[None]:
    """Within it as after `hold`: tracing a program makes so much that Python would go through everything
    again and again, while steps wait. What is garbage by then goes with the next `settle`."""
    thresholds = gc.get_threshold()
    hold()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
