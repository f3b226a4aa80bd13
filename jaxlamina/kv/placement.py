"""Which attention worker keeps which part of the KV, as plain data.

By heads: every worker has all tokens, of some KV heads. By requests: a request's tokens are on one worker, a
new request goes to the one with the least KV. By tokens: blocks of a request's positions go round the
workers. The last two differ only in where a token is wished to go; from there on a slot is a pair (worker,
local slot), and a step's inputs are cut into each worker's own by `plan_rows`.

Knows slots, positions and workers; numpy only, no device. "auto" is chosen here, before anything is placed:
nothing else knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from jaxlamina.errors import UserError
from jaxlamina.steps.layout import even_local_heads, local_heads

PARTITIONS = ("heads", "requests", "tokens")
AUTO = "auto"


LocalShare = float | Literal["auto"]


def chosen_partition(
    partition: str,
    n_workers: int,
    n_kv_heads: Sequence[int],
    local_share: LocalShare = 0.0,
    n_ranks: int = 1,
) -> str:
    """What "auto" stands for: heads where they divide evenly, else tokens; any other partition is that one.
    With a share of the KV on model ranks that is to follow the load ("auto"): tokens, of which new ones can
    go to either side.

    Tokens and not requests, since they share out one long request as evenly as many short ones, and a step's
    shapes then depend least on which requests are in it. ``n_ranks``, ``UserError``: as of
    `checked_partition`.
    """
    if partition == AUTO and (local_share == 1 or (n_ranks > 1 and local_share)):
        partition = "heads"  # of which model ranks have all, or which they have shared out already
    elif partition == AUTO:
        partition = "heads" if _by_heads(n_workers, n_kv_heads, local_share) else "tokens"
    checked_partition(partition, n_workers, n_kv_heads, local_share, n_ranks)
    return partition


def why_chosen(
    partition: str, chosen: str, n_workers: int, n_kv_heads: Sequence[int], local_share: LocalShare = 0.0
) -> str | None:
    """One line that says what "auto" became where it is not the usual thing."""
    if partition != AUTO or chosen == "heads" or local_share == AUTO:
        return None
    if local_share:
        return (
            f"local_attention={local_share:g} of {n_kv_heads[0]} KV heads is no number of heads that leaves "
            f"{n_workers} attention workers equal ones, so tokens are shared out (partition {chosen!r})"
        )
    return (
        f"{next(k for k in n_kv_heads if k % n_workers)} KV heads do not divide evenly over {n_workers} "
        f"attention workers, so each keeps blocks of every request's tokens (partition {chosen!r})"
    )


def share_by_heads(
    local_share: LocalShare, n_workers: int, n_kv_heads: Sequence[int], n_ranks: int = 1
) -> float:
    """By heads a share is one from the start, so "auto" is that by which devices attend to as much each, as
    near as heads come to it, or none where there are too few."""
    if not isinstance(local_share, str):
        return local_share
    kept = [even_local_heads(k, n_workers, n_ranks) for k in n_kv_heads]
    return kept[0] / n_kv_heads[0] if kept and kept[0] and all(kept) else 0.0


def _by_heads(n_workers: int, n_kv_heads: Sequence[int], share: LocalShare) -> bool:
    """Whether whole heads make that share, and leave each worker equal ones."""
    if isinstance(share, str):
        return False
    found = [(local_heads(k, n_workers, share), k) for k in n_kv_heads]
    return all(n is not None and abs(n - share * k) < 1e-6 and (k - n) % n_workers == 0 for n, k in found)


def checked_partition(
    partition: str,
    n_workers: int,
    n_kv_heads: Sequence[int],
    local_share: LocalShare = 0.0,
    n_ranks: int = 1,
) -> None:
    """``UserError`` for a partition that is none, and for too few heads, or a share of them that leaves a
    worker none. ``n_ranks``: model ranks that share out a layer's heads."""
    if partition not in PARTITIONS:
        raise UserError(f"{partition=} must be one of {', '.join((AUTO, *PARTITIONS))}")
    if n_workers < (least := 0 if local_share == 1 else 1):
        raise UserError(f"attention_workers={n_workers} must be at least {least}")
    if partition != "heads":
        return
    if share := share_by_heads(local_share, n_workers, n_kv_heads, n_ranks):
        bad = [k for k in n_kv_heads if local_heads(k, n_workers, share, n_ranks) is None]
        if bad and n_workers == 0:
            divides = max(n for n in range(1, n_ranks) if all(k % n == 0 for k in n_kv_heads))
            raise UserError(
                f"without attention workers each of {n_ranks} model workers keeps as many of a layer's "
                f"{bad[0]} KV heads, which {n_ranks} does not divide: take "
                f"dop=({divides}, 0) with tensor_parallel={divides}, or attention workers"
            )
        if bad and n_ranks > 1:
            able = [b for b in range(1, bad[0]) if local_heads(bad[0], b, 0.5, n_ranks) is not None]
            fewer = f"{' or '.join(map(str, able))} attention workers, or " if able and share < 1 else ""
            raise UserError(
                f"local_attention={share:g} with tensor_parallel={n_ranks} has every model worker keep as "
                f"many of a layer's {bad[0]} KV heads, and each of {n_workers} attention workers one of the "
                f"others, which no number of heads does: take {fewer}local_attention=0"
            )
        if bad:
            raise UserError(
                f"local_attention={local_share} with partition='heads' is one of {bad[0]} KV heads at least, "
                f"which leaves too few for {n_workers} attention workers: take partition='tokens' or "
                "partition='requests'"
            )
        return
    if n_workers > (n := min(n_kv_heads)):
        raise UserError(
            f"partition='heads' has {n} KV heads for {n_workers} attention workers, each of which needs one: "
            f"take at most {n} of them, or partition='tokens' or partition='requests'"
        )


