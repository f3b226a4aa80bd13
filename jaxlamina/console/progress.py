"""A bar for what takes a while: on a terminal only, so that logs and pipes stay clean but for a line now and
then where that is asked for. Knows nothing of what is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def bar(
    console: Console, what: str, *, in_bytes: bool = False, line_every_s: float | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Yields ``on_progress(n_done, n_all)``, which may come from another thread. The bar appears with its
    first call and is gone when all is done, or with the block. ``line_every_s``: where there is no terminal,
    seconds from line to line."""
    if not console.is_terminal:
        lines = None if line_every_s is None else _Lines(console, what, line_every_s)
        try:
            yield (lambda n_done, n_all: None) if lines is None else lines
        finally:
            if lines is not None:
                lines.stop()
        return
    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(what, total=None)

    def stop() -> None:
        if progress.live.is_started:
            progress.stop()

    def on_progress(n_done: int, n_all: int) -> None:
        progress.update(task, completed=n_done, total=n_all)
        if n_done < n_all:
            progress.start()
        else:
            stop()

    try:
        yield on_progress
    finally:
        stop()


class _Lines:
    """Says how far something is, from a thread of its own, from the first call until all is done."""

    def __init__(self, console: Console, what: str, every_s: float) -> None:
        self._console, self._what, self._every_s = console, what, every_s
        self._at = 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._say, name="progress", daemon=True)

    def __call__(self, n_done: int, n_all: int) -> None:
        self._at = n_done, n_all
        if n_done >= n_all:
            self.stop()
        elif self._thread.ident is None and not self._over.is_set():
            self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _say(self) -> None:
        while not self._over.wait(self._every_s):
            n_done, n_all = self._at
            self._console.print(f"{self._what}: {n_done} of {n_all}", highlight=False)
