"""A bar for bytes read: on a terminal only, so that logs and pipes stay clean. Knows nothing of what is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bytes_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields ``on_progress(done_bytes, total_bytes)``. The bar appears with its first call and is gone afterwards."""
    if not console.is_terminal:
        yield lambda done_bytes, total_bytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(what, total=None)

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        progress.start()
        progress.update(task, completed=done_bytes, total=total_bytes)

    try:
        yield on_progress
    finally:
        if progress.live.is_started:
            progress.stop()