NOWHERE = -1  # in place of a worker


class Held(NamedTuple):
    """What a worker keeps: tokens whose KV it has, with those that were freed since the latest step (None:
    every token that is kept, of some KV heads), and how many there is room for."""

    pool: Literal["model", "attention"]
    n_used: int | None
    n_slots: int


class Placement:
    """Where each of S logical slots is: a worker and a slot of its pool.

    A slot is placed when it is written; what it held before is gone, so its old place is free again.
    ``release`` frees places earlier, which keeps the workers balanced; without it every slot still finds a
    place, for together the pools hold at least S.
    """

    def __init__(self, n_slots: int, capacities: Sequence[int]) -> None:
        assert sum(capacities) >= n_slots
        self.n_slots = n_slots
        self.worker = np.full(n_slots, NOWHERE, np.int32)  # [S]
        self.local = np.zeros(n_slots, np.int32)  # [S]
        self._free = [np.arange(n - 1, -1, -1, dtype=np.int32) for n in capacities]  # stacks
        self._n_free = np.asarray(capacities, np.int64)
        self._capacities = np.asarray(capacities, np.int64)

    @property
    def n_workers(self) -> int:
        return len(self._free)

    @property
    def n_free(self) -> Int[np.ndarray, " workers"]:
        """Places on each worker that nothing has."""
        return self._n_free

    @property
    def n_used(self) -> Int[np.ndarray, " workers"]:
        """Tokens on each worker."""
        return self._capacities - self._n_free

    def release(self, slots: Int[np.ndarray, " n"]) -> None:
        """Frees the places of ``slots`` (distinct); those that are nowhere stay so."""
        owners = self.worker[slots]
        for w in range(self.n_workers):
            of_worker = slots[owners == w]
            n = self._n_free[w]
            self._free[w][n : n + len(of_worker)] = self.local[of_worker]
            self._n_free[w] = n + len(of_worker)
        self.worker[slots] = NOWHERE

    def place(
        self, slots: Int[np.ndarray, " n"], wish: Int[np.ndarray, " n"], among: int | None = None
    ) -> None:
        """Gives ``slots`` (distinct) a place each, on the worker of ``wish`` if it has room, else on the
        emptiest. ``among``: only the first so many workers, which must have the room; None: all."""
        self.release(slots)
        left = slots
        for w in range(self.n_workers)[:among]:
            wanted = slots[wish == w]
            here = wanted[: self._n_free[w]]
            self._take(w, here)
            left = left[self.worker[left] == NOWHERE] if len(here) else left
        while len(left):
            w = int(np.argmax(self._n_free[:among]))
            here = left[: self._n_free[w]]
            assert len(here), "these pools together have fewer places free"
            self._take(w, here)
            left = left[len(here) :]

    def _take(self, w: int, slots: np.ndarray) -> None:
        n = self._n_free[w]
        self.local[slots] = self._free[w][n - len(slots) : n][::-1]
        self.worker[slots] = w
        self._n_free[w] = n - len(slots)


def wish_by_tokens(positions: Int[np.ndarray, "*n"], n_workers: int, block: int) -> Int[np.ndarray, "*n"]:
    """Workers for tokens at ``positions``: blocks of that many tokens go round."""
    return positions // block % n_workers


def wish_by_requests(
    placement: Placement,
    slot_table: Int[np.ndarray, "B C"],
    lengths: Int[np.ndarray, " B"],
    n_new: Int[np.ndarray, " B"],
    shares: Float[np.ndarray, " workers"] | None = None,
) -> Int[np.ndarray, " B"]:
    """A worker for each row's new tokens: where its last stored token is, else where least KV will be for its
    share.

    ``n_new``: how many tokens each row adds; longer rows choose first. ``shares``: of all KV, what each
    worker is to have; equal ones if None.
    """
    shares = np.ones(placement.n_workers) if shares is None else shares
    rows = np.arange(len(lengths))
    stored = lengths > 0
    wish = np.zeros(len(lengths), np.int64)
    if slot_table.shape[1]:
        last = slot_table[rows, np.maximum(lengths - 1, 0)]
        wish = np.where(stored, placement.worker[last], 0)
    load = placement.n_used.astype(np.int64)
    np.add.at(load, wish[stored], n_new[stored])
    for b in sorted(rows[~stored], key=lambda b: -n_new[b]):
        if n_new[b]:
            with np.errstate(divide="ignore"):
                wish[b] = np.argmin((load + n_new[b]) / shares)
            load[wish[b]] += n_new[b]
    return wish


