"""Which prompts of a step are computed in one call: short ones, whose time is the reading of the weights.

Knows sizes, requests and their slots; no executor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxlamina.engine.request import Request
from jaxlamina.engine.scheduled_step import PromptSpan
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

    def first_of(self, prompts: Sequence[PromptSpan]) -> int:
        """How many of the first of ``prompts`` are computed together."""
        found = self._alike(prompts)
        return len(found) if len(found) >= _LEAST_PROMPTS and self.fit(found) is not None else 1

    def fit(self, prompts: Sequence[PromptSpan]) -> StepSizes | None:
        """What ``prompts``, of one call, are padded to; None where no such program is there yet."""
        width = self._width(prompts[0])
        context = max(start for _, (start, _) in prompts)
        rows = n_rows(self._sizes.buckets, self.n_tokens, width)
        return self._sizes.fit_known(StepSizes("chunk" if context else "prefill", rows, width, context))

    def _width(self, prompt: PromptSpan) -> int:
        start, stop = prompt[1]
        return bucket(stop - start, self._sizes.buckets.prompt)

    def _alike(self, prompts: Sequence[PromptSpan]) -> list[PromptSpan]:
        """The first ones that can be in one call: as wide, with stored tokens or without where that makes
        another program, and none after KV that another of them computes."""
        if not (self.n_tokens and prompts):
            return []
        buckets, width, follows = self._sizes.buckets, self._width(prompts[0]), prompts[0][1][0] > 0
        most = n_rows(buckets, self.n_tokens, width)
        found: list[PromptSpan] = []
        computed: list[np.ndarray] = []
        for request, (start, stop) in prompts[:most]:
            is_alike = self._width((request, (start, stop))) == width
            is_alike &= not buckets.prefills or (start > 0) == follows
            if not (is_alike and _is_plain(request, stop)):
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
