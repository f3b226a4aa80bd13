"""What the scheduler decided that one step runs. Plain data."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxlamina.engine.request import Request
from jaxlamina.kv import Move
from jaxlamina.steps.buckets import StepSizes

PromptSpan = tuple[Request, tuple[int, int]]
"""A prompt, and from which position to which it is computed."""


class OwnChunk(NamedTuple):
    """A stretch of a prompt that a prefill worker computes at its own pace, from position ``first`` on. What
    comes before its span is stored already, and is not taken in."""

    request: Request
    span: tuple[int, int]
    first: int


class RunTogether(NamedTuple):
    """Requests that get one token each, and prompts that are computed with them, as one step of an
    executor."""

    decodes: tuple[Request, ...]
    prompts: tuple[PromptSpan, ...] = ()
    computed: OwnChunk | None = None  # all there is, if there is one
    size: StepSizes | None = None  # of several prompts in one call: what they are padded to


def one_by_one(prompts: Sequence[PromptSpan]) -> list[RunTogether]:
    return [RunTogether((), (prompt,)) for prompt in prompts]


@dataclass(frozen=True)
class ScheduledStep:
    """What one step runs: first the copies of KV to the host or back, then ``decodes`` oldest first, then
    ``prefills``.

    ``preempted`` lost their slots. A prefill may start from KV that one before it computes; ``spans`` has for
    each from which position to which it goes, and one that does not reach the last token gives none yet.
    ``moves_again``: KV that came back to the device and that others on the host still wait for; it must go to
    the same host slots again where taking it from the host empties them. ``brought``: from places where KV is
    kept by content. ``computed``: stretches of prompts that prefill workers have computed at their own pace,
    which the step takes in first; ``begun``: those that such workers begin with after it.
    """

    prefills: tuple[Request, ...]
    decodes: tuple[Request, ...]
    preempted: tuple[Request, ...]
    moves_out: tuple[Move, ...] = ()
    moves_in: tuple[Move, ...] = ()
    moves_again: tuple[Move, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    brought: tuple[Move, ...] = ()
    computed: tuple[OwnChunk, ...] = ()
    begun: tuple[OwnChunk, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those of which something is run."""
        return self.decodes + self.prefills + tuple(chunk.request for chunk in self.computed)

    def runs(
        self,
        *,
        n_prefill_workers: int = 0,
        mixed: bool = False,
        calls: Callable[[Sequence[PromptSpan]], list[RunTogether]] = one_by_one,
    ) -> list[RunTogether]:
        """The executor's steps that this one is made of, one after another.

        Prefill workers compute one prompt each beside the decodes; further prompts of a worker come after
        these, and then those that are nobody's of them, as ``calls`` has it. Without such workers the first
        prompt goes with the decodes if steps are ``mixed``. One that is scored does not: its logits are of
        all its tokens. What is left goes in steps as ``calls`` has it.
        """
        prompts = tuple(zip(self.prefills, self.spans, strict=True))
        if n_prefill_workers:
            taken_in = [RunTogether((), computed=chunk) for chunk in self.computed]
            theirs = tuple(prompt for prompt in prompts if prompt[0].worker is not None)
            local = [prompt for prompt in prompts if prompt[0].worker is None]
            return taken_in + self._runs_on_workers(theirs) + calls(local)
        n_alongside = int(bool(mixed and self.decodes and prompts and not prompts[0][0].scores_prompt))
        found = [RunTogether(self.decodes, prompts[:n_alongside])] if self.decodes else []
        return found + calls(prompts[n_alongside:])

    def _runs_on_workers(self, prompts: tuple[PromptSpan, ...]) -> list[RunTogether]:
        n_before: Counter[int] = Counter()
        turns: list[list[PromptSpan]] = []
        for prompt in prompts:
            worker = prompt[0].worker
            assert worker is not None
            if n_before[worker] == len(turns):
                turns.append([])
            turns[n_before[worker]].append(prompt)
            n_before[worker] += 1
        if self.decodes and not turns:
            turns.append([])
        return [RunTogether(() if i else self.decodes, tuple(turn)) for i, turn in enumerate(turns)]


def in_place(requests: Sequence[Request], before: Sequence[Request]) -> tuple[Request, ...]:
    """``requests`` in the order that leaves as many as can be in the rows that they had ``before``: newcomers
    take the rows of those that are gone, then the last ones do. So of a large slot table little changes from
    step to step."""
    going_on, were = set(requests), set(before)
    new = deque(request for request in requests if request not in were)
    rows = [r if r in going_on else new.popleft() if new else None for r in before]
    last = [r for r in rows[len(requests) :] if r is not None]
    kept = [r if r is not None else last.pop() for r in rows[: len(requests)]]
    return (*kept, *new)
