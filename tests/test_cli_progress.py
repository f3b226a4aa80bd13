"""How far something is: a bar on a terminal, a line now and then elsewhere where that is asked for."""

from __future__ import annotations

import io
import time

from rich.console import Console

from jaxlamina.console.progress import bar


def test_progress_is_said_in_lines_where_there_is_no_terminal():
    """Now and then while it lasts, and no more once it is over."""
    console = Console(file=io.StringIO(), force_terminal=False)
    with bar(console, "compiling", line_every_s=0.02) as on_progress:
        on_progress(0, 3)
        until = time.monotonic() + 30
        while "compiling: 0 of 3" not in console.file.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        on_progress(2, 3)
        while "compiling: 2 of 3" not in console.file.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        on_progress(3, 3)
    assert (
        "compiling: 0 of 3\n" in console.file.getvalue() and "compiling: 2 of 3\n" in console.file.getvalue()
    )
    assert "3 of 3" not in console.file.getvalue()
    quiet = Console(file=io.StringIO(), force_terminal=False)
    with bar(quiet, "reading") as on_progress:
        on_progress(0, 3)
    assert quiet.file.getvalue() == ""
