"""Errors a user can cause. Knows nothing of where they are shown: the CLI prints them as one line and exits
2."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input from outside: the message is one line that says what is wrong and what to do next."""


def contained(error: BaseException) -> Exception:
    """What one request's work raised, as something that ends that request alone. Libraries in Rust raise
    their panics as ``BaseException``; what ends the program is raised again."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
