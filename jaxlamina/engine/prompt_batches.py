"""Which prompts of a step are computed in one call: short ones, whose time is the reading of the weights.

Knows sizes, requests and their slots; no executor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxlamina.engine.request import Request
from jaxlamina.engine.scheduled_step import PromptSpan, RunTogether, one_by_one
from jaxlamina.steps.buckets import Buckets, CompiledSizes, StepSizes, bucket

# Fewer prompts take no longer one by one: a call's padding is computed, too.
_LEAST_PROMPTS, _LEAST_ROWS = 3, 4


def n_rows(buckets: Buckets, n_tokens: int, width: int) -> int:
    """Prompts of ``width`` padded tokens in a call of ``n_tokens``; 1 where they are too few to gain."""
    rows = min(n_tokens // width, buckets.batch[-1])
    return rows if rows >= _LEAST_ROWS else 1


class PromptBatches:
    """``n_tokens``: of a call, padding included; 0: each prompt is a call of its own."""

    def __init__(self, sizes: CompiledSizes, n_tokens: int) -> None:
        self._sizes, self.n_tokens = sizes, n_tokens

    def calls(self, prompts: Sequence[PromptSpan]) -> list[RunTogether]:
        """``prompts``, of one step, in their order."""
        found: list[RunTogether] = []
        without = set[tuple[int, bool]]()  # of which no program is there yet: that is found out once
        while len(prompts) >= _LEAST_PROMPTS:
            call = self._first_of(prompts, without)
            found.append(call)
            prompts = prompts[len(call.prompts) :]
        return found + one_by_one(prompts)

    def _first_of(self, prompts: Sequence[PromptSpan], without: set[tuple[int, bool]]) -> RunTogether:
        alone, kind = RunTogether((), (prompts[0],)), self._kind(prompts[0])
        width, _ = kind
        rows = n_rows(self._sizes.buckets, self.n_tokens, width)
        if rows < _LEAST_PROMPTS or kind in without:
            return alone
        alike = self._alike(prompts[:rows])
        if len(alike) < _LEAST_PROMPTS:
            return alone
        context = max(start for _, (start, _) in alike)
        size = self._sizes.fit_known(StepSizes("chunk" if context else "prefill", rows, width, context))
        if size is None:
            without.add(kind)
            return alone
        return RunTogether((), tuple(alike), size=size)

    def _kind(self, prompt: PromptSpan) -> tuple[int, bool]:
        """What it is padded to, and whether it has stored tokens where that makes another program."""
        start, stop = prompt[1]
        return bucket(stop - start, self._sizes.buckets.prompt), self._sizes.buckets.prefills and start > 0

    def _alike(self, prompts: Sequence[PromptSpan]) -> list[PromptSpan]:
        """The first ones that can be in one call: of one kind, and none after KV that another of them
        computes."""
        kind = self._kind(prompts[0])
        found: list[PromptSpan] = []
        computed: list[np.ndarray] = []
        for request, (start, stop) in prompts:
            if not (self._kind((request, (start, stop))) == kind and _is_plain(request, stop)):
                break
            slots = request.slots.view()
            if computed and start and np.isin(slots[:start], np.concatenate(computed)).any():
                break
            computed.append(slots[start:stop])
            found.append((request, (start, stop)))
        return found


def _is_plain(request: Request, stop: int) -> bool:
    """Whether all that comes of the prompt's logits is the request's first token."""
    return not request.scores_prompt and request.width == 1 and stop == request.n_tokens
