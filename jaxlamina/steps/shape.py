"""What a step's programs are compiled for. Pure data, and as such part of the control messages."""

from __future__ import annotations

from typing import Literal

import msgspec


class StepShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket: everything of a step that its programs are compiled for.

    ``batch`` requests with ``tokens`` new tokens each and room for ``context`` stored ones; ``rows`` and
    ``new`` are how many requests and new tokens an attention worker serves where it does not serve all.
    ``q_first``: q travels alone, before k and v are computed. ``n_batches``: the requests go as so many
    staggered batches of equal size, of each of which ``rows`` and ``new`` are. ``chunk``: of a decode step,
    the part of a prompt that is computed alongside, itself a step of one request. ``mini_batches``: the
    requests' messages of each layer go in so many parts. ``of_all``: logits of all tokens of prompts, not of
    each one's last. ``rank``: the prefill worker that runs it; 0: model ranks do. ``ready``: that worker has
    computed it before, and only sends what came of it. ``prefills``: what prefill workers run at the same
    time, a part each.
    """

    kind: Literal["decode", "prefill", "chunk"]
    batch: int
    tokens: int
    context: int
    rows: int = 0
    new: int = 0
    q_first: bool = True
    n_batches: int = 1
    chunk: StepShape | None = None
    mini_batches: int = 1
    of_all: bool = False
    rank: int = 0
    ready: bool = False
    prefills: tuple[StepShape, ...] = ()

    @property
    def parts(self) -> tuple[StepShape, ...]:
        """What model ranks run, or a prefill worker if they run nothing, and what prefill workers run beside
        it."""
        return (msgspec.structs.replace(self, prefills=()), *self.prefills)

    def part_of(self, prefill_rank: int) -> StepShape | None:
        """What that prefill worker runs of it, or for 0 model ranks; None: nothing."""
        return next((part for part in self.parts if part.rank == prefill_rank), None)

    @property
    def without_context(self) -> StepShape:
        """As a model rank sees it, to whom it is the same how many tokens are stored."""
        chunk = None if self.chunk is None else self.chunk.without_context
        return msgspec.structs.replace(self, context=0, chunk=chunk)

    @property
    def segments(self) -> tuple[StepShape, ...]:
        """What attention workers are told of one by one: its rows or prompts, the chunk alongside, prefill
        workers' parts."""
        own = msgspec.structs.replace(self, chunk=None, mini_batches=1, prefills=())
        return (own, *([] if self.chunk is None else [self.chunk]), *self.prefills)

    @property
    def logits_of(self) -> tuple[int, ...]:
        """What there are logits of in one staggered batch: ``[B]`` requests, or ``[B, T]`` tokens; of a chunk
        alongside one more."""
        n = self.batch_each + (self.chunk is not None)
        return (n, self.tokens) if self.of_all else (n,)

    @property
    def batch_each(self) -> int:
        """Requests of one staggered batch."""
        return self.batch // self.n_batches

    @property
    def model_rows(self) -> int:
        """Rows of ``tokens`` tokens that the model's slices are cut for: each token of a chunk is one."""
        return self.batch_each + (0 if self.chunk is None else self.chunk.tokens)

    def __str__(self) -> str:
        parts = [self.kind, f"batch {self.batch}"]
        parts += [f"tokens {self.tokens}"] if self.kind != "decode" or self.tokens != 1 else []
        parts += [f"context {self.context}"] if self.context else []
        parts += [f"{name} {n}" for name, n in (("rows", self.rows), ("new", self.new)) if n]
        parts += [f"in {self.n_batches} staggered"] if self.n_batches > 1 else []
        parts += [f"in {self.mini_batches} mini-batches"] if self.mini_batches > 1 else []
        parts += [] if self.q_first or self.n_batches > 1 else ["q with k and v"]
        parts += ["logits of all"] if self.of_all else []
        parts += ["computed before"] if self.ready else []
        parts += [f"on rank {self.rank}"] if self.rank else []
        parts += [f"with {part}" for part in (self.chunk, *self.prefills) if part is not None]
        return ", ".join(parts)
