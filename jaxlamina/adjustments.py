"""What is done to logits before a token is taken from them: masks, banned tokens, biases, penalties; in vLLM's order.

Knows rows of logits `[B, V]` and what is asked of each as numbers; nothing of requests or of how a token is drawn.
A row that asks for nothing comes back as it is, bit for bit, whatever the others ask.

A row's newest token need not be known on the host: it may be given as an array on the device (``newest``), so that a
step can be launched while that token is still being drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NO_TOKEN = np.iinfo(np.int32).max  # beyond any vocabulary: scatters drop it


@dataclass(frozen=True)
class Adjusted:
    """What one row asks for. ``written``, without its newest token where that is given on the device, and ``prompt``
    are what the penalties count; they may be left out where nothing counts them."""

    mask: np.ndarray | None = (
        None  # [ceil(V/32)] uint32: bit t % 32 of word t // 32: token t is allowed; None: all are
    )
    banned: Sequence[int] = ()
    banned_after: Sequence[tuple[int, int]] = ()  # (a token, one banned right after it)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt: Sequence[int] | np.ndarray = ()
    written: Sequence[int] = ()

    @property
    def penalised(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


class Penalties(NamedTuple):
    presence: Any  # [B] float32
    frequency: Any  # [B] float32
    repetition: Any  # [B] float32
    tokens: Any  # [B, L] int32: the prompt's, then those written
    n_prompt: Any  # [B] int32


class Adjustments(NamedTuple):
    """What all rows ask for, as arrays padded with ``NO_TOKEN``; None for what none of them does."""

    masks: Any = None  # [B, ceil(V/32)] uint32
    banned: Any = None  # [B, E] int32
    banned_after: Any = None  # [B, E, 2] int32
    bias: Any = None  # ([B, E] int32, [B, E] float32)
    penalties: Penalties | None = None
    newest: Any = (
        None  # [B, 1] int32, where a step goes on from tokens on the device and something looks at them
    )


def bans_of(
    words: Sequence[Sequence[int]], written: Sequence[int], *, newest_follows: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """(``banned``, ``banned_after``) that keep ``words``, each its tokens, from being completed by the next token after
    ``written`` and, with ``newest_follows``, one token more that is not in it."""
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
    ``written``, on the host or the device; None: nothing did."""
    after = [[token for pair in row.banned_after for token in pair] for row in rows]
    banned_after = _table(after, size)
    penalties = _penalties(rows, size) if any(row.penalised for row in rows) else None
    bias = None
    biased = _table([list(row.logit_bias) for row in rows], size)
    if biased is not None:
        values = np.zeros(biased.shape, np.float32)
        for b, row in enumerate(rows):
            values[b, : len(row.logit_bias)] = list(row.logit_bias.values())
        bias = biased, values
    return Adjustments(
        masks=_masks([row.mask for row in rows], size),
        banned=_table([row.banned for row in rows], size),
        banned_after=None if banned_after is None else banned_after.reshape(size, -1, 2),
        bias=bias,
        penalties=penalties,
        newest=None if banned_after is None and penalties is None else newest,
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
    neutral = np.zeros(size, np.float32)
    found = Penalties(neutral, neutral.copy(), neutral + 1, None, np.zeros(size, np.int32))
    tokens: list[Sequence[int] | np.ndarray] = []
    for b, row in enumerate(rows):
        found.presence[b], found.frequency[b] = row.presence_penalty, row.frequency_penalty
        found.repetition[b] = row.repetition_penalty
        prompt = row.prompt if row.repetition_penalty != 1 else ()
        found.n_prompt[b] = len(prompt)
        tokens.append(np.concatenate([np.asarray(prompt, np.int32), np.asarray(row.written, np.int32)]))
    table = _table(tokens, size, least=64)
    return found._replace(tokens=table if table is not None else np.full((size, 64), NO_TOKEN, np.int32))


def _table(rows: Sequence[Sequence[int] | np.ndarray], size: int, least: int = 1) -> np.ndarray | None:
    """``[size, E]`` int32, E a power of two so that not every mix of requests is a new program; None if all are empty."""
    widest = max(map(len, rows), default=0)
    if not widest:
        return None
    table = np.full((size, max(least, 1 << (widest - 1).bit_length())), NO_TOKEN, np.int32)
    for b, row in enumerate(rows):
        table[b, : len(row)] = row
    return table


def adjust(logits: jax.Array, a: Adjustments) -> jax.Array:
    """``logits`` [B, V] float32 as ``a`` asks: masked and banned tokens are -inf; then biases are added; then penalties."""
    rows = jnp.arange(logits.shape[0])[:, None]
    adjusted = logits
    if a.masks is not None:
        bits = (a.masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(len(bits), -1)[:, : logits.shape[1]] > 0
        adjusted = jnp.where(allowed, adjusted, -jnp.inf)
    if a.banned is not None:
        adjusted = adjusted.at[rows, a.banned].set(-jnp.inf, mode="drop")
    if a.banned_after is not None and a.newest is not None:
        before, token = a.banned_after[..., 0], a.banned_after[..., 1]
        adjusted = adjusted.at[rows, jnp.where(before == a.newest, token, NO_TOKEN)].set(
            -jnp.inf, mode="drop"
        )
    if a.bias is not None:
        adjusted = adjusted.at[rows, a.bias[0]].add(a.bias[1], mode="drop")
    return adjusted if a.penalties is None else _penalised(adjusted, a.penalties, a.newest)


def _penalised(logits: jax.Array, p: Penalties, newest: jax.Array | None) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    written = jnp.arange(p.tokens.shape[1]) >= p.n_prompt[:, None]
    n_written = (
        jnp.zeros(logits.shape, jnp.int32).at[rows, p.tokens].add(written.astype(jnp.int32), mode="drop")
    )
    seen = jnp.zeros(logits.shape, bool).at[rows, p.tokens].set(True, mode="drop")
    if newest is not None:
        n_written = n_written.at[rows, newest].add(1, mode="drop")
        seen = seen.at[rows, newest].set(True, mode="drop")
    factor = jnp.where(seen, p.repetition[:, None], 1.0)
    penalised = jnp.where(logits > 0, logits / factor, logits * factor)
    penalised -= p.frequency[:, None] * n_written
    penalised -= p.presence[:, None] * (n_written > 0)
    return penalised
