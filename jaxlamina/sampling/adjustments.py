"""What is done to logits before a token is taken from them: masks, banned tokens, biases, penalties; in
vLLM's order.

Knows rows of logits `[B, V]` and what is asked of each as numbers; nothing of requests or of how a token is
drawn. A row that asks for nothing comes back as it is, bit for bit, whatever the others ask.

A row's newest token need not be known on the host: it may be given as an array on the device (``newest``), so
that a step can be launched while that token is still being drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.sampling.structured import n_mask_words

NO_TOKEN = np.iinfo(np.int32).max  # beyond any vocabulary: scatters drop it


class Counted:
    """What penalties look at of a text: the prompt's tokens and those written, each once.

    It grows with the text, so that a step costs its new tokens and not all of them.
    """

    def __init__(self, prompt: Sequence[int] | np.ndarray = (), written: Sequence[int] = ()) -> None:
        self._prompt = np.unique(np.asarray(prompt, np.int32))
        self._begin()
        self.go_on(written)

    def _begin(self) -> None:
        self._n_taken = 0
        self._places = {token: i for i, token in enumerate(self._prompt.tolist())}
        self._tokens = self._prompt.copy()
        self._n_written = np.zeros(len(self._prompt), np.int32)

    def go_on(self, written: Sequence[int]) -> None:
        """Counts what ``written``, all that was written, has beyond what was counted. If it has less, as
        after a step that is run again, all is counted anew."""
        if len(written) < self._n_taken:
            self._begin()
        for token in written[self._n_taken :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                n_more = max(64, place)
                self._tokens = np.append(self._tokens, np.zeros(n_more, np.int32))
                self._n_written = np.append(self._n_written, np.zeros(n_more, np.int32))
            self._tokens[place] = token
            self._n_written[place] += 1
        self._n_taken = len(written)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def tokens(self) -> np.ndarray:
        """[E] int32, no two alike."""
        return self._tokens[: len(self)]

    @property
    def n_written(self) -> np.ndarray:
        """[E] int32: how often each was written, 0 for those that are in the prompt alone."""
        return self._n_written[: len(self)]


@dataclass(frozen=True)
class Adjusted:
    """What one row asks for. ``counted``, without its newest token where that is given on the device, is what
    the penalties look at; without it there are none."""

    mask: np.ndarray | None = (
        None  # [ceil(V/32)] uint32: bit t % 32 of word t // 32: token t is allowed; None: all are
    )
    banned: Sequence[int] = ()
    banned_after: Sequence[tuple[int, int]] = ()  # (a token, one banned right after it)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    counted: Counted | None = None


NOT_ADJUSTED = Adjusted()


class Penalties(NamedTuple):
    """Of all rows; E is what their texts have together, so that a long one costs the others nothing."""

    presence: Any  # [B] float32
    frequency: Any  # [B] float32
    repetition: Any  # [B] float32
    rows: Any  # [E] int32
    tokens: Any  # [E] int32: that are in the row's text
    n_written: Any  # [E] int32: how often, 0 for those of its prompt alone


class Adjustments(NamedTuple):
    """What all rows ask for, as arrays padded with ``NO_TOKEN``; None for what none of them does."""

    masks: Any = None  # [B, ceil(V/32)] uint32
    banned: Any = None  # [B, E] int32
    banned_after: Any = None  # [B, E, 2] int32
    bias: Any = None  # ([B, E] int32, [B, E] float32)
    penalties: Penalties | None = None
    newest: Any = None  # [B, 1] int32, where something looks at it; ``NO_TOKEN`` for none


def mask_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """``mask`` of `Adjusted` that allows ``tokens`` alone."""
    bits = np.zeros(n_mask_words(vocab_size) * 32, np.uint8)
    bits[np.fromiter(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def bans_of(
    words: Sequence[Sequence[int]], written: Sequence[int], *, newest_follows: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """(``banned``, ``banned_after``) that keep ``words``, each its tokens, from being completed by the next
    token after ``written`` and, with ``newest_follows``, one token more that is not in it."""
    banned: list[int] = []
    banned_after: list[tuple[int, int]] = []
    for *before, last in words:
        if not (before and newest_follows):
            if _ends_with(written, before):
                banned.append(last)
        elif _ends_with(written, before[:-1]):
            banned_after.append((before[-1], last))
    return banned, banned_after


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return len(end) <= len(tokens) and list(tokens[len(tokens) - len(end) :]) == list(end)


def build(rows: Sequence[Adjusted], size: int, newest: Any = None) -> Adjustments:
    """``Adjustments`` of ``rows``, padded to ``size``. ``newest`` [size, 1] int32: what came after each row's
    ``written``, on the host or the device; None: nothing did, or ``written`` has it."""
    if all(row is NOT_ADJUSTED for row in rows):  # as most are, in every step
        return Adjustments()
    after = [[token for pair in row.banned_after for token in pair] for row in rows]
    banned_after = _table(after, size)
    penalties = _penalties(rows, size) if any(row.counted is not None for row in rows) else None
    bias = None
    biased = _table([list(row.logit_bias) for row in rows], size)
    if biased is not None:
        values = np.zeros(biased.shape, np.float32)
        for b, row in enumerate(rows):
            values[b, : len(row.logit_bias)] = list(row.logit_bias.values())
        bias = biased, values
    if banned_after is None and penalties is None:
        newest = None
    elif newest is None:
        newest = np.full((size, 1), NO_TOKEN, np.int32)
    return Adjustments(
        masks=_masks([row.mask for row in rows], size),
        banned=_table([row.banned for row in rows], size),
        banned_after=None if banned_after is None else banned_after.reshape(size, -1, 2),
        bias=bias,
        penalties=penalties,
        newest=newest,
    )


def _masks(rows: Sequence[np.ndarray | None], size: int) -> np.ndarray | None:
    width = max((len(row) for row in rows if row is not None), default=0)
    if not width:
        return None
    masks = np.full((size, width), 0xFFFFFFFF, np.uint32)
    for b, row in enumerate(rows):
        if row is not None:
            masks[b] = row
    return masks


def _penalties(rows: Sequence[Adjusted], size: int) -> Penalties:
    presence, frequency = np.zeros(size, np.float32), np.zeros(size, np.float32)
    repetition = np.ones(size, np.float32)
    texts: list[tuple[int, Counted]] = []
    for b, row in enumerate(rows):
        if row.counted is not None:
            presence[b], frequency[b] = row.presence_penalty, row.frequency_penalty
            repetition[b] = row.repetition_penalty
            texts.append((b, row.counted))
    width = power_of_4(sum([len(text) for _, text in texts]), LEAST_COUNTED)
    at, n_written = np.zeros(width, np.int32), np.zeros(width, np.int32)
    tokens = np.full(width, NO_TOKEN, np.int32)
    start = 0
    for b, text in texts:
        stop = start + len(text)
        at[start:stop], tokens[start:stop], n_written[start:stop] = b, text.tokens, text.n_written
        start = stop
    return Penalties(presence, frequency, repetition, at, tokens, n_written)


def power_of_4(n: int, least: int = 1) -> int:
    """``least`` times the power of four that holds ``n``: sizes are few, so that not every mix of requests is
    a new program.

    >>> [power_of_4(n) for n in (1, 2, 4, 5, 17)], power_of_4(65, least=64)
    ([1, 4, 4, 16, 64], 256)
    """
    size = least
    while size < n:
        size *= 4
    return size


# The least widths: of a table of banned tokens or biases, and of what penalties count of all rows.
LEAST_TOKENS, LEAST_COUNTED = 32, 1024


def _table(rows: Sequence[Sequence[int]], size: int) -> np.ndarray | None:
    """``[size, E]`` int32, E a `power_of_4`; None if all are empty."""
    widest = max(map(len, rows), default=0)
    if not widest:
        return None
    table = np.full((size, power_of_4(widest, LEAST_TOKENS)), NO_TOKEN, np.int32)
    for b, row in enumerate(rows):
        table[b, : len(row)] = row
    return table


def stages(a: Adjustments) -> list[tuple[Callable[..., jax.Array], tuple[Any, ...]]]:
    """What ``a`` asks for, in order: functions of logits ``[B, V]`` float32 and of the arrays beside them.
    Masked and banned tokens become -inf; then biases are added; then penalties are taken."""
    found: list[tuple[Callable[..., jax.Array], tuple[Any, ...]]] = []
    if a.masks is not None:
        found.append((_masked, (a.masks,)))
    if a.banned is not None:
        found.append((_banned, (a.banned,)))
    if a.banned_after is not None:
        found.append((_banned_after, (a.banned_after, a.newest)))
    if a.bias is not None:
        found.append((_biased, a.bias))
    if a.penalties is not None:
        found.append((_penalised, (a.penalties, a.newest)))
    return found


def _masked(logits: jax.Array, masks: jax.Array) -> jax.Array:
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(bits), -1)[:, : logits.shape[1]] > 0
    return jnp.where(allowed, logits, -jnp.inf)


def _banned(logits: jax.Array, banned: jax.Array) -> jax.Array:
    return logits.at[_rows(logits), banned].set(-jnp.inf, mode="drop")


def _banned_after(logits: jax.Array, pairs: jax.Array, newest: jax.Array) -> jax.Array:
    before, token = pairs[..., 0], pairs[..., 1]
    tokens = jnp.where(before == newest, token, NO_TOKEN)
    return logits.at[_rows(logits), tokens].set(-jnp.inf, mode="drop")


def _biased(logits: jax.Array, tokens: jax.Array, biases: jax.Array) -> jax.Array:
    return logits.at[_rows(logits), tokens].add(biases, mode="drop")


def _penalised(logits: jax.Array, p: Penalties, newest: jax.Array) -> jax.Array:
    rows = _rows(logits)
    n_written = jnp.zeros(logits.shape, jnp.int32).at[p.rows, p.tokens].add(p.n_written, mode="drop")
    seen = jnp.zeros(logits.shape, bool).at[p.rows, p.tokens].set(True, mode="drop")
    n_written = n_written.at[rows, newest].add(1, mode="drop")
    seen = seen.at[rows, newest].set(True, mode="drop")
    factor = jnp.where(seen, p.repetition[:, None], 1.0)
    penalised = jnp.where(logits > 0, logits / factor, logits * factor)
    penalised -= p.frequency[:, None] * n_written
    penalised -= p.presence[:, None] * (n_written > 0)
    return penalised


def _rows(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[0])[:, None]


STAGES = (_masked, _banned, _banned_after, _biased, _penalised)  # all that `stages` may name
