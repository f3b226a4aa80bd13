"""A server that is all but begun, for when the one that answers ends: weights are loaded and programs
compiled, and no file, no journal and no kept KV is written to before its supervisor says that it takes over.

They speak by files beside the socket that the server will listen at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlamina.engine.warm_up import warm_up
from jaxlamina.process import garbage
from jaxlamina.server.pieces import STANDS_BY, TAKES_OVER
from jaxlamina.server.run import ToCompile
from jaxlamina.server.settings import Settings

if TYPE_CHECKING:
    from jaxlamina.llm import LLM

_LOOK_S = 0.02


def stand_by(llm: LLM, settings: Settings, on_progress: Callable[[int, int], None]) -> None:
    """Returns when it is this server's turn."""
    assert settings.uds is not None, "a supervisor gives it a socket"
    first = ToCompile.of(llm, settings).first
    on_progress(0, len(first))
    if settings.warm_up and not settings.wait_for_all:
        llm.executor.stay_alone(True)
    warm_up(
        llm.engine,
        first,
        lambda n: on_progress(n, len(first)),
        lambda: False,
        all_of_drawing=settings.wait_for_all,
    )
    garbage.settle()  # now, and not when requests wait
    Path(settings.uds + STANDS_BY).touch()
    takes_over = Path(settings.uds + TAKES_OVER)
    while not takes_over.exists():
        time.sleep(_LOOK_S)
