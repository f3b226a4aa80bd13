"""The second program: the partials of a query to its output. A warp takes a query; knows nothing of keys or values."""

from __future__ import annotations

import math
from typing import Any

from pallas_kernels.gpu.spec import LOG2E, LOWEST, QUERIES, Memory, Spec


def combine_partials(w: Any, s: Spec, m: Memory, out: Any, lse: Any, n_warps: int, n_ctas: int) -> None:
    """The second program: every query's partials to one output `[B, Tq, N, H]` and natural log-sum-exp `[B, Tq, N]`."""

    def plan(field: str, index: Any = 0) -> Any:
        return w.load(m.plan, (w.i32(index) + s.layout.at(field)) * 4, "i32")

    n_rows = s.B * s.Tq * s.N
    n_words = -(-s.H // 32)
    group = QUERIES * s.blocks

    def row(i: Any, _: list[Any]) -> list[Any]:
        number = (i * n_ctas + w.cta) * n_warps + w.warp
        kept = number < n_rows
        number = w.minimum(number, n_rows - 1)
        bt, n = number // s.N, number % s.N
        b, t = bt // s.Tq, bt % s.Tq
        k, query = n // s.G, t * s.G + n % s.G
        item = (query // group) * s.head_groups + k // s.heads_at_once
        n_tiles, share = plan("n_tiles", b), plan("tiles_per_cta")
        start = plan("tile_start", b) + item * n_tiles
        first_cta = start // share
        n_stretches = w.maximum(start + n_tiles - 1, 0) // share - first_cta + 1
        n_stretches = w.select(n_tiles > 0, n_stretches, 0)

        def gather(j: Any, carry: list[Any]) -> list[Any]:
            top, mass, *acc = carry
            part = b * s.items_per_request + item + first_cta + j // s.ways
            at = (w.i64(part) * s.ways + w.i64(j % s.ways)) * s.heads_at_once + w.i64(k % s.heads_at_once)
            at = at * s.rows + w.i64(query % group)
            part_lse = w.load(m.lse, at * 4, "f32")
            values = []
            for e in range(n_words):
                dim = w.minimum(w.lane + 32 * e, s.H - 1)
                values.append(w.load(m.out, at * (4 * s.H) + w.i64(dim * 4), "f32"))
            higher = w.maximum(w.maximum(top, part_lse), LOWEST)
            keep, weight = w.exp2(top - higher), w.exp2(part_lse - higher)
            acc = [w.fma(a, keep, v * weight) for a, v in zip(acc, values, strict=True)]
            return [higher, w.fma(mass, keep, weight), *acc]

        empty = [w.f32(-math.inf), *([w.f32(0.0)] * (1 + n_words))]
        top, mass, *acc = w.loop(n_stretches * s.ways, gather, empty)
        share_of = w.select(mass > 0.0, w.reciprocal(mass), 0.0)
        for e, x in enumerate(acc):
            dim = w.lane + 32 * e
            w.store_f32(out, w.i64(number) * (4 * s.H) + w.i64(dim * 4), [x * share_of], kept & (dim < s.H))
        natural = (top + w.log2(mass)) * (1 / LOG2E)
        w.store_f32(lse, w.i64(number) * 4, [natural], kept & (w.lane == 0))
        return []

    w.loop(-(-n_rows // (n_ctas * n_warps)), row, [])
