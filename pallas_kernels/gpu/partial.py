"""Partial attention over token-granular slots as a warp's program, for NVIDIA GPUs from Hopper on.

Three kinds of warps work in a CTA and meet at barriers in shared memory alone. One *plans*: it goes through the
CTA's share of the work and writes an order for every tile, with the tokens' slots, several tiles ahead, since whatever is looked up from
memory that the KV saturates takes microseconds. One *copies*: a token's row of all the CTA's KV heads is one bulk copy
from wherever its slot is into a ring of tiles. The others *compute*: each takes one KV head through tensor-core
products and an online softmax.

The program is written against the operations of `warp_numpy.WarpMachine` (its meaning) and runs as Mosaic GPU code
through `warp_mosaic.MosaicWarp`. It knows arrays by address; shapes and layouts are in `Spec`.

Source: Lamina 2025 §4.2.2 (partial attention with log-sum-exp), online softmax as in flash attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_kernels.gpu.plan import PlanLayout

LOG2E = math.log2(math.e)
# Stands in for a maximum of -inf, so that no -inf is subtracted from itself.
LOWEST = -1e30
LINE = 128  # bytes of shared memory's 32 banks
SWIZZLE_PERIOD = 8 * LINE
ROWS = 16  # rows of queries in one tensor-core product
# Registers a thread of 8 + 4 warps: 40 x 128 + 232 x 256 fit the 65,536 of a multiprocessor.
_SERVE_REGISTERS, _WORK_REGISTERS = 40, 232
_ORDERS = 8  # tiles that are planned ahead
_ORDER_WORDS = 5
_PREFETCHED = 8  # tiles whose slots are on their way to the L2 cache
_FIRST, _LAST, _STOP = 1, 2, 4  # flags of an order: of the item in this stretch, and no more work


@dataclass(frozen=True)
class Tuning:
    """How the kernel is laid over a GPU.

    `n_ctas` CTAs of `n_warps` warps that compute (a multiple of 4) and 4 for the one that copies; `n_stages` tiles a
    ring.
    """

    n_ctas: int = 132
    n_warps: int = 8
    n_stages: int = 3

    def __post_init__(self) -> None:
        if self.n_ctas < 1:
            raise ValueError(f"{self.n_ctas=} must be at least 1")
        if self.n_warps < 4 or self.n_warps % 4:
            raise ValueError(f"{self.n_warps=} must be a positive multiple of 4, a warp group")
        if self.n_stages < 2:
            raise ValueError(f"{self.n_stages=} must be at least 2: one tile in use and one on its way")


@dataclass(frozen=True)
class Spec:
    """One kernel: shapes (axis letters as everywhere), storage kind "bf16", "f16" or "int8", and scoring.

    `slot_scales`: int8 with a bfloat16 scale a slot and KV head. `positions`: queries have positions of their own
    (else they follow the stored tokens); `first` in the plan then bounds what the window leaves to any of them.
    """

    B: int
    Tq: int
    N: int
    K: int
    H: int
    C: int
    kind: str
    scale: float
    window: int | None
    softcap: float | None
    slot_scales: bool
    positions: bool
    tuning: Tuning

    @property
    def G(self) -> int:  # noqa: N802
        return self.N // self.K

    @property
    def T(self) -> int:  # noqa: N802
        """Tokens a warp takes at a time."""
        return 32 if self.kind == "int8" else 16

    @property
    def product(self) -> str:
        return "bf16" if self.kind == "bf16" else "f16"

    @property
    def row_bytes(self) -> int:
        """Of one token and KV head."""
        return self.H * (1 if self.kind == "int8" else 2)

    @property
    def token_bytes(self) -> int:
        """Of one token's row of all the CTA's heads."""
        return self.heads_at_once * self.row_bytes

    @property
    def swizzled(self) -> bool:
        """Whether a token's row is whole lines of 128 bytes, and is copied as such.

        The copy engine then writes line by line, and exchanges a line's 16-byte pieces by the line's number, so that
        eight rows of a matrix lie in different banks. Other rows are moved apart by 16 bytes to that end, which costs
        the engine a tenth of its speed: it cuts every line in two.
        """
        return self.token_bytes % LINE == 0

    @property
    def pitch_bytes(self) -> int:
        """From one token to the next in shared memory."""
        return self.token_bytes + (LINE if self.swizzled else 16)

    @property
    def tile_bytes(self) -> int:
        return -(-self.tile_tokens * self.pitch_bytes // SWIZZLE_PERIOD) * SWIZZLE_PERIOD

    @property
    def stage_bytes(self) -> int:
        """Keys, then values."""
        return 2 * self.tile_bytes

    @property
    def barrier_bytes(self) -> int:
        """Two barriers a stage and two an order, then the orders; all after the ring."""
        return 16 * (self.tuning.n_stages + _ORDERS) + _ORDERS * self.order_bytes

    @property
    def order_bytes(self) -> int:
        return 4 * (_ORDER_WORDS + self.tile_tokens)

    @property
    def shared_bytes(self) -> int:
        """The ring begins where a swizzle's period does, which may not be where the array does."""
        return SWIZZLE_PERIOD + self.tuning.n_stages * self.stage_bytes + self.barrier_bytes

    @property
    def heads_at_once(self) -> int:
        """KV heads a CTA takes: the most that divide K."""
        return max(h for h in range(1, self.tuning.n_warps + 1) if self.K % h == 0)

    @property
    def ways(self) -> int:
        """Warps that share a head of a CTA, each with its T tokens of a tile."""
        return self.tuning.n_warps // self.heads_at_once

    @property
    def head_groups(self) -> int:
        return self.K // self.heads_at_once

    @property
    def row_groups(self) -> int:
        """Groups of 16 queries of one KV head."""
        return -(-self.G * self.Tq // ROWS)

    @property
    def items_per_request(self) -> int:
        return self.head_groups * self.row_groups

    @property
    def rows(self) -> int:
        """Rows of a partial that are kept."""
        return min(ROWS, self.G * self.Tq)

    @property
    def tile_tokens(self) -> int:
        return self.T * self.ways

    @property
    def layout(self) -> PlanLayout:
        return PlanLayout(self.B, self.items_per_request, self.tuning.n_ctas)

    @property
    def partial_shape(self) -> tuple[int, int, int, int]:
        """[partials, ways, heads of a CTA, rows]; outputs have H after it."""
        return self.layout.n_partials, self.ways, self.heads_at_once, self.rows


@dataclass(frozen=True)
class Memory:
    """Addresses of the arrays; `None` where the spec has none."""

    q: Any  # [B, Tq, N, H] bf16 or f16
    k: Any  # [S, K, H]
    v: Any
    k_lines: Any  # [S, K * row bytes / 128, 128 bytes]: the same as the copy engine sees it
    v_lines: Any
    k_scales: Any  # [S, K] bf16
    v_scales: Any
    table: Any  # [B, C] i32
    plan: Any  # i32
    q_positions: Any  # [B, Tq] i32
    out: Any  # partials, float32
    lse: Any  # their log2 of the softmax mass, float32


@dataclass
class Cursor:
    """A place in the long row of tiles: registers."""

    b: Any  # request
    item: Any  # which of the request's items
    tile: Any  # which of the item's tiles
    n_tiles: Any  # of an item of this request
    first: Any  # first position
    end: Any  # past the last position

    def flat(self) -> list[Any]:
        return [self.b, self.item, self.tile, self.n_tiles, self.first, self.end]


@dataclass
class Order:
    """What is to be done with a tile: registers, read from shared memory."""

    flags: Any
    b: Any  # request
    item: Any  # which of the request's items
    position: Any  # of the tile's first token
    end: Any  # past the request's last position

    def flat(self) -> list[Any]:
        return [self.flags, self.b, self.item, self.position, self.end]


class PartialAttention:
    """The program of one warp."""

    def __init__(self, w: Any, spec: Spec, memory: Memory, shared: Any) -> None:
        self.w, self.s, self.m = w, spec, memory
        s = spec
        self.plan_at = spec.layout.at
        self.ring = (w.i32(shared) + (SWIZZLE_PERIOD - 1)) & -SWIZZLE_PERIOD
        self.barriers = self.ring + s.tuning.n_stages * s.stage_bytes
        heads = s.heads_at_once
        warp = w.minimum(w.warp, heads * s.ways - 1)
        self.head_in_cta, self.way = warp % heads, warp // heads
        self.quad, self.octet = w.lane % 4, w.lane // 4
        matrix, row = w.lane // 8, w.lane % 8
        if s.kind == "int8":  # four groups of 8 tokens, one group of 16 dims
            k_token, k_column = matrix * 8 + row, w.i32(0)
            v_token, v_column = k_token, k_column
        else:  # two groups of 8 tokens by two groups of 8 dims
            k_token, k_column = (matrix // 2) * 8 + row, (matrix % 2) * 16
            v_token, v_column = (matrix % 2) * 8 + row, (matrix // 2) * 16
        step = 16 if s.kind == "int8" else 32
        chunks = range(s.H // 16)
        self.k_matrices = [self.place(k_token, k_column + step * c) for c in chunks]
        self.v_matrices = [self.place(v_token, v_column + step * c) + s.tile_bytes for c in chunks]

    def place(self, token: Any, column: Any) -> Any:
        """Where, from a tile's start, 16 bytes are: of this warp's token, at a column of its head's row."""
        s = self.s
        row = (self.way * s.T + token) * s.pitch_bytes
        column = self.head_in_cta * s.row_bytes + column
        if not s.swizzled:
            return row + column
        line = row // LINE + column // LINE
        piece = (column // 16 % 8) ^ (line % 8)
        return line * LINE + piece * 16

    # --- the row of tiles ---
    def plan(self, field: str, index: Any = 0) -> Any:
        return self.w.load(self.m.plan, (self.w.i32(index) + self.plan_at(field)) * 4, "i32")

    def at_request(self, b: Any, item: Any, tile: Any) -> Cursor:
        fields = (self.plan(f, b) for f in ("n_tiles", "first", "end"))
        return Cursor(b, item, tile, *fields)

    def start(self, b: Any, first_tile: Any) -> Cursor:
        """At a tile of the row, which is one of request b's."""
        w = self.w
        cursor = self.at_request(b, w.i32(0), w.i32(0))
        into = w.maximum(first_tile - self.plan("tile_start", b), 0)
        n_tiles = w.maximum(cursor.n_tiles, 1)
        cursor.item, cursor.tile = into // n_tiles, into % n_tiles
        return cursor

    def advance(self, c: Cursor) -> Cursor:
        w, items = self.w, self.s.items_per_request

        def next_item() -> list[Any]:
            last = c.item + 1 >= items
            b = w.select(last, self.plan("next", c.b), c.b)
            item = w.select(last, w.i32(0), c.item + 1)
            return self.at_request(b, item, w.i32(0)).flat()

        stay = Cursor(c.b, c.item, c.tile + 1, c.n_tiles, c.first, c.end)
        return Cursor(*w.cond(c.tile + 1 >= c.n_tiles, next_item, stay.flat()))

    # --- orders ---
    def order(self, number: Any) -> tuple[Any, Any, Any]:
        """Where an order is, and its barriers: full, empty."""
        n_stages = self.s.tuning.n_stages
        barriers = self.barriers + (16 * n_stages) + number * 16
        at = self.barriers + (16 * (n_stages + _ORDERS)) + number * self.s.order_bytes
        return at, barriers, barriers + 8

    def after(self, number: Any, parity: Any, size: int) -> tuple[Any, Any]:
        """The place in a ring after this one, and the parity its barriers have there."""
        w = self.w
        around = number == size - 1
        return w.select(around, w.i32(0), number + 1), w.select(around, 1 - parity, parity)

    def plan_all(self) -> list[Any]:
        """Writes an order for each tile of the CTA's stretch."""
        w, s = self.w, self.s
        lanes = min(32, s.tile_tokens)
        tokens = [w.lane % lanes + lanes * r for r in range(s.tile_tokens // lanes)]
        first_lane = w.lane == 0

        def slots(c: Cursor) -> list[Any]:
            """Each lane its tokens' slots; past the end the last token's again, which is this request's own."""
            out = []
            for token in tokens:
                at = w.maximum(w.minimum(c.first + c.tile * s.tile_tokens + token, c.end - 1), 0)
                row = w.i64(c.b) * (4 * s.C)
                out.append(w.load(self.m.table, row + w.i64(at * 4), "i32"))
                coming = w.minimum(at + _PREFETCHED * s.tile_tokens, s.C - 1)
                w.prefetch(self.m.table, row + w.i64(coming * 4))
            return out

        def write(place: list[Any], words: list[Any], slots: list[Any]) -> list[Any]:
            number, parity = place
            at, full, empty = self.order(number)
            w.wait(empty, 1 - parity)
            for i, word in enumerate(words):
                w.store_shared(at + 4 * i, word, first_lane)
            for token, slot in zip(tokens, slots, strict=True):
                w.store_shared(at + (4 * _ORDER_WORDS) + token * 4, slot, w.lane < lanes)
            w.sync()
            w.arrive(full, first_lane)
            return list(self.after(number, parity, _ORDERS))

        share = self.plan("tiles_per_cta")
        start = w.cta * share
        n = w.maximum(w.minimum(start + share, self.plan("total_tiles")) - start, 0)

        def tile(i: Any, carry: list[Any]) -> list[Any]:
            place, c, now = carry[:2], Cursor(*carry[2:8]), carry[8:]
            beyond = self.advance(c)
            coming = slots(beyond)
            first = w.select((c.tile == 0) | (i == 0), w.i32(_FIRST), 0)
            last = w.select((c.tile + 1 >= c.n_tiles) | (i + 1 >= n), w.i32(_LAST), 0)
            position = c.first + c.tile * s.tile_tokens
            place = write(place, [first | last, c.b, c.item, position, c.end], now)
            return [*place, *beyond.flat(), *coming]

        zero = w.i32(0)
        c = self.start(self.plan("cta_request", w.cta), start)
        place = w.loop(n, tile, [zero, zero, *c.flat(), *slots(c)])[:2]
        write(place, [w.i32(_STOP), zero, zero, zero, zero], [zero] * len(tokens))
        return []

    def read_order(self, number: Any, parity: Any) -> Order:
        """Waits for it; whoever has read all that it wants says so at the order's empty barrier."""
        w = self.w
        at, full, _ = self.order(number)
        w.wait(full, parity)
        return Order(*[w.load_shared(at + 4 * i) for i in range(_ORDER_WORDS)])

    def done_with_order(self, number: Any) -> None:
        w = self.w
        w.sync()
        w.arrive(self.order(number)[2], w.lane == 0)

    def head(self, order: Order) -> Any:
        return (order.item % self.s.head_groups) * self.s.heads_at_once + self.head_in_cta

    # --- the ring ---
    def full(self, stage: Any) -> Any:
        return self.barriers + stage * 16

    def empty(self, stage: Any) -> Any:
        return self.barriers + stage * 16 + 8

    # --- copying ---
    def copy(self) -> list[Any]:
        w, s = self.w, self.s
        lanes = min(32, s.tile_tokens)
        tokens = [w.lane % lanes + lanes * r for r in range(s.tile_tokens // lanes)]

        def tile(carry: list[Any]) -> tuple[Any, list[Any]]:
            number, parity, stage, stage_parity = carry
            order = self.read_order(number, parity)
            at = self.order(number)[0] + 4 * _ORDER_WORDS
            slots = [w.load_shared(at + token * 4) for token in tokens]
            self.done_with_order(number)
            more = (order.flags & _STOP) == 0

            def send() -> list[Any]:
                full = self.full(stage)
                w.wait(self.empty(stage), 1 - stage_parity)
                w.expect(full, 2 * s.tile_tokens * s.token_bytes, w.lane == 0)
                w.sync()
                to = self.ring + stage * s.stage_bytes
                first_head = (order.item % s.head_groups) * s.heads_at_once
                for token, slot in zip(tokens, slots, strict=True):
                    row = to + token * s.pitch_bytes
                    self.copy_token(row, slot, first_head, full, w.lane < lanes)
                return []

            w.cond(more, send, [])
            place = self.after(number, parity, _ORDERS)
            return more, [*place, *self.after(stage, stage_parity, s.tuning.n_stages)]

        w.repeat(tile, [w.i32(0)] * 4)
        return []

    def copy_token(self, row: Any, slot: Any, first_head: Any, full: Any, where: Any) -> None:
        w, s = self.w, self.s
        if s.swizzled:
            line = first_head * s.row_bytes // LINE
            n_lines = s.token_bytes // LINE
            w.copy_lines(row, self.m.k_lines, line, slot, n_lines, full, where)
            w.copy_lines(row + s.tile_bytes, self.m.v_lines, line, slot, n_lines, full, where)
            return
        at = w.i64(slot) * (s.K * s.row_bytes) + w.i64(first_head * s.row_bytes)
        w.copy_rows(row, self.m.k, at, s.token_bytes, full, where)
        w.copy_rows(row + s.tile_bytes, self.m.v, at, s.token_bytes, full, where)

    # --- computing ---
    def load_queries(self, c: Order) -> list[list[Any]]:
        """This lane's part of the item's 16 rows of queries, as left operands: [H / 16][4]."""
        w, s = self.w, self.s
        head, group = self.head(c), c.item // s.head_groups
        offsets, kept = [], []
        for half in range(2):
            m = group * ROWS + self.octet + 8 * half
            kept.append(m < s.G * s.Tq)
            m = w.minimum(m, s.G * s.Tq - 1)
            row = (w.i64(c.b * s.Tq + m // s.G)) * s.N + w.i64(head * s.G + m % s.G)
            offsets.append(row * (2 * s.H))
        out = []
        for chunk in range(s.H // 16):
            regs = []
            for part in range(2):
                # int8 keys come four dims a lane: the queries' dims are dealt out the same way
                dim = self.quad * 4 + 2 * part if s.kind == "int8" else self.quad * 2 + 8 * part
                for half in range(2):
                    at = offsets[half] + w.i64((dim + 16 * chunk) * 2)
                    regs.append(w.select(kept[half], w.load(self.m.q, at, "b32"), 0))
            out.append(regs)
        return out

    def scores(self, stage_at: Any, queries: list[list[Any]]) -> list[list[Any]]:
        """Products of 16 queries and T keys: [T / 8][4], in log2 units once scaled."""
        w, s = self.w, self.s
        acc = [[w.f32(0.0)] * 4 for _ in range(s.T // 8)]
        for chunk, q in enumerate(queries):
            regs = w.load_matrices(stage_at + self.k_matrices[chunk], transposed=False)
            if s.kind == "int8":
                for block in range(4):
                    b = [w.bytes_to_f16(regs[block], 0, 1), w.bytes_to_f16(regs[block], 2, 3)]
                    acc[block] = w.mma(acc[block], q, b, s.product)
            else:
                for block in range(2):
                    acc[block] = w.mma(acc[block], q, regs[2 * block : 2 * block + 2], s.product)
        return acc

    def scaled(self, score: Any) -> Any:
        w, s = self.w, self.s
        if s.softcap is None:
            return score * (s.scale * LOG2E)
        # tanh(x) = 1 - 2 / (1 + exp(2x)), which is right at both ends
        grown = w.exp2(score * (2 * s.scale / s.softcap * LOG2E)) + 1.0
        return w.fma(w.reciprocal(grown), w.f32(-2 * s.softcap * LOG2E), w.f32(s.softcap * LOG2E))

    def seen(self, c: Order, position: Any, rows: list[Any]) -> list[Any]:
        """For both rows of this lane: whether the query sees the token at `position`."""
        w, s = self.w, self.s
        stored = position < c.end
        out = []
        for at in rows:
            ok = stored
            if s.positions:
                ok = ok & (position <= at)
            if s.window is not None:
                ok = ok & (position > at - s.window)
            out.append(ok)
        return out

    def row_positions(self, c: Order) -> list[Any]:
        """Positions of this lane's two queries."""
        w, s = self.w, self.s
        if s.window is None and not s.positions:
            return [w.i32(0), w.i32(0)]
        group, out = c.item // s.head_groups, []
        for half in range(2):
            m = w.minimum(group * ROWS + self.octet + 8 * half, s.G * s.Tq - 1)
            out.append(w.load(self.m.q_positions, (c.b * s.Tq + m // s.G) * 4, "i32"))
        return out

    def consume(self, c: Order, stage_at: Any, state: State, k_scale: Any, v_scale: Any) -> State:
        w, s = self.w, self.s
        scores = self.scores(stage_at, state.queries)
        at = c.position + self.way * s.T
        for block, regs in enumerate(scores):
            for e in range(2):
                token = self.quad * 2 + (8 * block + e)
                seen = self.seen(c, at + token, state.rows)
                by = w.shuffle(k_scale, token) if s.slot_scales else None
                for half in range(2):
                    x = regs[2 * half + e]
                    x = self.scaled(x if by is None else x * by)
                    regs[2 * half + e] = w.select(seen[half], x, -math.inf)
        tops, shrink = [], []
        for half in range(2):
            top = state.top[half]
            for regs in scores:
                top = w.maximum(w.maximum(top, regs[2 * half]), regs[2 * half + 1])
            top = w.maximum(top, w.shuffle_xor(top, 1))
            top = w.maximum(w.maximum(top, w.shuffle_xor(top, 2)), LOWEST)
            shrink.append(w.exp2(state.top[half] - top))
            tops.append(top)
        mass = [state.mass[half] * shrink[half] for half in range(2)]
        weights = []
        for regs in scores:
            p = [w.exp2(x - tops[i // 2]) for i, x in enumerate(regs)]
            mass = [mass[half] + p[2 * half] + p[2 * half + 1] for half in range(2)]
            weights.append(p)
        acc = [[x * shrink[i // 2] for i, x in enumerate(regs)] for regs in state.acc]
        left = self.left_operands(weights, v_scale)
        self.accumulate(acc, left, stage_at)
        return State(state.queries, state.rows, tops, mass, acc)

    def left_operands(self, weights: list[list[Any]], v_scale: Any) -> list[list[Any]]:
        """Weights `[16, T]` packed for the product with the values: [T / 16][4]."""
        w, s = self.w, self.s
        packed = []
        for block, p in enumerate(weights):
            if s.slot_scales:
                by = [w.shuffle(v_scale, self.quad * 2 + (8 * block + e)) for e in range(2)]
                p = [x * by[i % 2] for i, x in enumerate(p)]
            packed.append([w.pack(p[0], p[1], s.product), w.pack(p[2], p[3], s.product)])
        return [packed[i] + packed[i + 1] for i in range(0, len(packed), 2)]

    def accumulate(self, acc: list[list[Any]], left: list[list[Any]], stage_at: Any) -> None:
        w, s = self.w, self.s
        for chunk in range(s.H // 16):
            regs = w.load_matrices(stage_at + self.v_matrices[chunk], transposed=True)
            for i in range(2):
                n = 2 * chunk + i
                if s.kind == "int8":  # even dims, then odd ones
                    b = [w.bytes_to_f16(r, i, 2 + i) for r in regs]
                    for step in range(2):
                        acc[n] = w.mma(acc[n], left[step], b[2 * step : 2 * step + 2], s.product)
                else:
                    acc[n] = w.mma(acc[n], left[0], regs[2 * i : 2 * i + 2], s.product)

    def store(self, c: Order, state: State) -> list[Any]:
        """This stretch's partial of the item: normalised output, and log2 of its softmax mass."""
        w, s = self.w, self.s
        number = w.cta + c.b * s.items_per_request + c.item
        part = (w.i64(number) * s.ways + w.i64(self.way)) * s.heads_at_once + w.i64(self.head_in_cta)
        for half in range(2):
            if 8 * half >= s.rows:
                break
            mass = state.mass[half]
            mass = mass + w.shuffle_xor(mass, 1)
            mass = mass + w.shuffle_xor(mass, 2)
            share = w.select(mass > 0.0, w.reciprocal(mass), 0.0)
            row = self.octet + 8 * half
            kept = row < s.rows
            at = part * s.rows + w.i64(row)
            lse = state.top[half] + w.log2(mass)
            w.store_f32(self.m.lse, at * 4, [lse], kept & (self.quad == 0))
            for chunk in range(s.H // 16):
                pair = [[x * share for x in state.acc[2 * chunk + i][2 * half : 2 * half + 2]] for i in range(2)]
                to = at * (4 * s.H) + 64 * chunk
                if s.kind == "int8":
                    four = [pair[0][0], pair[1][0], pair[0][1], pair[1][1]]
                    w.store_f32(self.m.out, to + w.i64(self.quad * 16), four, kept)
                else:
                    for i in range(2):
                        w.store_f32(self.m.out, to + w.i64(self.quad * 8 + 32 * i), pair[i], kept)
        return []

    # --- the whole ---
    def run(self) -> None:
        w, s = self.w, self.s
        t, n_workers = s.tuning, s.heads_at_once * s.ways
        first_lane = (w.warp == 0) & (w.lane == 0)
        for stage in range(t.n_stages):
            w.init_barrier(self.full(stage), 1, first_lane)
            w.init_barrier(self.empty(stage), n_workers, first_lane)
        for number in range(_ORDERS):
            _, full, empty = self.order(number)
            w.init_barrier(full, 1, first_lane)
            w.init_barrier(empty, n_workers + 1, first_lane)
        w.sync_cta()

        def serve() -> list[Any]:
            if t.n_warps == 8:  # what these warps do not need lets the others keep all they have
                w.set_registers(_SERVE_REGISTERS, more=False)
            w.cond(w.warp == t.n_warps, self.copy, [])
            w.cond(w.warp == t.n_warps + 1, self.plan_all, [])
            return []

        def work() -> list[Any]:
            if t.n_warps == 8:
                w.set_registers(_WORK_REGISTERS, more=True)
            return w.cond(w.warp < n_workers, self.compute, [])

        w.cond(w.warp >= t.n_warps, serve, [])
        w.cond(w.warp < t.n_warps, work, [])

    def compute(self) -> list[Any]:
        w, s = self.w, self.s
        n_queries = s.H // 16

        def step(carry: list[Any]) -> tuple[Any, list[Any]]:
            number, parity, stage, stage_parity, *rest = carry
            order, rest = Order(*rest[:_ORDER_WORDS]), rest[_ORDER_WORDS:]
            scales, rest = (rest[:2], rest[2:]) if s.slot_scales else ([None, None], rest)
            state = State.of(rest, n_queries)
            # The order after this one is read now, and what is kept at its slots asked for, to be there in time.
            place = self.after(number, parity, _ORDERS)
            coming, coming_scales = self.look_ahead(*place)
            fresh = (order.flags & _FIRST) > 0
            state = State.of(w.cond(fresh, lambda: self.begin(order).flat(), state.flat()), n_queries)
            w.wait(self.full(stage), stage_parity)
            state = self.consume(order, self.ring + stage * s.stage_bytes, state, *scales)
            w.sync()
            w.arrive(self.empty(stage), w.lane == 0)
            w.cond((order.flags & _LAST) > 0, lambda: self.store(order, state), [])
            stages = self.after(stage, stage_parity, s.tuning.n_stages)
            more = (coming.flags & _STOP) == 0
            return more, [*place, *stages, *coming.flat(), *coming_scales, *state.flat()]

        zero = w.i32(0)
        order, scales = self.look_ahead(zero, zero)

        def work() -> list[Any]:
            empty = State.empty(w, s)
            w.repeat(step, [zero, zero, zero, zero, *order.flat(), *scales, *empty.flat()])
            return []

        w.cond((order.flags & _STOP) == 0, work, [])
        return []

    def look_ahead(self, number: Any, parity: Any) -> tuple[Order, list[Any]]:
        """An order, and lane t the scales of this warp's token t, of its key and its value."""
        w, s = self.w, self.s
        order, scales = self.read_order(number, parity), []
        if s.slot_scales:
            at = self.order(number)[0] + 4 * _ORDER_WORDS
            slot = w.load_shared(at + (self.way * s.T + w.lane) * 4)
            offset = (w.i64(slot) * s.K + w.i64(self.head(order))) * 2
            scales = [
                w.bf16_bits_to_f32(w.load(pointer, offset, "u16"))
                for pointer in (self.m.k_scales, self.m.v_scales)
            ]
        self.done_with_order(number)
        return order, scales

    def begin(self, c: Order) -> State:
        empty = State.empty(self.w, self.s)
        return State(self.load_queries(c), self.row_positions(c), empty.top, empty.mass, empty.acc)


@dataclass
class State:
    """What a warp keeps of an item: queries, their positions, running maximum and mass, output so far."""

    queries: list[list[Any]]  # [H / 16][4]
    rows: list[Any]  # [2]
    top: list[Any]  # [2], log2 units
    mass: list[Any]  # [2], this lane's share
    acc: list[list[Any]]  # [H / 8][4]

    def flat(self) -> list[Any]:
        return [*sum(self.queries, []), *self.rows, *self.top, *self.mass, *sum(self.acc, [])]

    @classmethod
    def of(cls, flat: list[Any], n_queries: int) -> State:
        q = [flat[4 * i : 4 * i + 4] for i in range(n_queries)]
        rest = flat[4 * n_queries :]
        acc = [rest[6 + 4 * i : 10 + 4 * i] for i in range(2 * n_queries)]
        return cls(q, rest[0:2], rest[2:4], rest[4:6], acc)

    @classmethod
    def empty(cls, w: Any, s: Spec) -> State:
        zero = w.f32(0.0)
        return cls(
            [[w.i32(0)] * 4 for _ in range(s.H // 16)],
            [w.i32(0)] * 2,
            [w.f32(-math.inf)] * 2,
            [zero] * 2,
            [[zero] * 4 for _ in range(s.H // 8)],
        )


def combine_partials(w: Any, s: Spec, m: Memory, out: Any, lse: Any, n_warps: int, n_ctas: int) -> None:
    """The second program: every query's partials to one output `[B, Tq, N, H]` and natural log-sum-exp `[B, Tq, N]`."""
    plan = PartialAttention.plan.__get__(_PlanReader(w, s, m))
    n_rows = s.B * s.Tq * s.N
    n_words = -(-s.H // 32)

    def row(i: Any, _: list[Any]) -> list[Any]:
        number = (i * n_ctas + w.cta) * n_warps + w.warp
        kept = number < n_rows
        number = w.minimum(number, n_rows - 1)
        bt, n = number // s.N, number % s.N
        b, t = bt // s.Tq, bt % s.Tq
        k, query = n // s.G, t * s.G + n % s.G
        item = (query // ROWS) * s.head_groups + k // s.heads_at_once
        n_tiles, share = plan("n_tiles", b), plan("tiles_per_cta")
        start = plan("tile_start", b) + item * n_tiles
        first_cta = start // share
        n_stretches = w.maximum(start + n_tiles - 1, 0) // share - first_cta + 1
        n_stretches = w.select(n_tiles > 0, n_stretches, 0)

        def gather(j: Any, carry: list[Any]) -> list[Any]:
            top, mass, *acc = carry
            part = b * s.items_per_request + item + first_cta + j // s.ways
            at = (w.i64(part) * s.ways + w.i64(j % s.ways)) * s.heads_at_once + w.i64(k % s.heads_at_once)
            at = at * s.rows + w.i64(query % ROWS)
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


@dataclass
class _PlanReader:
    """What `PartialAttention.plan` needs."""

    w: Any
    s: Spec
    m: Memory

    @property
    def plan_at(self) -> Any:
        return self.s.layout.at
