"""The bars of the Python interface, on stderr: of weights that are read, and of prompts that are finished.

Knows numbers, and a user's own kind of bar; nothing of what is done. ``rich`` is imported where a bar is
made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# Whether there is a bar, or what makes one: called with ``total``, it has ``update(n)`` and ``close()``, as
# tqdm has.
UseTqdm = bool | Callable[..., Any]


@contextmanager
def loading_bar(wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Where the progress of loading goes: to a bar, on a terminal."""
    if not wanted:
        yield None
        return
    with stderr_bar("reading weights", in_bytes=True) as on_progress:
        yield on_progress


@contextmanager
def prompt_bar(use_tqdm: UseTqdm, n: int) -> Iterator[Callable[[], Any]]:
    """What to call for every prompt that is finished, of ``n``."""
    if callable(use_tqdm):
        made = use_tqdm(total=n, desc="Processed prompts", dynamic_ncols=True)
        try:
            yield lambda: made.update(1)
        finally:
            made.close()
    elif use_tqdm and n:
        with stderr_bar("prompts") as on_progress:
            on_progress(0, n)
            counted = itertools.count(1)
            yield lambda: on_progress(next(counted), n)
    else:
        yield lambda: None


def stderr_bar(what: str, in_bytes: bool = False) -> AbstractContextManager[Callable[[int, int], None]]:
    """As `jaxlamina.console.progress.bar`."""
    from rich.console import Console

    from jaxlamina.console.progress import bar

    return bar(Console(stderr=True), what, in_bytes=in_bytes)
