"""Exit codes of ranks, of the jobs they are in and of commands. Plain numbers; the table for users is in
docs/launch.md."""

from __future__ import annotations

WRONG = 1
"""The command has done its work and found something wrong: a batch's prompt that could not be served, say."""
BAD_INPUT = 2
"""An option, a file or a setting is wrong, as the command or the first rank that looked at it says."""
FAILED = 3
"""A rank failed, whatever it died of and whatever it was doing."""
INTERRUPTED = 130
"""Ctrl-C; another signal that ends a launcher is 128 + its number."""
ENDED_BY_SIGTERM = (-15, 128 + 15)
"""Of a process that had no answer to it: by itself, or through a launcher."""
