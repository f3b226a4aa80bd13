"""What a supervisor and a server that it follows say to each other. Plain data, imported without JAX.

The supervisor asks with a line of JSON, a `Follow`, before the request's own body, and gets lines of JSON
back, each a `Piece`.
"""

from __future__ import annotations

import msgspec

FOLLOWED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PATH = "/followed"
"""Before the path of the request that is followed, one of `FOLLOWED`."""
SECRET = "JAXLAMINA_SUPERVISOR"
"""The environment's variable with what a supervisor proves itself by, in `HEADER`. Without it nobody is
served so."""
HEADER = "x-jaxlamina-supervisor"
WHY = "JAXLAMINA_WHY"
"""The environment's variable with the path of a file that the first process of a job to end with an error
writes its line to."""
STANDBY = "JAXLAMINA_STANDBY"
"""The environment's variable of a server that waits for another's end (`jaxlamina.server.standing_by`)."""
IMPORTS = "JAXLAMINA_IMPORTS"
"""The same of one that has imported what it needs, and no more, with its socket's path
(`jaxlamina.server.imported`)."""
STANDS_BY, TAKES_OVER = ".stands-by", ".takes-over"
"""What files are called, after their socket's name: made by a server that can take over, and by the
supervisor when it is to."""
STEP_SECONDS = "x-step-seconds"
"""Of an answer of `/health`: for how long the engine has been in its step."""


class Follow(msgspec.Struct, frozen=True):
    """What makes an answer the same in another process: ``key``, of which its ids are made, ``created`` (Unix
    time), ``seed``, for what has none, of sequences (prompt, continuation) the tokens ``written`` so far and
    how many of these need not be told again (``n_given``), and of prompts how many tokens had their KV there
    at first (``n_cached``). ``n_together``: requests that go on, this one with them, and are asked for at
    once. ``was_taken``: an earlier process has accepted it, so that what is too much at once is no reason to
    refuse it."""

    key: str
    created: int
    seed: int
    written: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    n_given: tuple[tuple[int, int, int], ...] = ()
    n_cached: tuple[tuple[int, int], ...] = ()
    n_together: int = 0
    was_taken: bool = False


class Opening(msgspec.Struct, frozen=True):
    """Whether an answer is a stream, how many tokens each of its prompts has, and how many continuations it
    gives, of all prompts together."""

    is_stream: bool
    n_prompt_tokens: tuple[int, ...]
    n_choices: int = 1


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of an answer, or with ``status`` the end of it.

    - ``opening``: of the first, which comes once the request is accepted.
    - ``token`` number ``at`` of sequence ``of`` = (prompt, continuation), and with it ``text``, the events of
      a stream as they go out. ``n_found``: with a sequence's first new token, of the tokens before it those
      whose KV was there, where it was computed by itself.
    - ``status``: 200 with the stream's last ``text`` or the whole ``answer``, JSON; or an error's, likewise.
    - ``gone``: the server fails or ends; the request is nobody's fault.
    """

    text: str = ""
    opening: Opening | None = None
    of: tuple[int, int] | None = None
    token: int | None = None
    at: int = 0
    n_found: int | None = None
    status: int = 0
    answer: str = ""
    gone: str | None = None

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"
