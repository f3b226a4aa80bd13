"""The second program: the partials of a query to its output. A warp takes a query; knows nothing of stored
keys or values.

In a decode step a query's own token, which is not stored yet, is one partial more: attended here, from the
key and value as they came, and stored if there is a place for it; the output then is in the queries' type.
So are partials of others, over other tokens of the same requests, as they sent them. Without an own token
both results are float32, to be combined further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pallas_kernels.gpu.spec import LOG2E, LOWEST, QUERIES, Memory, Spec


@dataclass(frozen=True)
class OwnToken:
    """Addresses: each request's own token and the output, bfloat16, where the token is to be stored, or
    `None`, and the partials of others."""

    q: Any  # [B, 1, N, H]
    k: Any  # [B, 1, K, H]
    v: Any
    out: Any  # [B, 1, N, H]
    slots: Any = None  # [B] i32; not one of the pool's: nowhere
    k_pool: Any = None  # [S, K, H]
    v_pool: Any = None
    n_slots: int = 0
    others: Sequence[Any] = ()  # each [B, 1, N, H + 1] f32: output, and natural log-sum-exp after it


@dataclass
class _Sum:
    """What a warp has of a query so far: registers. A lane has two dims in a row of each 64."""

    top: Any
    mass: Any
    acc: list[Any]

    def flat(self) -> list[Any]:
        return [self.top, self.mass, *self.acc]


class Combination:
    """The program of one warp of ``n_warps``, in one CTA of ``n_ctas``."""

    def __init__(self, w: Any, spec: Spec, memory: Memory, n_warps: int, n_ctas: int) -> None:
        self.w, self.s, self.m = w, spec, memory
        self.n_warps, self.n_ctas = n_warps, n_ctas
        self.group = QUERIES * spec.blocks
        self.pairs = range(-(-spec.H // 64))

    def run_partials(self, out: Any, lse: Any) -> None:
        """Output `[B, Tq, N, H]` and natural log-sum-exp `[B, Tq, N]`, float32, of the stored tokens."""
        w = self.w

        def row(number: Any, kept: Any) -> None:
            total = self.stored(number)
            for pair, at in zip(self.of_pairs(self.normalised(total)), self.dims(), strict=True):
                to = w.i64(number) * (4 * self.s.H) + w.i64(at * 4)
                w.store_f32(out, to, pair, kept & (at < self.s.H))
            natural = (total.top + w.log2(total.mass)) * (1 / LOG2E)
            w.store_f32(lse, w.i64(number) * 4, [natural], kept & (w.lane == 0))

        self.rows(row)

    def run_with_own(self, own: OwnToken) -> None:
        """Output of the stored tokens, the query's own one and those of others' partials."""
        w, s = self.w, self.s

        def row(number: Any, kept: Any) -> None:
            b, n = number // s.N, number % s.N
            kv_row = b * s.K + n // s.G
            words = [self.load(x, at) for x, at in ((own.q, number), (own.k, kv_row), (own.v, kv_row))]
            others = [self.packed(x, number) for x in own.others]  # before a loop that they need not wait for
            q, k, v = map(self.floats, words)
            score = w.f32(0.0)
            for x, y, inside in zip(q, k, self.inside(), strict=True):
                score = score + w.select(inside, x * y, 0.0)
            for mask in (1, 2, 4, 8, 16):
                score = score + w.shuffle_xor(score, mask)
            total = self.add(self.stored(number), scaled(w, s, score), v)
            for lse, values in others:
                total = self.add(total, lse * LOG2E, values)
            for (low, high), at in zip(self.of_pairs(self.normalised(total)), self.dims(), strict=True):
                to = w.i64(number) * (2 * s.H) + w.i64(at * 2)
                w.store_b32(own.out, to, w.pack(low, high, "bf16"), kept & (at < s.H))
            if own.slots is not None:  # by the first of a KV head's queries
                slot = w.load(own.slots, b * 4, "i32")
                stored = kept & (n % s.G == 0) & (slot >= 0) & (slot < own.n_slots)
                for pool, of_row in ((own.k_pool, words[1]), (own.v_pool, words[2])):
                    to = (w.i64(slot) * s.K + w.i64(n // s.G)) * (2 * s.H)
                    for word, at in zip(of_row, self.dims(), strict=True):
                        w.store_b32(pool, to + w.i64(at * 2), word, stored & (at < s.H))

        self.rows(row)

    def rows(self, work: Any) -> None:
        n_rows = self.s.B * self.s.Tq * self.s.N

        def row(i: Any, _: list[Any]) -> list[Any]:
            number = (i * self.n_ctas + self.w.cta) * self.n_warps + self.w.warp
            work(self.w.minimum(number, n_rows - 1), number < n_rows)
            return []

        self.w.loop(-(-n_rows // (self.n_ctas * self.n_warps)), row, [])

    # --- a lane's dims ---
    def dims(self) -> list[Any]:
        """The first of each of this lane's pairs; H or more for none."""
        return [2 * self.w.lane + 64 * e for e in self.pairs]

    def inside(self) -> list[Any]:
        return [at < self.s.H for at in self.dims() for _ in range(2)]

    def clamped(self) -> list[Any]:
        return [self.w.minimum(at, self.s.H - 2) for at in self.dims()]

    def of_pairs(self, values: list[Any]) -> list[list[Any]]:
        return [values[2 * e : 2 * e + 2] for e in self.pairs]

    def load(self, pointer: Any, row: Any) -> list[Any]:
        """This lane's pairs of a row of a bfloat16 array."""
        w, start = self.w, self.w.i64(row) * (2 * self.s.H)
        return [w.load(pointer, start + w.i64(at * 2), "b32") for at in self.clamped()]

    def packed(self, pointer: Any, row: Any) -> tuple[Any, list[Any]]:
        """Natural log-sum-exp of a row of a packed partial, and this lane's pairs of its output: one by one,
        since rows of H + 1 are aligned to no more."""
        w, start = self.w, self.w.i64(row) * (4 * (self.s.H + 1))
        lse = w.load(pointer, start + 4 * self.s.H, "f32")
        at = [start + w.i64(first * 4) for first in self.clamped()]
        return lse, [w.load(pointer, first + 4 * i, "f32") for first in at for i in range(2)]

    def floats(self, words: list[Any]) -> list[Any]:
        bits = [x for word in words for x in (word, word // (1 << 16))]
        return [self.w.bf16_bits_to_f32(x) for x in bits]

    # --- sums ---
    def stored(self, number: Any) -> _Sum:
        """All partials of query ``number`` of `[B, Tq, N]`."""
        w, s = self.w, self.s
        bt, n = number // s.N, number % s.N
        b, t = bt // s.Tq, bt % s.Tq
        k, query = n // s.G, t * s.G + n % s.G
        head_group = k // s.heads_at_once
        head = k - s.first_head(w, head_group)
        item = (query // self.group) * s.head_groups + head_group
        n_tiles, share = self.plan("n_tiles", b), self.plan("tiles_per_cta")
        start = self.plan("tile_start", b) + item * n_tiles
        first_cta = start // share
        n_stretches = w.maximum(start + n_tiles - 1, 0) // share - first_cta + 1
        n_stretches = w.select(n_tiles > 0, n_stretches, 0)

        def gather(j: Any, carry: list[Any]) -> list[Any]:
            part = b * s.items_per_request + item + first_cta + j // s.ways
            at = (w.i64(part) * s.ways + w.i64(j % s.ways)) * s.heads_at_once + w.i64(head)
            at = at * s.rows + w.i64(query % self.group)
            lse = w.load(self.m.lse, at * 4, "f32")
            values = []
            for dim in self.clamped():
                first = at * (4 * s.H) + w.i64(dim * 4)
                values += [w.load(self.m.out, first + 4 * i, "f32") for i in range(2)]
            return self.add(_Sum(carry[0], carry[1], carry[2:]), lse, values).flat()

        empty = _Sum(w.f32(-math.inf), w.f32(0.0), [w.f32(0.0)] * (2 * len(self.pairs)))
        top, mass, *acc = w.loop(n_stretches * s.ways, gather, empty.flat())
        return _Sum(top, mass, acc)

    def add(self, total: _Sum, lse: Any, values: list[Any]) -> _Sum:
        """One partial more: normalised, with log2 of its softmax mass."""
        w = self.w
        higher = w.maximum(w.maximum(total.top, lse), LOWEST)
        keep, weight = w.exp2(total.top - higher), w.exp2(lse - higher)
        acc = [w.fma(a, keep, v * weight) for a, v in zip(total.acc, values, strict=True)]
        return _Sum(higher, w.fma(total.mass, keep, weight), acc)

    def normalised(self, total: _Sum) -> list[Any]:
        w = self.w
        share = w.select(total.mass > 0.0, w.reciprocal(total.mass), 0.0)
        return [x * share for x in total.acc]

    def plan(self, field: str, index: Any = 0) -> Any:
        return self.w.load(self.m.plan, (self.w.i32(index) + self.s.layout.at(field)) * 4, "i32")


def scaled(w: Any, s: Spec, score: Any) -> Any:
    """A product of query and key as a score in log2 units."""
    if s.softcap is None:
        return score * (s.scale * LOG2E)
    # tanh(x) = 1 - 2 / (1 + exp(2x)), which is right at both ends
    grown = w.exp2(score * (2 * s.scale / s.softcap * LOG2E)) + 1.0
    return w.fma(w.reciprocal(grown), w.f32(-2 * s.softcap * LOG2E), w.f32(s.softcap * LOG2E))
