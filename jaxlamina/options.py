"""Options of models, engines and jobs: what their values may be. Plain Python; knows no JAX, no command line and no file."""

from __future__ import annotations

from jaxlamina.errors import UserError

POLICY_NAMES = ("fifo", "fcfs", "priority", "chat-first", "shortest-remaining")  # fcfs: vLLM's name of fifo
SERVER_POLICY = "chat-first"
"""What servers take where nobody chooses: chats and batches meet there, and somebody waits for a chat."""


def check_headroom(share: float | None) -> None:
    """``UserError`` for what is no share."""
    if share is not None and not 0 <= share <= 1:
        raise UserError(f"kv_headroom={share} must be from 0 to 1, or None")


def check_policy_name(name: str) -> None:
    """``UserError`` for what cannot name a policy; whether a class is there is seen when it is loaded."""
    module, _, cls = name.partition(":")
    if name not in POLICY_NAMES and not (module and cls):
        raise UserError(
            f"scheduling_policy={name!r} must be one of {', '.join(POLICY_NAMES)}, or a class: package.module:Class"
        )
