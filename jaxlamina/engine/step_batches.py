"""The batches of a step: what requests' tokens and slots are padded to, and the arrays that an executor gets.

Knows requests, spans of prompts, sizes that are compiled, and which slots are padding; not who is scheduled,
no sampling and no executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxlamina.engine.request import Request
from jaxlamina.engine.scheduled_step import OwnChunk, PromptSpan, RunTogether, ScheduledStep
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.buckets import CompiledSizes, StepSizes
from jaxlamina.steps.step import PromptPart


class StepBatches:
    """``n_slots``: of the executor, past which a slot is padding. ``newest(rows, known)``: the rows' last
    tokens, where they are; ``known`` has those that the host knows. ``mixed``: a prompt beside rows is in
    their program."""

    def __init__(
        self,
        sizes: CompiledSizes,
        newest: Callable[[Sequence[Request], np.ndarray], Any],
        *,
        n_slots: int,
        max_model_len: int,
        n_prefill_workers: int,
        mixed: bool,
    ) -> None:
        self._sizes, self._newest = sizes, newest
        self._n_slots, self._max_model_len = n_slots, max_model_len
        self._n_prefill_workers, self._mixed = n_prefill_workers, mixed

    # --- sizes ---

    def sizes_of(self, run: RunTogether) -> tuple[StepSizes | None, list[StepSizes]]:
        """What the rows, and each prompt, are padded to."""
        rows = _rows_of(run.decodes) if run.decodes else None
        prompts = [_prompt_of(*prompt) for prompt in run.prompts]
        if prompts and self._n_prefill_workers and run.prompts[0][0].worker is not None:
            # What runs on which prefill worker at once has a program of its own: nothing is padded to
            # another's.
            fit = self._sizes.buckets.fit
            return rows and fit(rows), [fit(prompt) for prompt in prompts]
        if rows is None or not prompts:
            return rows and self._sizes.fit(rows), [self._sizes.fit(prompt) for prompt in prompts]
        [prompt] = prompts
        rows = self._sizes.fit(replace(rows, alongside=prompt))
        assert rows.alongside is not None
        return rows, [rows.alongside]

    def chunk_tokens(self, n_tokens: int, n_stored: int) -> int:
        """`CompiledSizes.chunk_tokens`, as far as a request can be that long."""
        n_stored = min(n_stored, self._max_model_len - 2)
        n_tokens = min(n_tokens, self._max_model_len - n_stored)
        return self._sizes.chunk_tokens(n_tokens, n_stored, mixed=self._mixed)

    def sizes_to_tell(self, step: ScheduledStep) -> tuple[int, int, int, int] | None:
        """`LaunchedStep.sizes` of rows with one prompt at most, between which no KV moves."""
        if not step.decodes or len(step.prefills) > 1 or step.moves_out or step.moves_in or step.brought:
            return None
        rows = len(step.decodes), sum([len(request.slots) for request in step.decodes]) - len(step.decodes)
        if not step.prefills:
            return *rows, 0, 0
        [(start, stop)] = step.spans
        return *rows, self.chunk_tokens(stop - start, start), start

    # --- batches ---

    def rows(self, requests: Sequence[Request], size: StepSizes) -> DecodeBatch:
        known = [0 if request.n_in_flight else request.output_token_ids[-1] for request in requests]
        slots = [request.slots.view() for request in requests]
        batch = DecodeBatch.build(known, slots, size.buckets, self._n_slots)
        return batch._replace(tokens=self._newest(requests, batch.tokens))

    def prompts(self, prompts: Sequence[PromptSpan], size: StepSizes) -> PrefillBatch:
        """Rows past the prompts are padding of one token, and store nothing."""
        n_padded = size.batch - len(prompts)
        tokens = [request.all_token_ids()[start:stop] for request, (start, stop) in prompts]
        slots = [request.slots.view()[start:stop] for request, (start, stop) in prompts]
        earlier = [request.slots.view()[:start] for request, (start, _) in prompts]
        return PrefillBatch.build(
            tokens + [[0]] * n_padded,
            slots + [np.full(1, self._n_slots, np.int32)] * n_padded,
            size.buckets,
            self._n_slots,
            earlier + [np.empty(0, np.int32)] * n_padded if size.context else (),
        )

    def to_compute(self, chunk: OwnChunk) -> PromptPart:
        """What a prefill worker computes at its own pace."""
        request, span = chunk.request, (chunk.first, chunk.span[1])
        assert request.worker is not None
        workers, of_all = (request.worker,), request.scores_prompt
        wanted = StepSizes("prefill", 1, span[1] - span[0], 0, workers=workers, of_all=of_all, own_pace=True)
        size = replace(self._sizes.fit(wanted), context=span[0])  # which the worker has by position
        return PromptPart(self.prompts([(request, span)], size), request.scores_prompt, request.worker)

    def to_take_in(self, chunk: OwnChunk) -> PromptPart:
        """The same once it is computed, for attention workers."""
        part, (start, _) = replace(self.to_compute(chunk), ready=True), chunk.span
        if chunk.first < start:  # what is stored already says where the others are best
            batch, before = part.batch, chunk.request.slots.view()[None, :start]
            part.batch.slots[:, : start - chunk.first] = self._n_slots
            part = replace(part, batch=batch._replace(slot_table=before, lengths=np.full(1, start, np.int32)))
        return part


def _rows_of(requests: Sequence[Request]) -> StepSizes:
    """The numbers of a decode step of ``requests``, not padded."""
    return StepSizes("decode", len(requests), 1, max(len(request.slots) for request in requests) - 1)


def _prompt_of(request: Request, span: tuple[int, int]) -> StepSizes:
    """Those of a prompt's ``span``."""
    start, stop = span
    return StepSizes("chunk" if start else "prefill", 1, stop - start, start, of_all=request.scores_prompt)
