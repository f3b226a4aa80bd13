"""Memory of one GPU that other processes' GPUs write into, and theirs as this process reaches it.

CUDA's own calls, since JAX has none for memory that processes share. A rank's mailbox has a ring for each
other rank (`pallas_kernels.gpu.mail`); which ranks can reach each other is found out by trying, and both
sides of a pair agree on it. Knows addresses; no array and no message.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int32, UInt8

from jaxlamina.transports.progress import Way
from pallas_kernels.gpu.mail import ADDRESSES, N_FIELDS, Ring
from pallas_kernels.mail import supports

_HANDLE_BYTES = 64
_HOST_BYTES = 128
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_READ_S = 0.5
_MARKS_BYTES = 4096  # the most that is read at once

Gather = Callable[[UInt8[np.ndarray, " k"]], UInt8[np.ndarray, "n_ranks k"]]


class _CudaError(Exception):
    pass


class Mailbox:
    """``peers``: the ranks that this one exchanges messages with through memory, maybe none, and ``why_not``
    then says why. ``is_complete``: whether every rank reaches every other. ``table [n_ranks, N_FIELDS]``
    int32: what kernels are told."""

    def __init__(self, rank: int, n_ranks: int, device: jax.Device, ring: Ring, gather: Gather) -> None:
        """``gather``: every rank's array as one. All ranks must come here."""
        self.ring, self._rank = ring, rank
        self.why_not = ""
        self._bases = [0] * n_ranks  # of each rank's mailbox as this process has it mapped
        self._cuda: _Cuda | None = None
        card = np.zeros(_HANDLE_BYTES + _HOST_BYTES, np.uint8)
        try:
            if not supports(device):
                raise _CudaError(
                    f"{device.device_kind} is not a GPU whose kernels write messages: Hopper or later"
                )
            self._cuda = _Cuda(device)
            self._bases[rank] = self._cuda.allocate(n_ranks * self._bytes_each)
            handle = self._cuda.handle_of(self._bases[rank])
            card = np.frombuffer(handle + _host().ljust(_HOST_BYTES, b"\0"), np.uint8)
        except (OSError, AttributeError, _CudaError) as error:
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
        except _CudaError:
            return {}
        return found

    def _open(self, rank: int, cards: UInt8[np.ndarray, "n_ranks k"]) -> list[int]:
        """Every rank's mailbox, 0 for one that is out of reach."""
        opened = [0] * len(cards)
        for r, card in enumerate(cards):
            handle, host = bytes(card[:_HANDLE_BYTES]), bytes(card[_HANDLE_BYTES:]).rstrip(b"\0")
            if r == rank or self._cuda is None or not self._bases[rank]:
                continue
            if host != _host():
                self.why_not = self.why_not or f"rank {r} is on another host, or has no such memory"
                continue
            try:
                opened[r] = self._cuda.open(handle)
            except _CudaError as error:
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


class _Handle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class _Cuda:
    """The few calls of CUDA's driver that are needed, in the context that JAX uses too."""

    def __init__(self, device: jax.Device) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        ordinal = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(ordinal), int(device.local_hardware_id))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        # Both made now: while a kernel waits for its peer, what allocates may wait for the kernel.
        self._stream, self._pinned = ctypes.c_void_p(), ctypes.c_void_p()
        with self._current():
            self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
            self._call("cuMemAllocHost_v2", ctypes.byref(self._pinned), ctypes.c_size_t(_MARKS_BYTES))

    def allocate(self, n_bytes: int) -> int:
        """Memory of zeros, for as long as the process lives."""
        pointer = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(n_bytes))
            self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(n_bytes))
            self._call("cuCtxSynchronize")
        return pointer.value

    def handle_of(self, pointer: int) -> bytes:
        """What another process `open`s the memory with."""
        handle = ctypes.create_string_buffer(_HANDLE_BYTES)
        with self._current():
            self._call("cuIpcGetMemHandle", handle, ctypes.c_uint64(pointer))
        return handle.raw

    def open(self, handle: bytes) -> int:
        pointer, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, _ENABLE_PEER_ACCESS)
        return pointer.value

    def read(self, pointer: int, n_bytes: int) -> bytes:
        """Memory of this GPU, past whatever its kernels are at."""
        assert n_bytes <= _MARKS_BYTES and self._pinned.value is not None
        until = time.monotonic() + _READ_S
        with self._current():
            size = ctypes.c_size_t(n_bytes)
            self._call("cuMemcpyDtoHAsync_v2", self._pinned, ctypes.c_uint64(pointer), size, self._stream)
            while (status := self._library.cuStreamQuery(self._stream)) == _NOT_READY:
                if time.monotonic() > until:
                    raise _CudaError("a copy of the marks does not end")
                time.sleep(0.001)
            self._check("cuStreamQuery", status)
        return ctypes.string_at(self._pinned.value, n_bytes)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: object) -> None:
        self._check(name, getattr(self._library, name)(*args))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise _CudaError(f"{name}: {(text.value or b'error').decode()} ({status})")
