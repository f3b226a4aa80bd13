"""One warp of 32 lanes in numpy: what the warp programs of this folder mean, run on a CPU.

`WarpMachine` has the operations that `warp_mosaic.MosaicWarp` emits as GPU instructions, lane by lane as the
PTX manual defines them, so a kernel's own code is tested where there is no GPU (Pallas cannot interpret a
kernel that emits instructions itself). Registers are numpy arrays `[32]`. What an asynchronous copy brings is
NaN until its barrier's phase ends, so that a program which reads too early fails here, too.

What a GPU answers with a fault, with another's memory or by never ending is an AssertionError here: addresses
outside an array or shared memory, or not aligned; copies of other sizes than the engine takes; a barrier that
waits for more bytes than were sent; warps that all wait. Knows nothing of attention.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

LANES = 32
_DEADLINE_S = 60.0
_MOST_TX_BYTES = 2**20 - 1  # that a barrier can count

_PACKED = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclass
class _Barrier:
    """One mbarrier: `expected` arrivals a phase, bytes still to land, and the copies that carry them."""

    expected: int
    arrivals: int
    tx_bytes: int = 0
    phase: int = 0
    copies: list[tuple[int, np.ndarray]] = field(default_factory=list)


class Cta:
    """What the warps of one CTA share: memory, and barriers by their addresses. Warps run as threads."""

    def __init__(self, shared_bytes: int, n_warps: int) -> None:
        # unwritten shared memory holds NaN in every format
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.barriers: dict[int, _Barrier] = {}
        self.changed = threading.Condition()
        self.together = threading.Barrier(n_warps, timeout=_DEADLINE_S)
        self._running = n_warps
        self._waiting: list[Callable[[], bool]] = []

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """All warps to their ends; the first error of any of them is raised."""

        def ending(program: Callable[[], None]) -> None:
            try:
                program()
            finally:
                with self.changed:
                    self._running -= 1
                    self.changed.notify_all()

        run_together([partial(ending, p) for p in programs], self.together.abort)
        unfinished = {at: b for at, b in self.barriers.items() if b.tx_bytes or b.copies}
        assert not unfinished, f"the CTA ended with copies on their way: {unfinished}"

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """For a warp, with `changed` held: until another warp has made it so. All waiting for nothing is an
        error."""

        def stuck() -> bool:
            return len(self._waiting) == self._running and not any(other() for other in self._waiting)

        self._waiting.append(done)
        self.changed.notify_all()
        self.changed.wait_for(lambda: done() or stuck(), _DEADLINE_S)
        self._waiting.remove(done)
        assert done(), f"a deadlock: {what} waits for ever"


def run_together(
    programs: Sequence[Callable[[], None]], on_error: Callable[[], object] = lambda: None
) -> None:
    """Each in a thread, all to their ends; the first error of any of them is raised. ``on_error``: called at
    once at each."""
    errors: list[BaseException] = []

    def guarded(program: Callable[[], None]) -> None:
        try:
            program()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
            on_error()

    threads = [threading.Thread(target=guarded, args=(p,), daemon=True) for p in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class WarpMachine:
    """A warp at work on byte buffers: `memory` is global memory, named uint8 arrays. A pointer is a name."""

    def __init__(self, memory: dict[str, np.ndarray], cta: Cta, cta_index: int, warp: int) -> None:
        self._global = memory
        self._together = cta
        self._shared = cta.shared
        self._cta, self._warp = cta_index, warp

    # --- registers ---
    def i32(self, x: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(x, np.int64), (LANES,)).astype(np.int32)

    def i64(self, x: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(x, np.int64), (LANES,)).astype(np.int64)

    def f32(self, x: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(x, np.float32), (LANES,)).astype(np.float32)

    @property
    def lane(self) -> np.ndarray:
        return np.arange(LANES, dtype=np.int32)

    @property
    def warp(self) -> np.ndarray:
        return self.i32(self._warp)

    @property
    def cta(self) -> np.ndarray:
        return self.i32(self._cta)

    def select(self, where: np.ndarray, yes: Any, no: Any) -> np.ndarray:
        typed = next(x for x in (yes, no) if isinstance(x, np.ndarray))
        return np.broadcast_to(np.where(where, yes, no), (LANES,)).astype(typed.dtype)

    def minimum(self, a: Any, b: Any) -> np.ndarray:
        return np.minimum(a, b)

    def maximum(self, a: Any, b: Any) -> np.ndarray:
        return np.maximum(a, b)

    def fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def exp2(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.exp2(x)

    def log2(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log2(x)

    def reciprocal(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.float32(1) / x

    def number(self, bits: np.ndarray) -> np.ndarray:
        """The float32 of these bits."""
        return bits.view(np.float32)

    def bits(self, x: np.ndarray) -> np.ndarray:
        """Those of a float32."""
        return x.view(np.int32)

    def bf16_bits_to_f32(self, bits: np.ndarray) -> np.ndarray:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

    # --- between lanes ---
    def shuffle(self, x: np.ndarray, lane: Any) -> np.ndarray:
        return x[np.broadcast_to(np.asarray(lane), (LANES,))]

    def shuffle_xor(self, x: np.ndarray, mask: int) -> np.ndarray:
        return x[self.lane ^ mask]

    def sync(self) -> None:
        """Lanes run in step here."""

    # --- control flow: conditions and counts are the same in all lanes ---
    def loop(
        self, count: Any, body: Callable[[Any, list[Any]], list[Any]], carry: Sequence[Any]
    ) -> list[Any]:
        state = list(carry)
        for i in range(int(self._uniform(count))):
            state = list(body(self.i32(i), state))
        return state

    def repeat(self, body: Callable[[list[Any]], tuple[Any, list[Any]]], carry: Sequence[Any]) -> list[Any]:
        """At least once, and again while the body's first result says so."""
        again, state = True, list(carry)
        while again:
            more, state = body(state)
            again = bool(self._uniform(more))
        return state

    def cond(
        self,
        where: Any,
        yes: Callable[[], Sequence[Any]],
        no: Sequence[Any],
    ) -> list[Any]:
        return list(yes()) if bool(self._uniform(where)) else list(no)

    def _uniform(self, x: Any) -> Any:
        values = np.unique(np.asarray(x))
        assert values.size == 1, f"lanes disagree: {values}"
        return values[0]

    # --- global memory ---
    def load(self, pointer: str, offset: Any, kind: str) -> np.ndarray:
        """One element a lane at a byte offset; kind "i32", "f32", "b32" or "u16"."""
        dtype = {"i32": np.int32, "f32": np.float32, "b32": np.uint32, "u16": np.uint16}[kind]
        at = np.broadcast_to(np.asarray(offset, np.int64), (LANES,))
        size = np.dtype(dtype).itemsize
        memory = self._global[pointer]
        assert (at >= 0).all() and (at + size <= memory.size).all(), f"load outside {pointer}"
        assert (at % size == 0).all(), f"misaligned load of {pointer}"
        rows = memory[at[:, None] + np.arange(size)]
        out = np.ascontiguousarray(rows).view(dtype)[:, 0]
        return out.astype(np.int32) if kind == "u16" else out

    def store_f32(self, pointer: str, offset: Any, values: Sequence[np.ndarray], where: Any) -> None:
        """len(values) consecutive float32 a lane, where `where`."""
        at = np.broadcast_to(np.asarray(offset, np.int64), (LANES,))
        where = np.broadcast_to(where, (LANES,))
        memory = self._global[pointer]
        for lane in np.flatnonzero(where):
            data = np.stack([np.broadcast_to(v, (LANES,))[lane] for v in values]).astype(np.float32)
            assert 0 <= at[lane] and at[lane] + data.nbytes <= memory.size, f"store outside {pointer}"
            assert at[lane] % data.nbytes == 0, f"misaligned store to {pointer}"
            memory[at[lane] : at[lane] + data.nbytes] = data.view(np.uint8)

    def store_b32(self, pointer: str, offset: Any, value: np.ndarray, where: Any) -> None:
        """32 bits a lane, where `where`."""
        self.store_f32(pointer, offset, [np.ascontiguousarray(value, np.uint32).view(np.float32)], where)

    def load_pointer(self, pointer: str, offset: int) -> int:
        """A 64-bit address that is stored somewhere: a key of ``memory``."""
        return int(self._global[pointer][offset : offset + 8].view(np.int64)[0])

    def load_word(self, pointer: Any, offset: Any, where: Any) -> list[np.ndarray]:
        """16 bytes a lane as four i32, where `where`; else 0."""
        inside = np.where(where, offset, 0)
        return [np.where(where, self.load(pointer, inside + 4 * i, "i32"), np.int32(0)) for i in range(4)]

    def store_word(self, pointer: Any, offset: Any, word: Sequence[np.ndarray], where: Any) -> None:
        self.store_f32(pointer, offset, [np.ascontiguousarray(x).view(np.float32) for x in word], where)

    def wait_for(self, pointer: Any, offset: Any, least: np.ndarray, where: Any) -> None:
        """Until the i32 there has come to ``least``, by their difference as an i32; in the one lane where
        `where`."""
        until = time.monotonic() + _DEADLINE_S
        for lane in np.flatnonzero(np.broadcast_to(where, (LANES,))):
            with np.errstate(over="ignore"):
                while (self.load(pointer, offset, "i32")[lane] - least[lane]) < 0:
                    assert time.monotonic() < until, (
                        f"warp {self._warp} waited {_DEADLINE_S} s for a message: a deadlock"
                    )
                    time.sleep(1e-4)

    def release(self, pointer: Any, offset: Any, value: np.ndarray, where: Any) -> None:
        """An i32, seen by others only with all that was read or written before it."""
        self.store_b32(pointer, offset, value, where)

    def prefetch(self, pointer: str, offset: Any) -> None:
        """A hint; the address must be valid all the same."""
        at = np.asarray(offset, np.int64)
        assert (at >= 0).all() and (at < self._global[pointer].size).all(), f"prefetch outside {pointer}"

    # --- shared memory ---
    def store_shared(self, shared: Any, value: Any, where: Any) -> None:
        values = np.broadcast_to(np.asarray(value), (LANES,)).astype(np.int32)
        chosen = np.broadcast_to(where, (LANES,))
        at = self._in_shared(shared, 4, chosen)
        for lane in np.flatnonzero(chosen):
            self._shared[at[lane] : at[lane] + 4] = values[lane : lane + 1].view(np.uint8)

    def load_shared(self, shared: Any) -> np.ndarray:
        at = self._in_shared(shared, 4)
        return np.array([self._shared[a : a + 4].view(np.int32)[0] for a in at], np.int32)

    def _in_shared(self, shared: Any, n_bytes: int, where: Any = True, alignment: int = 0) -> np.ndarray:
        """Every lane's address, which must be within shared memory and aligned where `where`."""
        at = np.broadcast_to(np.asarray(shared), (LANES,))
        chosen = at[np.broadcast_to(where, (LANES,))]
        assert (chosen >= 0).all() and (chosen + n_bytes <= self._shared.size).all(), "outside shared memory"
        assert not (chosen % (alignment or n_bytes)).any(), "misaligned in shared memory"
        return at

    # --- shared memory, filled asynchronously ---
    def init_barrier(self, barrier: Any, arrivals: int, where: Any) -> None:
        self._in_shared(barrier, 8, where)
        for at in self._chosen(barrier, where):
            assert at not in self._together.barriers, "a barrier is made twice"
            self._together.barriers[at] = _Barrier(arrivals, arrivals)

    def sync_cta(self) -> None:
        self._together.together.wait()

    def expect(self, barrier: Any, n_bytes: int, where: Any) -> None:
        """Arrives, and announces bytes that the phase has to wait for."""
        assert 0 < n_bytes <= _MOST_TX_BYTES, "more bytes than a barrier can count"
        with self._together.changed:
            for at in self._chosen(barrier, where):
                self._together.barriers[at].tx_bytes += n_bytes
        self.arrive(barrier, where)

    def arrive(self, barrier: Any, where: Any) -> None:
        with self._together.changed:
            for at in self._chosen(barrier, where):
                b = self._together.barriers[at]
                assert b.arrivals > 0, "more arrivals than the barrier expects"
                b.arrivals -= 1
                self._settle(b)
            self._together.changed.notify_all()

    def wait(self, barrier: Any, parity: Any) -> None:
        """Until the phase of this parity has ended."""
        at, parity = int(self._uniform(barrier)), int(self._uniform(parity))
        with self._together.changed:
            b = self._together.barriers[at]
            what = f"warp {self._warp}, at a barrier that lacks {b.arrivals} arrivals and {b.tx_bytes} bytes,"
            self._together.wait_until(lambda: b.phase % 2 != parity, what)

    def copy_rows(
        self, shared: Any, pointer: str, offset: Any, n_bytes: int, barrier: Any, where: Any
    ) -> None:
        """Every lane where `where` copies n_bytes from global to shared memory; the barrier's phase ends
        after them."""
        at = np.broadcast_to(np.asarray(offset, np.int64), (LANES,))
        memory = self._global[pointer]
        chosen = np.broadcast_to(where, (LANES,))
        to = self._in_shared(shared, n_bytes, chosen, 16)
        inside = (at >= 0) & (at + n_bytes <= memory.size)
        assert inside[chosen].all(), f"copy from outside {pointer}"
        assert not ((at | to) % 16)[chosen].any() and n_bytes % 16 == 0, "misaligned copy"
        with self._together.changed:
            b = self._together.barriers[int(self._uniform(barrier))]
            for lane in np.flatnonzero(chosen):
                # in flight: whoever reads it before the phase ends reads NaN
                self._shared[to[lane] : to[lane] + n_bytes] = 0xFF
                b.copies.append((int(to[lane]), memory[at[lane] : at[lane] + n_bytes].copy()))
                b.tx_bytes -= n_bytes
            self._settle(b)
            self._together.changed.notify_all()

    def copy_lines(
        self, shared: Any, box: tuple[str, int], line: Any, slot: Any, n_lines: int, barrier: Any, where: Any
    ) -> None:
        """As copy_rows, of lines of 128 bytes from `line` of `slot` on; `box`: a pointer, and lines a slot.

        Swizzled: a line's eight 16-byte pieces change places by the number of the line they are written to,
        mod 8.
        """
        pointer, per_slot = box
        at = (np.asarray(slot, np.int64) * per_slot + np.asarray(line, np.int64)) * 128
        to = np.broadcast_to(np.asarray(shared), (LANES,))
        chosen = np.broadcast_to(where, (LANES,))
        assert not (to % 128)[chosen].any(), "a line must begin where one does"
        assert 0 < n_lines <= 256, "no box of the copy engine"
        for lane in np.flatnonzero(chosen):
            only = np.arange(LANES) == lane
            for i in range(n_lines):
                for piece in range(8):
                    target = to + 128 * i + (piece ^ (int(to[lane]) // 128 + i) % 8) * 16
                    self.copy_rows(target, pointer, at + 128 * i + 16 * piece, 16, barrier, only)

    def _settle(self, b: _Barrier) -> None:
        if b.arrivals == 0 and b.tx_bytes == 0:
            for to, data in b.copies:
                self._shared[to : to + data.size] = data
            b.copies, b.arrivals, b.phase = [], b.expected, b.phase + 1

    def _chosen(self, address: Any, where: Any) -> list[int]:
        addresses = np.broadcast_to(np.asarray(address), (LANES,))
        return [int(a) for a in addresses[np.broadcast_to(where, (LANES,))]]

    def set_registers(self, n: int, more: bool) -> None:
        """Registers are plenty here."""

    def load_matrices(self, shared: Any, transposed: bool) -> list[np.ndarray]:
        """`ldmatrix.x4`: lane 8 * i + r gives the address of row r (8 halves of 16 bits) of matrix i."""
        at = self._in_shared(shared, 16)
        out = []
        for i in range(4):
            rows = np.stack([self._shared[a : a + 16].view(np.uint16) for a in at[8 * i : 8 * i + 8]])
            matrix = rows.T if transposed else rows
            pairs = matrix[self.lane // 4][:, :].reshape(LANES, 4, 2)[self.lane, self.lane % 4]
            out.append(np.ascontiguousarray(pairs).view(np.uint32)[:, 0])
        return out

    def transpose(self, pair: np.ndarray) -> np.ndarray:
        """`movmatrix`: an 8 x 8 matrix of 16-bit values, lane 4 r + c holding row r's columns 2 c and 2 c +
        1."""
        matrix = np.ascontiguousarray(pair).view(np.uint16).reshape(8, 8)
        return np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint32)

    # --- arithmetic on pairs of 16-bit floats ---
    def pack(self, low: np.ndarray, high: np.ndarray, kind: str) -> np.ndarray:
        pair = np.stack([low, high], axis=1).astype(_PACKED[kind])
        return np.ascontiguousarray(pair).view(np.uint32)[:, 0]

    def bytes_to_f16(self, quad: np.ndarray, low: int, high: int) -> np.ndarray:
        """Signed bytes number `low` and `high` of each lane's four, as a pair of float16."""
        signed = np.ascontiguousarray(quad).view(np.int8).reshape(LANES, 4)
        return self.pack(signed[:, low].astype(np.float32), signed[:, high].astype(np.float32), "f16")

    def mma(
        self, acc: Sequence[np.ndarray], a: Sequence[np.ndarray], b: Sequence[np.ndarray], kind: str
    ) -> list[np.ndarray]:
        """`mma.m16n8k16`: acc `[16, 8]` float32 + a `[16, 16]` @ b `[16, 8]` of bf16 or f16, as fragments."""
        row, col = self.lane // 4, 2 * (self.lane % 4)

        def halves(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x).view(_PACKED[kind]).reshape(LANES, 2).astype(np.float64)

        left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, (r, c) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            for e in range(2):
                left[row + r, col + c + e] = halves(a[i])[:, e]
        for i, k in enumerate([0, 8]):
            for e in range(2):
                right[col + k + e, row] = halves(b[i])[:, e]
        for i, (r, e) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)]):
            total[row + r, col + e] = acc[i]
        total = (total + left @ right).astype(np.float32)
        return [total[row + r, col + e] for r, e in [(0, 0), (0, 1), (8, 0), (8, 1)]]
