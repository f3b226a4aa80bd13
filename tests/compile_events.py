"""What JAX traces, lowers or compiles meanwhile. Knows no program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compile_events() -> Iterator[list[str]]:
    """Within it, names of what was traced, lowered or compiled so far, in any thread of this process."""
    found: list[str] = []

    def heard(name: str, _: float, **__: object) -> None:
        if "/compile/" in name:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
