"""One step's inputs as padded numpy arrays. Knows tokens, positions and slots; no model and no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlamina.buckets import Buckets, bucket

Ints = Sequence[int] | np.ndarray


class DecodeBatch(NamedTuple):
    """One new token for each of B rows. Rows past the requests are padding, and store nothing."""

    tokens: np.ndarray  # [B, 1] int32
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
        for b, row_slots in enumerate(slots):
            row = np.asarray(row_slots, np.int32)
            batch.slot_table[b, : len(row) - 1] = row[:-1]
            batch.new_slots[b] = row[-1]
        return batch


class PrefillBatch(NamedTuple):
    """Whole prompts, padded on the right; a pad's position repeats the last valid one and it is not stored."""

    tokens: np.ndarray  # [B, T] int32
    positions: np.ndarray  # [B, T] int32
    logits_at: np.ndarray  # [B] int32: index of each row's last token
    slots: np.ndarray  # [B, T] int32: where each token's KV goes; S for padding

    @classmethod
    def build(
        cls, tokens: Sequence[Ints], slots: Sequence[Ints], buckets: Buckets, n_slots: int
    ) -> PrefillBatch:
        """``tokens[b]`` are row b's tokens from position 0 on, ``slots[b]`` as many slots."""
        width = bucket(max(len(row) for row in tokens), buckets.prompt)
        last = np.asarray([len(row) - 1 for row in tokens], np.int32)
        batch = cls(
            np.zeros((len(tokens), width), np.int32),
            np.minimum(np.arange(width, dtype=np.int32), last[:, None]),
            last,
            np.full((len(tokens), width), n_slots, np.int32),
        )
        for b, (row, row_slots) in enumerate(zip(tokens, slots, strict=True)):
            batch.tokens[b, : len(row)] = row
            batch.slots[b, : len(row)] = row_slots
        return batch
