"""From batches to what programs are given: rows and prompts with their slots on each worker, and the model's
inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from jaxlamina.kv.planned_rows import PlannedRows
from jaxlamina.kv.pool_book import PoolBook
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch, with_chunk
from jaxlamina.steps.shape import StepShape


class Part(NamedTuple):
    """A step, or one prefill worker's part of it. ``inputs``: of the model's program
    (`ModelProgram.step`)."""

    rows: PlannedRows
    inputs: tuple[Any, ...]

    @property
    def shape(self) -> StepShape:
        return self.rows.shape

    def _with(self, **changes: Any) -> Part:
        return self._replace(rows=self.rows._replace(shape=msgspec.structs.replace(self.shape, **changes)))


def rows_part(
    book: PoolBook, batch: DecodeBatch, *, q_first: bool, n_batches: int = 1, mini_batches: int = 1
) -> Part:
    """Rows of one token each, as so many staggered batches, or with messages in so many parts."""
    rows = book.plan("decode", batch, q_first, n_batches)
    return Part(rows, (batch.tokens, batch.positions))._with(mini_batches=mini_batches)


def computed_part(book: PoolBook, batch: PrefillBatch, *, scored: bool, rank: int) -> Part:
    """A prompt that the prefill worker of that rank has computed: its program needs no inputs."""
    rows = book.plan("prefill", batch, False, on_prefill_worker=True, computed=True)
    return Part(rows, ())._with(of_all=scored, rank=rank, ready=True)


def prompts_part(book: PoolBook, batch: PrefillBatch, *, q_first: bool, scored: bool, rank: int = 0) -> Part:
    """Prompts alone, or what follows their stored tokens; on the prefill worker of that rank, unless model
    ranks run them."""
    rows = book.plan(batch.kind, batch, q_first, on_prefill_worker=rank > 0)
    inputs = batch.tokens, batch.positions, *(() if scored else (batch.logits_at,))
    return Part(rows, inputs)._with(of_all=scored, rank=rank)


def mixed_part(book: PoolBook, rows: DecodeBatch, chunk: PrefillBatch, *, q_first: bool) -> Part:
    """Rows, and a prompt whose tokens are rows beside them."""
    planned = book.plan("decode", rows, q_first).with_chunk(book.plan(chunk.kind, chunk, q_first))
    return Part(planned, (*with_chunk(rows, chunk), chunk.logits_at))
