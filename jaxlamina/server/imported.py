"""A process of a job that is started ahead of its turn, and has imported what it needs by then: it holds no
device, no port and no file. For jobs of which nothing else stands by (`jaxlamina.server.standing_by`).

Knows files beside a socket, and names of modules.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from jaxlamina.process.start_clock import CLOCK
from jaxlamina.server.pieces import IMPORTS, STANDS_BY, TAKES_OVER

OF_A_SERVER = ("jaxlamina.llm", "jaxlamina.server.run", "jaxlamina.server.standing_by")
_LOOK_S = 0.02


def await_turn(modules: Sequence[str], *, says_so: bool = True) -> None:
    """Where a supervisor has started this process ahead (`IMPORTS`): imports ``modules``, ``says_so``, and
    returns when it is its turn. Otherwise does nothing."""
    socket = os.environ.pop(IMPORTS, None)
    if socket is None:
        return
    for name in modules:
        importlib.import_module(name)
    if says_so:
        Path(socket + STANDS_BY).touch()
    takes_over = Path(socket + TAKES_OVER)
    while not takes_over.exists():
        time.sleep(_LOOK_S)
    CLOCK.restart()
