"""The few calls of CUDA's driver that are needed, since JAX has none for memory that processes share.

Knows addresses and numbers of bytes; no array.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import jax

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_READ_S = 0.5
_MARKS_BYTES = 4096  # the most that is read at once


class CudaError(Exception):
    """A call of the driver failed; which one, and why."""


class _Handle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaDriver:
    """In the context that JAX uses too. ``OSError`` without CUDA, `CudaError` where the driver says no."""

    def __init__(self, device: jax.Device) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        # Calls of a few microseconds: whoever lets go of Python's lock for each waits for it each time.
        self._holding = ctypes.PyDLL("libcuda.so.1")
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
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
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
                    raise CudaError("a copy of the marks does not end")
                time.sleep(0.001)
            self._check("cuStreamQuery", status)
        return ctypes.string_at(self._pinned.value, n_bytes)

    def pin(self, address: int, n_bytes: int) -> None:
        """Memory of this process: the GPU copies from it by itself from now on. What was never written to
        takes memory then, too. To be unpinned before it is unmapped."""
        with self._current():
            size = ctypes.c_size_t(n_bytes)
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, _PORTABLE)

    def unpin(self, address: int) -> None:
        """What `pin` was given."""
        with self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def begin_copies(self, to: int, parts: Iterable[tuple[int, int]]) -> None:
        """Of pinned memory, (address, bytes) one after another, to ``to`` on the GPU; until `wait_for_copies`
        neither may be touched."""
        copy = self._holding.cuMemcpyHtoDAsync_v2
        with self._current():
            for address, n_bytes in parts:
                size = ctypes.c_size_t(n_bytes)
                status = copy(ctypes.c_uint64(to), ctypes.c_void_p(address), size, self._stream)
                self._check("cuMemcpyHtoDAsync_v2", status)
                to += n_bytes

    def wait_for_copies(self) -> None:
        with self._current():
            self._call("cuStreamSynchronize", self._stream)

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
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({status})")
