"""Partial attention over token-granular slots as a warp's program, for NVIDIA GPUs from Hopper on.

Each warp that computes takes one KV head's 16 tokens of a tile through tensor-core products: scores `[tokens,
queries]` = K q, and outputs `[dims, queries]` += V^T p. Tokens and dims are the long side of a product and
queries the short one, because in decoding there are few queries for a KV head: 8 cost half of what 16 would.
Softmax is online. Planning and copying are in `orders`.

The program is written against the operations of `warp_numpy.WarpMachine` (its meaning) and runs as Mosaic GPU
code through `warp_mosaic.MosaicWarp`. It knows arrays by address; shapes and layouts are in `spec`.

Source: Lamina 2025 §4.2.2 (partial attention with log-sum-exp), online softmax as in flash attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pallas_kernels.gpu.combine import scaled
from pallas_kernels.gpu.orders import FIRST, KEYS, LAST, STOP, VALUES, Order, Orders
from pallas_kernels.gpu.spec import LINE, LOWEST, ORDER_WORDS, ORDERS, QUERIES, TOKENS, Memory, Spec

# Registers of a thread, by warps that compute: (of the other 4, of these). Together no more than the launch
# gave the CTA (168, 128 or 96 a thread), or warps wait for ever for registers that nobody gives back.
_REGISTERS = {8: (40, 232), 12: (40, 152), 16: (40, 104)}


@dataclass
class State:
    """What a warp keeps of an item: registers. A lane has two queries of each block."""

    queries: list[list[list[Any]]]  # [blocks][H / 16][2]
    positions: list[list[Any]]  # [blocks][2]
    top: list[list[Any]]  # [blocks][2], running maximum in log2 units
    mass: list[list[Any]]  # [blocks][2], this lane's share of the softmax mass
    acc: list[list[list[Any]]]  # [blocks][H / 16][4], output so far

    def flat(self) -> list[Any]:
        out: list[Any] = []
        for block in range(len(self.top)):
            out += [r for pair in self.queries[block] for r in pair]
            out += [*self.positions[block], *self.top[block], *self.mass[block]]
            out += [r for four in self.acc[block] for r in four]
        return out

    @classmethod
    def of(cls, flat: list[Any], s: Spec) -> State:
        chunks = s.H // 16
        size = 6 * chunks + 6
        state = cls([], [], [], [], [])
        for block in range(s.blocks):
            regs = flat[block * size : (block + 1) * size]
            state.queries.append([regs[2 * c : 2 * c + 2] for c in range(chunks)])
            at = 2 * chunks
            state.positions.append(regs[at : at + 2])
            state.top.append(regs[at + 2 : at + 4])
            state.mass.append(regs[at + 4 : at + 6])
            state.acc.append([regs[at + 6 + 4 * c : at + 10 + 4 * c] for c in range(chunks)])
        return state


class PartialAttention(Orders):
    """The program of one warp."""

    def __init__(self, w: Any, spec: Spec, memory: Memory, shared: Any) -> None:
        super().__init__(w, spec, memory, shared)
        warp = w.minimum(w.warp, self.n_workers - 1)
        self.head_in_cta, self.way = warp % spec.heads_at_once, warp // spec.heads_at_once
        self.quad, self.octet = w.lane % 4, w.lane // 4
        # Four matrices of 8 rows are loaded at once, lane 8 i + r naming row r of matrix i: rows are tokens,
        # and the matrices two groups of 8 tokens by two columns of 16 bytes.
        pair, half, row = w.lane // 16, w.lane // 8 % 2, w.lane % 8
        if spec.kind == "int8":  # 16 bytes are the 16 dims of a product; two products at once
            columns = [16 * min(c, spec.H // 16 - 1) for c in range(spec.H // 16 + 1)]
            first, second = columns[0::2], columns[1::2]
            at = [w.select(pair == 0, w.i32(a), b) for a, b in zip(first, second, strict=False)]
            k = [self.place(8 * half + row, c) for c in at]
            v = k
        # 16 bytes are 8 dims: keys' columns differ from second to third matrix, values' from first to second
        else:
            chunks = range(spec.H // 16)
            k = [self.place(8 * half + row, pair * 16 + 32 * c) for c in chunks]
            v = [self.place(8 * pair + row, half * 16 + 32 * c) for c in chunks]
        self.k_matrices, self.v_matrices = k, [at + spec.tile_bytes for at in v]

    def place(self, token: Any, column: Any) -> Any:
        """Where, from a tile's start, 16 bytes are: of this warp's token, at a column of its head's row."""
        s = self.s
        row = (self.way * TOKENS + token) * s.pitch_bytes
        column = self.head_in_cta * s.row_bytes + column
        if not s.swizzled:
            return row + column
        line = row // LINE + column // LINE
        piece = (column // 16 % 8) ^ (line % 8)
        return line * LINE + piece * 16

    def run(self) -> None:
        w, n_warps = self.w, self.s.tuning.n_warps
        self.init_barriers()
        registers = _REGISTERS.get(n_warps)

        def serve() -> list[Any]:
            if registers:  # what these warps do not need lets the others keep all they have
                w.set_registers(registers[0], more=False)
            w.cond(w.warp == n_warps, self.plan_all, [])
            for half in (KEYS, VALUES):
                w.cond(w.warp == n_warps + 1 + half, partial(self.copy, half), [])
            return []

        def work() -> list[Any]:
            if registers:
                w.set_registers(registers[1], more=True)
            return w.cond(w.warp < self.n_workers, self.compute, [])

        w.cond(w.warp >= n_warps, serve, [])
        w.cond(w.warp < n_warps, work, [])

    def compute(self) -> list[Any]:
        w, s = self.w, self.s

        def step(carry: list[Any]) -> tuple[Any, list[Any]]:
            number, parity, stage, stage_parity, *rest = carry
            order, rest = Order(*rest[:ORDER_WORDS]), rest[ORDER_WORDS:]
            scales, rest = (rest[:2], rest[2:]) if s.slot_scales else ([], rest)
            # The order after this one is read now, and what is kept at its slots asked for, to be there in
            # time.
            place = self.after(number, parity, ORDERS)
            coming, coming_scales = self.look_ahead(*place)
            fresh = (order.flags & FIRST) > 0
            state = State.of(w.cond(fresh, lambda: self.begin(order).flat(), rest), s)
            half_of = partial(self.with_half, stage, stage_parity)
            state = self.attend(order, self.ring + stage * s.stage_bytes, state, scales, half_of)
            w.cond((order.flags & LAST) > 0, lambda: self.store(order, state), [])
            stages = self.after(stage, stage_parity, s.tuning.n_stages)
            more = (coming.flags & STOP) == 0
            return more, [*place, *stages, *coming.flat(), *coming_scales, *state.flat()]

        zero = w.i32(0)
        order, scales = self.look_ahead(zero, zero)

        def work() -> list[Any]:
            w.repeat(step, [zero, zero, zero, zero, *order.flat(), *scales, *self.nothing().flat()])
            return []

        w.cond((order.flags & STOP) == 0, work, [])
        return []

    def with_half(self, stage: Any, parity: Any, half: int, work: Callable[[], Any]) -> Any:
        """Work on a stage's keys or values: once they are there, and their room is free when it is done."""
        w = self.w
        w.wait(self.full(stage, half), parity)
        result = work()
        w.sync()
        w.arrive(self.empty(stage, half), w.lane == 0)
        return result

    def look_ahead(self, number: Any, parity: Any) -> tuple[Order, list[Any]]:
        """An order, and lane t the bits of its token t's scales, the key's and the value's: not looked at
        before a tile later, since whoever looks waits for memory."""
        w, s = self.w, self.s
        order, scales = self.read_order(number, parity), []
        if s.slot_scales:
            at = self.order(number)[0] + 4 * ORDER_WORDS
            slot = w.load_shared(at + (self.way * TOKENS + w.lane % TOKENS) * 4)
            offset = (w.i64(slot) * s.K + w.i64(self.head(order))) * 2
            scales = [w.load(pointer, offset, "u16") for pointer in (self.m.k_scales, self.m.v_scales)]
        self.done_with_order(number)
        return order, scales

    def head(self, order: Order) -> Any:
        return self.s.first_head(self.w, order.item % self.s.head_groups) + self.head_in_cta

    # --- an item's beginning ---
    def nothing(self) -> State:
        w, s = self.w, self.s
        blocks, chunks, zero = range(s.blocks), range(s.H // 16), w.f32(0.0)
        return State(
            [[[w.i32(0)] * 2 for _ in chunks] for _ in blocks],
            [[w.i32(0)] * 2 for _ in blocks],
            [[w.f32(-math.inf)] * 2 for _ in blocks],
            [[zero] * 2 for _ in blocks],
            [[[zero] * 4 for _ in chunks] for _ in blocks],
        )

    def begin(self, order: Order) -> State:
        state = self.nothing()
        for block in range(self.s.blocks):
            state.queries[block] = self.load_queries(order, block)
            state.positions[block] = self.query_positions(order, block)
        return state

    def query(self, order: Order, block: int, column: Any) -> Any:
        """The number, among a KV head's G * Tq queries, of a block's column."""
        group = order.item // self.s.head_groups
        return group * (QUERIES * self.s.blocks) + QUERIES * block + column

    def load_queries(self, order: Order, block: int) -> list[list[Any]]:
        """This lane's part of 8 queries as right operands: [H / 16][2]."""
        w, s = self.w, self.s
        number = self.query(order, block, self.octet)
        kept = number < s.G * s.Tq
        number = w.minimum(number, s.G * s.Tq - 1)
        row = w.i64(order.b * s.Tq + number // s.G) * s.N + w.i64(self.head(order) * s.G + number % s.G)
        out = []
        for chunk in range(s.H // 16):
            # int8 keys come four dims a lane: the queries' dims are dealt out the same way
            dims = [self.quad * 4 + 2 * i if s.kind == "int8" else self.quad * 2 + 8 * i for i in range(2)]
            at = [row * (2 * s.H) + w.i64((dim + 16 * chunk) * 2) for dim in dims]
            out.append([w.select(kept, w.load(self.m.q, x, "b32"), 0) for x in at])
        return out

    def query_positions(self, order: Order, block: int) -> list[Any]:
        w, s = self.w, self.s
        if s.window is None and not s.positions:
            return [w.i32(0)] * 2
        out = []
        for e in range(2):
            number = w.minimum(self.query(order, block, 2 * self.quad + e), s.G * s.Tq - 1)
            out.append(w.load(self.m.q_positions, (order.b * s.Tq + number // s.G) * 4, "i32"))
        return out

    # --- a tile ---
    def attend(self, order: Order, tile: Any, state: State, scales: list[Any], half_of: Callable) -> State:
        w, s = self.w, self.s
        k_scale, v_scale = self.by_token(scales[:1]), self.by_token(scales[1:])
        scores = half_of(KEYS, lambda: self.scores(tile, state))
        first = order.position + self.way * TOKENS + self.octet
        tops, masses, accs, weights = [], [], [], []
        for block, score in enumerate(scores):
            x = []
            for i, value in enumerate(score):  # token octet + 8 (i // 2), query 2 quad + i % 2
                value = value * k_scale[i // 2] if k_scale else value
                seen = self.seen(order, first + 8 * (i // 2), state.positions[block][i % 2])
                x.append(w.select(seen, scaled(w, s, value), -math.inf))
            top = [w.maximum(state.top[block][e], w.maximum(x[e], x[e + 2])) for e in range(2)]
            for mask in (4, 8, 16):
                top = [w.maximum(t, w.shuffle_xor(t, mask)) for t in top]
            top = [w.maximum(t, LOWEST) for t in top]
            shrink = [w.exp2(state.top[block][e] - top[e]) for e in range(2)]
            p = [w.exp2(value - top[i % 2]) for i, value in enumerate(x)]
            tops.append(top)
            masses.append([w.fma(state.mass[block][e], shrink[e], p[e] + p[e + 2]) for e in range(2)])
            accs.append([[r * shrink[i % 2] for i, r in enumerate(four)] for four in state.acc[block]])
            if v_scale:
                p = [value * v_scale[i // 2] for i, value in enumerate(p)]
            packed = [w.pack(p[0], p[1], s.product), w.pack(p[2], p[3], s.product)]
            weights.append([w.transpose(pair) for pair in packed])
        half_of(VALUES, lambda: self.accumulate(accs, weights, tile))
        return State(state.queries, state.positions, tops, masses, accs)

    def by_token(self, scale: list[Any]) -> list[Any]:
        """From the bits of lane t's scale of token t to the scales of this lane's two tokens."""
        w = self.w
        return [w.bf16_bits_to_f32(w.shuffle(x, self.octet + 8 * i)) for x in scale for i in range(2)]

    def scores(self, tile: Any, state: State) -> list[list[Any]]:
        """Products of 16 keys and each block's 8 queries: [blocks][4]."""
        w, s = self.w, self.s
        acc = [[w.f32(0.0)] * 4 for _ in range(s.blocks)]
        for i, at in enumerate(self.k_matrices):
            regs = w.load_matrices(tile + at, transposed=False)
            for chunk, left in self.key_operands(i, regs):
                for block in range(s.blocks):
                    acc[block] = w.mma(acc[block], left, state.queries[block][chunk], s.product)
        return acc

    def key_operands(self, i: int, regs: list[Any]) -> list[tuple[int, list[Any]]]:
        """Left operands from load number i of the keys: the chunk of 16 dims, and its registers."""
        w = self.w
        if self.s.kind != "int8":
            return [(i, regs)]
        out = []
        for j in range(2):
            if 2 * i + j < self.s.H // 16:
                tokens = regs[2 * j : 2 * j + 2]
                left = [w.bytes_to_f16(r, *dims) for dims in ((0, 1), (2, 3)) for r in tokens]
                out.append((2 * i + j, left))
        return out

    def accumulate(self, accs: list[list[list[Any]]], weights: list[list[Any]], tile: Any) -> None:
        w, s = self.w, self.s
        for i, at in enumerate(self.v_matrices):
            regs = w.load_matrices(tile + at, transposed=True)
            for chunk, left in self.value_operands(i, regs):
                for acc, right in zip(accs, weights, strict=True):
                    acc[chunk] = w.mma(acc[chunk], left, right, s.product)

    def value_operands(self, i: int, regs: list[Any]) -> list[tuple[int, list[Any]]]:
        """Left operands from load number i of the values. Of int8 the even dims are rows 0-7, the odd ones
        8-15."""
        w = self.w
        if self.s.kind != "int8":
            return [(i, regs)]
        out = []
        for j in range(2):
            if 2 * i + j < self.s.H // 16:
                tokens = regs[2 * j : 2 * j + 2]
                out.append((2 * i + j, [w.bytes_to_f16(r, odd, 2 + odd) for r in tokens for odd in range(2)]))
        return out

    def seen(self, order: Order, position: Any, query_at: Any) -> Any:
        ok = position < order.end
        if self.s.positions:
            ok = ok & (position <= query_at)
        if self.s.window is not None:
            ok = ok & (position > query_at - self.s.window)
        return ok

    # --- an item's end ---
    def store(self, order: Order, state: State) -> list[Any]:
        """This stretch's partial of the item: normalised output, and log2 of its softmax mass."""
        w, s = self.w, self.s
        number = w.cta + order.b * s.items_per_request + order.item
        part = (w.i64(number) * s.ways + w.i64(self.way)) * s.heads_at_once + w.i64(self.head_in_cta)
        for block in range(s.blocks):
            for e in range(2):
                mass = state.mass[block][e]
                for mask in (4, 8, 16):
                    mass = mass + w.shuffle_xor(mass, mask)
                share = w.select(mass > 0.0, w.reciprocal(mass), 0.0)
                row = 2 * self.quad + (QUERIES * block + e)
                kept = row < s.rows
                at = part * s.rows + w.i64(row)
                lse = state.top[block][e] + w.log2(mass)
                w.store_f32(self.m.lse, at * 4, [lse], kept & (self.octet == 0))
                for chunk, acc in enumerate(state.acc[block]):
                    pair = [acc[e] * share, acc[e + 2] * share]
                    to = at * (4 * s.H) + 64 * chunk
                    if s.kind == "int8":  # an even dim and the odd one after it
                        w.store_f32(self.m.out, to + w.i64(self.octet * 8), pair, kept)
                    else:
                        for i in range(2):
                            w.store_f32(
                                self.m.out, to + w.i64(self.octet * 4 + 32 * i), pair[i : i + 1], kept
                            )
        return []
