"""What is on the device while the host goes on: steps whose tokens nobody has looked at, and those tokens
themselves.

Knows requests as rows of a batch, device arrays and a clock; nothing of scheduling, text or how a model is
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.engine.request import Request
from jaxlamina.process.compile_ahead import ProgramAhead
from jaxlamina.sampling.sampler import Sampled

T = TypeVar("T")


class Scored(NamedTuple):
    """How likely ``n`` tokens of a prompt are, the first at position ``first``; ``reported`` has padding
    after them."""

    first: int
    n: int
    reported: Sampled


class Found(NamedTuple):
    """What comes of a batch, as numpy arrays."""

    scored: Sampled | None
    sampled: Sampled | None
    candidates: tuple[np.ndarray, np.ndarray] | None


@dataclass(frozen=True)
class LaunchedRows:
    """A batch of a step, launched: what comes of its first rows, one a request."""

    requests: Sequence[Request]
    is_decode: bool
    sampled: Sampled | None = None  # of the rows that are drawn; what it has for others is thrown away
    # Of beams: likeliest tokens, their log-probabilities.
    candidates: tuple[jax.Array, jax.Array] | None = None
    scored: Scored | None = None  # of a prompt whose log-probabilities are wanted; that of the first request
    logits: jax.Array | None = None  # of a part of a prompt, which gives no token
    shapes_next: bool = False  # what it gives must be known before the next step can be launched

    @property
    def is_done(self) -> bool:
        return bool(jax.tree.leaves((self._results, self.logits))[-1].is_ready())

    def fetch(self) -> None:
        """Starts the copy to the host."""
        for x in jax.tree.leaves(self._results):
            x.copy_to_host_async()

    def read(self) -> Found:
        """Waits for all of it."""
        if self.logits is not None:
            self.logits.block_until_ready()
        return Found(*jax.device_get(self._results))

    @property
    def _results(self) -> tuple[Any, ...]:
        sampled = self.sampled and self.sampled._replace(column=None)  # for the next step alone
        return self.scored and self.scored.reported, sampled, self.candidates


@dataclass
class LaunchedStep:
    """A step that has been launched, batch by batch."""

    batches: list[LaunchedRows] = field(default_factory=list)
    # Rows, their stored tokens, prompt tokens as padded, and stored tokens before these; None: it has more.
    sizes: tuple[int, int, int, int] | None = None
    seconds: float = 0.0  # of what has been read

    @property
    def shapes_next(self) -> bool:
        """Whether what it gives says which sequences there are in the next step, or what they may write."""
        return any(rows.shapes_next for rows in self.batches)


class NewestTokens:
    """The tokens that the latest step draws, kept on the device for the next one. ``begin`` once a step, then
    ``take`` once at most, then ``keep`` for each batch."""

    def __init__(self, max_rows: int, largest_batch: int) -> None:
        """``max_rows``: of a step, over its batches; ``largest_batch``: the rows of one, padding included."""
        self._none = jnp.zeros(max_rows + largest_batch, jnp.int32)
        self._kept: list[tuple[Sequence[Request], Sampled]] = []
        self._before: list[tuple[Sequence[Request], Sampled]] = []

    def begin(self) -> None:
        self._before, self._kept = self._kept, []

    def take(self, requests: Sequence[Request], known: np.ndarray) -> np.ndarray | jax.Array:
        """Tokens ``[B, 1]`` int32 for a decode step of ``requests``: as ``known [B, 1]`` has them, but those
        in flight. What padding has may be any token."""
        n_in_flight = sum(request.n_in_flight > 0 for request in requests)
        if not n_in_flight:
            return known
        if n_in_flight == len(requests):
            # The same rows as in the step before, nearly always: to launch a program costs more than to look.
            rows = list(requests)
            for before, sampled in self._before:
                column = sampled.column
                if column is not None and len(column) == len(known) and list(before[: len(rows)]) == rows:
                    return column
        tokens, of_request = self._none, dict[Request, int]()
        for before, sampled in self._before:
            first = len(of_request)
            of_request |= {request: first + row for row, request in enumerate(before)}
            tokens = _placed(tokens, sampled.tokens, first)
        places = np.full(len(known), -1, np.int32)
        for row, request in enumerate(requests):
            if request.n_in_flight:
                places[row] = of_request[request]
        return _picked(tokens, places, known)

    def keep(self, requests: Sequence[Request], sampled: Sampled) -> None:
        """``sampled`` has what is drawn for ``requests``, and padding."""
        self._kept.append((requests, sampled))

    def warm_up(self, tokens: jax.Array) -> None:
        """Compiles both for a batch of as many rows as ``tokens`` [B] int32, of which nothing is looked at
        but its shape."""
        kept, n = self._none, tokens.shape[0]
        for _ in range(2):  # only the second has what is kept where the first put it
            kept = _placed(kept, tokens, 0)
        _picked(kept, np.full(n, -1, np.int32), np.zeros((n, 1), np.int32))


@ProgramAhead
def _picked(tokens: jax.Array, places: jax.Array, known: jax.Array) -> jax.Array:
    return jnp.where(places[:, None] < 0, known, tokens[places][:, None])


@ProgramAhead
def _placed(all_tokens: jax.Array, tokens: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(all_tokens, tokens, (first,))


class StepTimes:
    """When steps are read: how long each took, and how long the host waited for it. Times are seconds of
    ``clock``.

    What the *device* waits for the host is not seen from here: a device that runs dry while the host launches
    looks as one at work does. `jaxlamina.profiling.under_load` records it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at = 0.0
        self._rests = True

    def rest(self) -> None:
        """There is nothing to be done."""
        self._rests = True

    def begin(self) -> None:
        """A step is begun."""
        if self._rests:
            self._rests = False
            self._read_at = self._clock()

    def timed(self, run: Callable[[], T]) -> tuple[T, float]:
        """(What ``run`` gives, the host's seconds for it.)"""
        began = self._clock()
        return run(), self._clock() - began

    def read(self, rows: LaunchedRows) -> tuple[Found, float, float]:
        """(`Rows.read`, seconds since those before were read or there was something to do, seconds of
        waiting.)"""
        found, waited = self.timed(rows.read)
        now = self._clock()
        took, self._read_at = now - self._read_at, now
        return found, took, waited
