"""How the end of a group is told to whoever uses the channel. Knows nothing of how it came to be known."""

from __future__ import annotations

LAST_WORDS_S = 1.0
"""For handing a Fault, Refused or Bye to a peer that may no longer read."""


class ControlError(RuntimeError):
    """The group cannot go on: a rank has failed, has gone, or did not answer in time. ``line`` names it."""

    def __init__(self, rank: int, line: str) -> None:
        super().__init__(line)
        self.rank = rank
        self.line = line