class RowsPlan(NamedTuple):
    """One worker's part of a step. R rows that have stored tokens here, M new tokens that are kept here."""

    rows: Int32[np.ndarray, " R"]  # which of the batch's rows; padding repeats row 0
    spread: Int32[np.ndarray, " B"]  # at which of R a row is; R for one that is not here
    slot_table: Int32[np.ndarray, "R C"]  # local slots, by position; C only as wide as needed
    lengths: Int32[np.ndarray, " R"]  # stored tokens here; 0 for padding
    q_positions: dict[int, Int32[np.ndarray, "R T"]]  # by window: see `plan_rows`
    new: Int32[np.ndarray, " M"]  # which of the batch's B * T new tokens; padding repeats token 0
    new_slots: Int32[np.ndarray, " M"]  # local slots; a huge one for padding


class PlacedIndices(NamedTuple):
    """Of all b workers: which of the batch's rows each has, where a row is among them (R: nowhere), and which
    new tokens it keeps."""

    rows: Int32[Any, "b R"]
    spread: Int32[Any, "b B"]
    new: Int32[Any, "b M"]


NO_SLOT = np.iinfo(np.int32).max
_PAST_END = -2  # in place of a worker


def plan_rows(
    placement: Placement,
    slot_table: Int[np.ndarray, "B C"],
    lengths: Int[np.ndarray, " B"],
    positions: Int[np.ndarray, "B T"],
    new_slots: Int[np.ndarray, "B T"],
    windows: Sequence[int],
) -> list[RowsPlan]:
    """Each worker's part; new_slots S: none.

    A row's stored tokens on a worker keep their order but lose their positions, which a sliding window asks
    for. So each window gets ``q_positions``: where a query would have to stand in the row of tokens that are
    there to see just those that it sees of them. ``ValueError`` for a stored token that is nowhere.
    """
    b, c = slot_table.shape
    owners = np.where(np.arange(c) < lengths[:, None], placement.worker[slot_table], _PAST_END)
    if (owners == NOWHERE).any():
        raise ValueError(f"slots {slot_table[owners == NOWHERE][:8]} are read but hold nothing")
    local = placement.local[slot_table]
    new = np.flatnonzero(new_slots < placement.n_slots).astype(np.int32)
    to = new_slots.reshape(-1)[new]
    plans = []
    for w in range(placement.n_workers):
        here = owners == w
        counts = here.sum(axis=1, dtype=np.int32)
        rows = np.flatnonzero(counts).astype(np.int32)
        n_rows = eighths(len(rows), b)
        table = np.zeros((n_rows, eighths(int(counts.max(initial=0)), c)), np.int32)
        lengths_here = _to_length(counts[rows], n_rows, 0)
        table[np.arange(table.shape[1]) < lengths_here[:, None]] = local[here]  # both row by row, in order
        spread = np.full(b, n_rows, np.int32)
        spread[rows] = np.arange(len(rows))
        queries = {window: _seen_from(here[rows], positions[rows], window, n_rows) for window in windows}
        mine = placement.worker[to] == w
        n_new = eighths(int(mine.sum()), new_slots.size)
        kept = _to_length(new[mine], n_new, 0), _to_length(placement.local[to[mine]], n_new, NO_SLOT)
        plans.append(RowsPlan(_to_length(rows, n_rows, 0), spread, table, lengths_here, queries, *kept))
    return plans


def _seen_from(
    here: Bool[np.ndarray, "R C"], positions: Int[np.ndarray, "R T"], window: int, n_rows: int
) -> Int32[np.ndarray, "n_rows T"]:
    """First seen of the tokens here, + window - 1."""
    before = np.concatenate(
        [np.zeros((len(here), 1), np.int64), np.cumsum(here, axis=1)], axis=1
    )  # [R, C + 1]
    first = np.clip(positions - window + 1, 0, here.shape[1])
    out = np.zeros((n_rows, positions.shape[1]), np.int32)
    out[: len(here)] = np.take_along_axis(before, first, axis=1) + window - 1
    return out


def eighths(n: int, most: int) -> int:
    """The next eighth of ``most`` that holds ``n``, so that a size is one of nine; 0 for none.

    >>> [eighths(n, 64) for n in (0, 1, 8, 9, 64)]
    [0, 8, 8, 16, 64]
    """
    step = -(-most // 8)
    return min(most, -(-n // step) * step) if n else 0


def _to_length(x: np.ndarray, n: int, fill: int) -> np.ndarray:
    out = np.full(n, fill, np.int32)
    out[: len(x)] = x
    return out
