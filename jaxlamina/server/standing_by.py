"""A server that is all but begun, for when the one that answers ends: weights are loaded and programs
compiled, and no file, no journal and no kept KV is written to before its supervisor says that it takes over.

They speak by files beside the socket that the server will listen at.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlamina.engine.warm_up import Behind, warm_up
from jaxlamina.process import garbage
from jaxlamina.server.pieces import STANDS_BY, TAKES_OVER
from jaxlamina.server.run import GOING_ON_S, ToCompile
from jaxlamina.server.settings import Settings

if TYPE_CHECKING:
    from jaxlamina.llm import LLM

_LOOK_S = 0.02


def stand_by(llm: LLM, settings: Settings, on_progress: Callable[[int, int], None]) -> Behind | None:
    """Returns when it is this server's turn: what compiles the programs that are not there yet, if there are
    any. Until then it does so, since requests that wait would share Python's lock with it."""
    assert settings.uds is not None, "a supervisor gives it a socket"
    todo = ToCompile.of(llm, settings)
    on_progress(0, len(todo.first))
    compiles_behind = settings.warm_up and not settings.wait_for_all
    is_alone = compiles_behind and llm.executor.stay_alone(True)
    warm_up(
        llm.engine,
        todo.first,
        lambda n: on_progress(n, len(todo.first)),
        lambda: False,
        all_of_drawing=settings.wait_for_all,
    )
    garbage.settle()  # now, and not when requests wait
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    behind: Behind | None = None

    def on_done(n: int) -> None:
        if behind is not None and n == behind.n_all:
            calls.put(garbage.settle)

    if compiles_behind and todo.all:
        behind = todo.behind(llm.engine, on_done, calls.put, is_alone=is_alone, nobody_waits=True)
        behind.start()
    Path(settings.uds + STANDS_BY).touch()
    takes_over = Path(settings.uds + TAKES_OVER)
    while not takes_over.exists():
        with suppress(queue.Empty):
            calls.get(timeout=_LOOK_S)()
    # A call that was not made goes along with `behind`: requests wait now.
    if behind is not None:
        behind.rest(GOING_ON_S)
    return behind
