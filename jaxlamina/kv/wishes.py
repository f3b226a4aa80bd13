"""Where a step's new tokens are to be kept, by requests or by tokens: on which attention worker, or on the
model rank that keeps a share of the KV.

By requests a new request goes where, for its share, least KV is. By tokens the newest ones go to the model
rank: then a decode step's own keys and values need not travel. Nothing is moved for the sake of balance: new
tokens level what ended requests leave. Knows shares, slots and loads; numpy only, no device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from jaxlamina.kv.placement import Placement, wish_by_requests, wish_by_tokens

# By tokens, how much more of all tokens a model rank may have than its share before new ones go to workers.
_SLACK = 0.02


class Wishes:
    """``share(n)``: of n stored tokens that a step attends to, the share that the model rank is to have; None
    where it keeps no KV. ``token_block``: tokens in a row that one worker keeps; None: by requests."""

    def __init__(
        self, n_workers: int, token_block: int | None, share: Callable[[float], float] | None = None
    ) -> None:
        self._n_workers, self._token_block, self.share = n_workers, token_block, share
        # Tokens that decode steps attend to: on the model rank, and on all workers.
        self.n_local = self.n_remote = 0.0

    @property
    def by_tokens(self) -> bool:
        return self._token_block is not None

    def seen(self, n_local: int, n_remote: int) -> None:
        """What a decode step attends to."""
        self.n_local, self.n_remote = float(n_local), float(n_remote)

    def place(
        self,
        placement: Placement,
        slot_table: Int[np.ndarray, "B C"],
        lengths: Int[np.ndarray, " B"],
        positions: Int[np.ndarray, "B T"],
        new_slots: Int[np.ndarray, "B T"],
        here: bool = True,
    ) -> None:
        """Gives a step's new tokens, ``new_slots`` (S: none), their places. ``here``: whether model ranks
        compute them; what prefill workers compute goes to attention workers alone, which must have room."""
        real = new_slots < placement.n_slots
        n_real = int(real.sum())
        if not n_real:
            return
        share = self._share_of_next(n_real) if here else 0.0
        if self._token_block is None:
            wish = wish_by_requests(placement, slot_table, lengths, real.sum(axis=1), self._shares(share))
            wishes: np.ndarray = np.broadcast_to(wish[:, None], new_slots.shape)
        else:
            wishes = wish_by_tokens(positions, self._n_workers, self._token_block)
            if self.share is not None:
                wishes = np.where(self._newest(real, lengths, share), self._n_workers, wishes)
        placement.place(new_slots[real], wishes[real], None if here else self._n_workers)
        if self.share is not None:
            n_local = int((placement.worker[new_slots[real]] == self._n_workers).sum())
            self.n_local, self.n_remote = self.n_local + n_local, self.n_remote + n_real - n_local

    def _share_of_next(self, n_new: int) -> float:
        """The share that the model rank is to have once ``n_new`` more are there."""
        return 0.0 if self.share is None else self.share(self.n_local + self.n_remote + n_new)

    def _shares(self, share: float) -> np.ndarray | None:
        if self.share is None:
            return None
        return np.asarray([(1 - share) / self._n_workers] * self._n_workers + [share])

    def _newest(
        self, real: Bool[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"], share: float
    ) -> Bool[np.ndarray, "B T"]:
        """Which of the new tokens are the model rank's: of a decode step all or none; of prompts each row's
        last ones, so that both sides then have their shares."""
        n = int(real.sum())
        after = self.n_local + self.n_remote + n
        if real.shape[1] == 1 and lengths.any():
            return real & (self.n_local + n <= (share + _SLACK) * after)
        of_new = np.clip((share * after - self.n_local) / n, 0.0, 1.0)
        n_each = real.sum(axis=1, keepdims=True)
        return real & (np.cumsum(real, axis=1) > n_each - np.rint(of_new * n_each))


def place_stored(
    placement: Placement,
    wishes: Wishes,
    slot_table: Int[np.ndarray, "B C"],
    lengths: Int[np.ndarray, " B"],
) -> None:
    """Takes it that rows' earlier tokens, in slots that are all distinct, were stored a row at a time: for
    measuring steps, and compiling them, without a prefill."""
    b, c = slot_table.shape
    wishes.seen(0, 0)
    positions = np.broadcast_to(np.arange(c, dtype=np.int32), (b, c))
    slots = np.where(positions < lengths[:, None], slot_table, placement.n_slots)
    wishes.place(placement, np.zeros((b, 0), np.int32), np.zeros(b, np.int32), positions, slots)
