"""What the warps of a CTA tell each other: orders for tiles, and a ring of tiles in shared memory.

One warp plans: it goes through the CTA's share of the work and writes an order for every tile, with the
tokens' slots, several tiles ahead, since whatever is looked up in memory that the KV saturates takes
microseconds. One warp copies keys and one values, each into its half of a stage with barriers of its own, so
that a tile's keys make room while its values are still in use: a token's row of all the CTA's KV heads is one
bulk copy from wherever its slot is. Knows nothing of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_kernels.gpu.spec import LINE, ORDER_WORDS, ORDERS, SWIZZLE_PERIOD, Memory, Spec

PREFETCHED = 8  # tiles ahead whose slots are asked into the L2 cache
KEYS, VALUES = 0, 1  # halves of a stage
FIRST, LAST, STOP = 1, 2, 4  # flags of an order: its item's first or last tile in this stretch; no more work


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


class Orders:
    """Planning and copying, and how the warps that compute find their tiles."""

    def __init__(self, w: Any, spec: Spec, memory: Memory, shared: Any) -> None:
        self.w, self.s, self.m = w, spec, memory
        self.plan_at = spec.layout.at
        self.ring = (w.i32(shared) + (SWIZZLE_PERIOD - 1)) & -SWIZZLE_PERIOD
        self.barriers = self.ring + spec.tuning.n_stages * spec.stage_bytes
        self.n_workers = spec.heads_at_once * spec.ways

    def my_tokens(self) -> list[tuple[Any, Any]]:
        """This lane's tokens of a tile, and whether each is one: 32 lanes may be more than are left."""
        w, n = self.w, self.s.tile_tokens
        tokens = [w.lane + first for first in range(0, n, 32)]
        return [(w.minimum(token, n - 1), token < n) for token in tokens]

    def init_barriers(self) -> None:
        w, first_lane = self.w, (self.w.warp == 0) & (self.w.lane == 0)
        for stage in range(self.s.tuning.n_stages):
            for half in (KEYS, VALUES):
                w.init_barrier(self.full(stage, half), 1, first_lane)
                w.init_barrier(self.empty(stage, half), self.n_workers, first_lane)
        for number in range(ORDERS):
            _, full, empty = self.order(number)
            w.init_barrier(full, 1, first_lane)
            w.init_barrier(empty, self.n_workers + 2, first_lane)
        w.sync_cta()

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
        barriers = self.barriers + (32 * n_stages) + number * 16
        at = self.barriers + (32 * n_stages + 16 * ORDERS) + number * self.s.order_bytes
        return at, barriers, barriers + 8

    def after(self, number: Any, parity: Any, size: int) -> tuple[Any, Any]:
        """The place in a ring after this one, and the parity its barriers have there."""
        w = self.w
        around = number == size - 1
        return w.select(around, w.i32(0), number + 1), w.select(around, 1 - parity, parity)

    def plan_all(self) -> list[Any]:
        """Writes an order for each tile of the CTA's stretch."""
        w, s = self.w, self.s
        tokens = self.my_tokens()
        first_lane = w.lane == 0

        def slots(c: Cursor) -> list[Any]:
            """Each lane its tokens' slots; past the end the last token's again, which is this request's
            own."""
            out = []
            for token, _ in tokens:
                at = w.maximum(w.minimum(c.first + c.tile * s.tile_tokens + token, c.end - 1), 0)
                row = w.i64(c.b) * (4 * s.C)
                out.append(w.load(self.m.table, row + w.i64(at * 4), "i32"))
                coming = w.minimum(at + PREFETCHED * s.tile_tokens, s.C - 1)
                w.prefetch(self.m.table, row + w.i64(coming * 4))
            return out

        def write(place: list[Any], words: list[Any], slots: list[Any]) -> list[Any]:
            number, parity = place
            at, full, empty = self.order(number)
            w.wait(empty, 1 - parity)
            for i, word in enumerate(words):
                w.store_shared(at + 4 * i, word, first_lane)
            for (token, there), slot in zip(tokens, slots, strict=True):
                w.store_shared(at + (4 * ORDER_WORDS) + token * 4, slot, there)
            w.sync()
            w.arrive(full, first_lane)
            return list(self.after(number, parity, ORDERS))

        share = self.plan("tiles_per_cta")
        start = w.cta * share
        n = w.maximum(w.minimum(start + share, self.plan("total_tiles")) - start, 0)

        def tile(i: Any, carry: list[Any]) -> list[Any]:
            place, c, now = carry[:2], Cursor(*carry[2:8]), carry[8:]
            beyond = self.advance(c)
            coming = slots(beyond)
            first = w.select((c.tile == 0) | (i == 0), w.i32(FIRST), 0)
            last = w.select((c.tile + 1 >= c.n_tiles) | (i + 1 >= n), w.i32(LAST), 0)
            if s.slot_scales:  # whoever computes asks for them one tile ahead only
                for slot in now:
                    for pointer in (self.m.k_scales, self.m.v_scales):
                        w.prefetch(pointer, w.i64(slot) * (2 * s.K))
            position = c.first + c.tile * s.tile_tokens
            place = write(place, [first | last, c.b, c.item, position, c.end], now)
            return [*place, *beyond.flat(), *coming]

        zero = w.i32(0)
        c = self.start(self.plan("cta_request", w.cta), start)
        place = w.loop(n, tile, [zero, zero, *c.flat(), *slots(c)])[:2]
        write(place, [w.i32(STOP), zero, zero, zero, zero], [zero] * len(tokens))
        return []

    def read_order(self, number: Any, parity: Any) -> Order:
        """Waits for it; whoever has read all that it wants says so at the order's empty barrier."""
        w = self.w
        at, full, _ = self.order(number)
        w.wait(full, parity)
        return Order(*[w.load_shared(at + 4 * i) for i in range(ORDER_WORDS)])

    def done_with_order(self, number: Any) -> None:
        w = self.w
        w.sync()
        w.arrive(self.order(number)[2], w.lane == 0)

    # --- the ring ---
    def full(self, stage: Any, half: int) -> Any:
        return self.barriers + stage * 32 + 16 * half

    def empty(self, stage: Any, half: int) -> Any:
        return self.barriers + stage * 32 + (16 * half + 8)

    # --- copying ---
    def copy(self, half: int) -> list[Any]:
        """Keys, or values, of every tile."""
        w, s = self.w, self.s
        tokens = self.my_tokens()

        def tile(carry: list[Any]) -> tuple[Any, list[Any]]:
            number, parity, stage, stage_parity = carry
            order = self.read_order(number, parity)
            at = self.order(number)[0] + 4 * ORDER_WORDS
            slots = [w.load_shared(at + token * 4) for token, _ in tokens]
            self.done_with_order(number)
            more = (order.flags & STOP) == 0

            def send() -> list[Any]:
                full = self.full(stage, half)
                w.wait(self.empty(stage, half), 1 - stage_parity)
                w.expect(full, s.tile_tokens * s.token_bytes, w.lane == 0)
                w.sync()
                to = self.ring + stage * s.stage_bytes + half * s.tile_bytes
                first_head = s.first_head(w, order.item % s.head_groups)
                for (token, there), slot in zip(tokens, slots, strict=True):
                    row = to + token * s.pitch_bytes
                    self.copy_token(half, row, slot, first_head, full, there)
                return []

            w.cond(more, send, [])
            place = self.after(number, parity, ORDERS)
            return more, [*place, *self.after(stage, stage_parity, s.tuning.n_stages)]

        w.repeat(tile, [w.i32(0)] * 4)
        return []

    def copy_token(self, half: int, row: Any, slot: Any, first_head: Any, full: Any, where: Any) -> None:
        w, s = self.w, self.s
        if s.swizzled:
            line = first_head * s.row_bytes // LINE
            lines = (self.m.k_lines, self.m.v_lines)[half]
            w.copy_lines(row, lines, line, slot, s.token_bytes // LINE, full, where)
            return
        at = w.i64(slot) * (s.K * s.row_bytes) + w.i64(first_head * s.row_bytes)
        w.copy_rows(row, (self.m.k, self.m.v)[half], at, s.token_bytes, full, where)
