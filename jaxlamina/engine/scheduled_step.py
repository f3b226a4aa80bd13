"""What the scheduler decided that one step runs. Plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from jaxlamina.engine.request import Request
from jaxlamina.kv import Move

PromptSpan = tuple[Request, tuple[int, int]]
"""A prompt, and from which position to which it is computed."""


class RunTogether(NamedTuple):
    """Requests that get one token each, and prompts that are computed with them, as one step of an
    executor."""

    decodes: tuple[Request, ...]
    prompts: tuple[PromptSpan, ...] = ()


@dataclass(frozen=True)
class ScheduledStep:
    """What one step runs: first the copies of KV to the host or back, then ``decodes`` oldest first, then
    ``prefills``.

    ``preempted`` lost their slots. A prefill may start from KV that one before it computes; ``spans`` has for
    each from which position to which it goes, and one that does not reach the last token gives none yet.
    ``moves_again``: KV that came back to the device and that others on the host still wait for; it must go to
    the same host slots again where taking it from the host empties them. ``brought``: from places where KV is
    kept by content.
    """

    prefills: tuple[Request, ...]
    decodes: tuple[Request, ...]
    preempted: tuple[Request, ...]
    moves_out: tuple[Move, ...] = ()
    moves_in: tuple[Move, ...] = ()
    moves_again: tuple[Move, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    brought: tuple[Move, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.decodes + self.prefills

    def runs(self, *, n_prefill_workers: int = 0, mixed: bool = False) -> list[RunTogether]:
        """The executor's steps that this one is made of, one after another.

        Prefill workers compute one prompt each beside the decodes; further prompts of a worker come after
        these. Without such workers each prompt is a step of its own, but that the first one goes with the
        decodes if steps are ``mixed``. One that is scored does not: its logits are of all its tokens.
        """
        prompts = tuple(zip(self.prefills, self.spans, strict=True))
        if prompts and n_prefill_workers:
            return self._runs_on_workers(prompts)
        n_alongside = int(bool(mixed and self.decodes and prompts and not prompts[0][0].scores_prompt))
        found = [RunTogether(self.decodes, prompts[:n_alongside])] if self.decodes else []
        return found + [RunTogether((), (prompt,)) for prompt in prompts[n_alongside:]]

    def _runs_on_workers(self, prompts: tuple[PromptSpan, ...]) -> list[RunTogether]:
        n_before: Counter[int] = Counter()
        turns: list[list[PromptSpan]] = []
        for prompt in prompts:
            worker = prompt[0].worker
            if n_before[worker] == len(turns):
                turns.append([])
            turns[n_before[worker]].append(prompt)
            n_before[worker] += 1
        return [RunTogether(() if i else self.decodes, tuple(turn)) for i, turn in enumerate(turns)]
