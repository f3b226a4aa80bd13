"""Memory of one GPU that other processes' GPUs write into, and theirs as this process reaches it.

A rank's mailbox has a ring for each other rank (`pallas_kernels.gpu.mail`); which ranks can reach each other
is found out by trying, and both sides of a pair agree on it. Knows addresses; no array and no message.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int32, UInt8

from jaxlamina.process.cuda_driver import HANDLE_BYTES, CudaDriver, CudaError
from jaxlamina.transports.progress import Way
from pallas_kernels.gpu.mail import ADDRESSES, N_FIELDS, Ring
from pallas_kernels.mail import supports

_HOST_BYTES = 128

Gather = Callable[[UInt8[np.ndarray, " k"]], UInt8[np.ndarray, "n_ranks k"]]


class Mailbox:
    """``peers``: the ranks that this one exchanges messages with through memory, maybe none, and ``why_not``
    then says why. ``is_complete``: whether every rank reaches every other. ``table [n_ranks, N_FIELDS]``
    int32: what kernels are told."""

    def __init__(self, rank: int, n_ranks: int, device: jax.Device, ring: Ring, gather: Gather) -> None:
        """``gather``: every rank's array as one. All ranks must come here."""
        self.ring, self._rank = ring, rank
        self.why_not = ""
        self._bases = [0] * n_ranks  # of each rank's mailbox as this process has it mapped
        self._cuda: CudaDriver | None = None
        card = np.zeros(HANDLE_BYTES + _HOST_BYTES, np.uint8)
        try:
            if not supports(device):
                raise CudaError(
                    f"{device.device_kind} is not a GPU whose kernels write messages: Hopper or later"
                )
            self._cuda = CudaDriver(device)
            self._bases[rank] = self._cuda.allocate(n_ranks * self._bytes_each)
            handle = self._cuda.handle_of(self._bases[rank])
            card = np.frombuffer(handle + _host().ljust(_HOST_BYTES, b"\0"), np.uint8)
        except (OSError, AttributeError, CudaError) as error:
            self.why_not = str(error)
        opened = self._open(rank, gather(card))
        # A pair needs both: row r is what rank r has opened.
        each = gather(np.array([bool(base) for base in opened], np.uint8))
        self.is_complete = all(each[r][q] for r in range(n_ranks) for q in range(n_ranks) if r != q)
        self.peers = frozenset(r for r in range(n_ranks) if r != rank and each[rank][r] and each[r][rank])
        self.table = np.stack([self._row(rank, r, opened[r]) for r in range(n_ranks)])

    def counts(self) -> dict[Way, int]:
        """Messages put to each peer and taken from it, 32 bits, while kernels run. Empty if they cannot be
        read in time."""
        if self._cuda is None:
            return {}
        own, found = self._bases[self._rank], {}
        try:
            for peer in self.peers:
                first = own + peer * self._bytes_each + self.ring.data_bytes
                marks = self._cuda.read(first, 4 * self.ring.mark_bytes)
                found["put", peer], found["take", peer] = n_messages(marks)
        except CudaError:
            return {}
        return found

    def _open(self, rank: int, cards: UInt8[np.ndarray, "n_ranks k"]) -> list[int]:
        """Every rank's mailbox, 0 for one that is out of reach."""
        opened = [0] * len(cards)
        for r, card in enumerate(cards):
            handle, host = bytes(card[:HANDLE_BYTES]), bytes(card[HANDLE_BYTES:]).rstrip(b"\0")
            if r == rank or self._cuda is None or not self._bases[rank]:
                continue
            if host != _host():
                self.why_not = self.why_not or f"rank {r} is on another host, or has no such memory"
                continue
            try:
                opened[r] = self._cuda.open(handle)
            except CudaError as error:
                self.why_not = str(error)
        return opened

    @property
    def _bytes_each(self) -> int:
        """Of one peer's messages, with the marks of what came and of what it took, and both ways' counts."""
        return self.ring.data_bytes + 4 * self.ring.mark_bytes

    def _row(self, rank: int, peer: int, far: int) -> Int32[np.ndarray, " fields"]:
        """Rank ``peer`` in the table: its ring for messages from here, and this rank's for messages from
        it."""
        row = np.zeros(N_FIELDS, np.int32)
        if peer in self.peers:
            near, far = self._bases[rank] + peer * self._bytes_each, far + rank * self._bytes_each
            come, taken, sent, received = (self.ring.data_bytes + i * self.ring.mark_bytes for i in range(4))
            places = {
                "far_data": far, "far_come": far + come, "near_taken": near + taken, "near_sent": near + sent,
                "near_data": near, "near_come": near + come, "far_taken": far + taken,
                "near_received": near + received,
            }  # fmt: skip
            row[:] = np.array([places[name] for name in ADDRESSES], np.int64).view(np.int32)
        return row


def n_messages(marks: bytes) -> tuple[int, int]:
    """(put, taken) of one peer, from its marks: what came, what was taken, and both ways' counts, a number a
    CTA each.

    A message counts when the last CTA has counted it; numbers are of 32 bits and may wrap."""
    _, _, sent, received = np.frombuffer(marks, np.int32).reshape(4, -1)
    return _least(sent), _least(received)


def _least(counts: Int32[np.ndarray, " ctas"]) -> int:
    behind = (counts - counts[0]).astype(np.int32)  # wraps as the counts do
    return (int(counts[0]) + int(behind.min())) % (1 << 32)


def _host() -> bytes:
    """This machine, as no other has it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()[:60]} {boot}".encode()[:_HOST_BYTES]
