"""A bar for what takes a while: on a terminal only, so that logs and pipes stay clean. Knows nothing of what is done."""

from __future__ import annotations

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
def bar(console: Console, what: str, *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yields ``on_progress(n_done, n_all)``, which may come from another thread. The bar appears with its first call and is
    gone when all is done, or with the block."""
    if not console.is_terminal:
        yield lambda n_done, n_all: None
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
