"""Errors a user can cause. Knows nothing of where they are shown: the CLI prints them as one line and exits 2."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input from outside: the message is one line that says what is wrong and what to do next."""
