"""One step's inputs as padded arrays. Knows tokens, positions and slots; no model and no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlamina.steps.buckets import Buckets, bucket

Ints = Sequence[int] | np.ndarray


class DecodeBatch(NamedTuple):
    """One new token for each of B rows. Rows past the requests are padding, and store nothing."""

    tokens: Any  # [B, 1] int32: numpy's, or jax's where the step before this one draws them
    positions: np.ndarray  # [B, 1] int32
    slot_table: np.ndarray  # [B, C] int32: slots of the earlier tokens, by position
    lengths: np.ndarray  # [B] int32: how many earlier tokens
    new_slots: np.ndarray  # [B] int32: where the new token's KV goes; S for padding

    @classmethod
    def build(cls, tokens: Ints, slots: Sequence[Ints], buckets: Buckets, n_slots: int) -> DecodeBatch:
        """``tokens[b]`` is row b's newest token; ``slots[b]`` are the slots of all its tokens, that one last.

        ``n_slots`` is S, the pool's size. ``ValueError`` if there are more rows or tokens than buckets hold.
        """
        lengths = [len(row) - 1 for row in slots]
        size, width = bucket(len(tokens), buckets.batch), bucket(max(lengths), buckets.context)
        batch = cls(
            np.zeros((size, 1), np.int32),
            np.zeros((size, 1), np.int32),
            np.zeros((size, width), np.int32),
            np.zeros(size, np.int32),
            np.full(size, n_slots, np.int32),
        )
        n = len(tokens)
        batch.tokens[:n, 0] = tokens
        batch.positions[:n, 0] = batch.lengths[:n] = lengths
        batch.new_slots[:n] = [row_slots[-1] for row_slots in slots]
        for row, row_slots, length in zip(batch.slot_table, slots, lengths, strict=False):
            row[:length] = row_slots[:-1]
        return batch

    def padded(self, n_rows: int, n_slots: int) -> DecodeBatch:
        """The same with so many rows: those that are added store nothing."""
        more = n_rows - len(self.tokens)
        if not more:
            return self
        tokens, positions, table, lengths, new = self

        def longer(x: Any, fill: int = 0) -> Any:
            xp = x.__array_namespace__()
            return xp.concat([x, xp.full((more, *x.shape[1:]), fill, dtype=x.dtype)])

        return DecodeBatch(
            longer(tokens), longer(positions), longer(table), longer(lengths), longer(new, n_slots)
        )


class PrefillBatch(NamedTuple):
    """Prompts, or what is left of them after tokens whose KV is stored already; padded on the right.

    A pad's position repeats the last valid one and it is not stored. C is 0 where no row has earlier tokens,
    unless ``Buckets.prefills`` is false.
    """

    tokens: np.ndarray  # [B, T] int32
    positions: np.ndarray  # [B, T] int32, from lengths[b] on
    logits_at: np.ndarray  # [B] int32: index of each row's last token
    slots: np.ndarray  # [B, T] int32: where each token's KV goes; S for padding
    slot_table: np.ndarray  # [B, C] int32: slots of the earlier tokens, by position
    lengths: np.ndarray  # [B] int32: how many earlier tokens

    @property
    def has_earlier(self) -> bool:
        """Whether any row follows tokens whose KV is stored."""
        return self.slot_table.shape[1] > 0

    @property
    def kind(self) -> Literal["prefill", "chunk"]:
        return "chunk" if self.has_earlier else "prefill"

    @classmethod
    def build(
        cls,
        tokens: Sequence[Ints],
        slots: Sequence[Ints],
        buckets: Buckets,
        n_slots: int,
        earlier: Sequence[Ints] = (),
    ) -> PrefillBatch:
        """``tokens[b]`` are row b's tokens after those of ``earlier[b]``, ``slots[b]`` as many slots.

        ``earlier[b]``: slots of the row's tokens whose KV is stored, by position; nothing for prompts from
        their first token on. ``ValueError`` for rows that do not match, and for more tokens than buckets
        hold.
        """
        earlier = earlier or [()] * len(tokens)
        if not len(tokens) == len(slots) == len(earlier):
            raise ValueError(f"{len(tokens)=}, {len(slots)=} and {len(earlier)=} must be equal")
        n_tokens = np.asarray([len(row) for row in tokens], np.int32)
        lengths = np.asarray([len(row) for row in earlier], np.int32)
        width = bucket(int(n_tokens.max()), buckets.prompt)
        # A prompt's first chunk may be run by a program of later ones.
        context = bucket(int(lengths.max()), buckets.context) if lengths.any() or not buckets.prefills else 0
        last = n_tokens - 1
        batch = cls(
            np.zeros((len(tokens), width), np.int32),
            lengths[:, None] + np.minimum(np.arange(width, dtype=np.int32), last[:, None]),
            last,
            np.full((len(tokens), width), n_slots, np.int32),
            np.zeros((len(tokens), context), np.int32),
            lengths,
        )
        for b, (row, row_slots, row_earlier) in enumerate(zip(tokens, slots, earlier, strict=True)):
            batch.tokens[b, : len(row)] = row
            batch.slots[b, : len(row)] = row_slots
            batch.slot_table[b, : len(row_earlier)] = row_earlier
        return batch


def levelled(batches: Sequence[PrefillBatch], n_slots: int) -> list[PrefillBatch]:
    """The same, all padded to the most tokens and the most earlier tokens of any: sizes that occur together
    are few then.

    ``n_slots`` is S, the pool's size.
    """
    n_tokens, n_earlier = (
        max((getattr(batch, name).shape[1] for batch in batches), default=0)
        for name in ("tokens", "slot_table")
    )

    def wider(x: np.ndarray, width: int, **how: Any) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, width - x.shape[1])], **how)

    return [
        batch._replace(
            tokens=wider(batch.tokens, n_tokens),
            positions=wider(batch.positions, n_tokens, mode="edge"),
            slots=wider(batch.slots, n_tokens, constant_values=n_slots),
            slot_table=wider(batch.slot_table, n_earlier),
        )
        for batch in batches
    ]


def with_chunk(batch: DecodeBatch, chunk: PrefillBatch) -> tuple[Any, np.ndarray]:
    """(tokens, positions) of a decode step's B rows and then of a chunk's T tokens, ``[B + T, 1]`` int32;
    tokens are where the batch's are.

    ``ValueError`` unless the chunk is one request's.
    """
    if len(chunk.tokens) != 1:
        raise ValueError(f"a chunk of {len(chunk.tokens)} requests must be of one")
    tokens = batch.tokens.__array_namespace__().concat([batch.tokens, chunk.tokens.T])
    return tokens, np.concatenate([batch.positions, chunk.positions.T])
