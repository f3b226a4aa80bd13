"""Tensors in a file, read a few megabytes at a time straight into the memory of the finished array.

Knows byte ranges, element types and how a chunk of rows becomes numbers. Knows nothing of file formats (they
hand in a `decode`), of models or of names beyond repeating them in errors.

Host memory: beside the array itself a read holds one chunk and its decoded form. On CPU the array that JAX
gets *is* the buffer that was read into, so a model takes its own size and one chunk while it loads; on an
accelerator one tensor at a time is on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import ml_dtypes
import numpy as np

from jaxlamina.errors import UserError

CHUNK_BYTES = 4 << 20  # of the decoded tensor: large enough for the disk, small enough for the L2/L3 cache
ALIGN_BYTES = 64  # XLA's CPU client takes a NumPy buffer over without a copy from this alignment on

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), of the file rather than of the result
Decode = Callable[[np.ndarray], np.ndarray]  # uint8 [n_bytes of whole rows] -> numbers, the same rows flat

TARGET_DTYPES = ("float32", "bfloat16", "float16")


def target_dtype(dtype: Any) -> np.dtype:
    """The NumPy form of a dtype that weights may have; `UserError` for any other."""
    try:
        found = np.dtype(ml_dtypes.bfloat16 if str(dtype) == "bfloat16" else dtype)
    except TypeError:
        found = None
    if found is None or found.name not in TARGET_DTYPES:
        raise UserError(f"dtype={dtype!r} must be one of {', '.join(TARGET_DTYPES)}")
    return found


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: `shape` as the model wants it, `n_bytes` at `offset_bytes` as the file has it.

    `decode` turns the bytes of whole rows (all axes but the last; a vector is one row) into numbers. Rows
    are read in multiples of `row_group`, and `rearrange` (rows [n * row_group, columns] -> the same shape)
    reorders them inside each group. `dtype`: what it is read as, whatever else a checkpoint is; None: as
    everything else. `form`: the name of the format that `decode` decodes, where formats have names.
    """

    path: Path
    shape: tuple[int, ...]
    offset_bytes: int
    n_bytes: int
    decode: Decode
    row_group: int = 1
    rearrange: Callable[[np.ndarray], np.ndarray] | None = None
    dtype: np.dtype | None = None
    form: str | None = None

    def part(self, rows: slice) -> StoredTensor:
        """These rows as a tensor of their own."""
        row_bytes, rest = divmod(self.n_bytes, self.shape[0])
        assert rest == 0, (self.path, self.shape, self.n_bytes)
        return replace(
            self,
            shape=(rows.stop - rows.start, *self.shape[1:]),
            offset_bytes=self.offset_bytes + rows.start * row_bytes,
            n_bytes=(rows.stop - rows.start) * row_bytes,
        )

    def undecoded(self) -> StoredTensor:
        """A matrix's rows as bytes."""
        shape = self.shape[0], self.n_bytes // self.shape[0]
        return replace(self, shape=shape, decode=lambda raw: raw, dtype=np.dtype(np.uint8))

    def flat(self) -> StoredTensor:
        """The same rows as a matrix."""
        return replace(self, shape=self._rows())

    def chunks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """(range of rows, numbers [rows, columns]) from the first row to the last.

        Raises `UserError` if the file ends early (it changed since it was opened) or cannot be read.
        """
        n_rows, n_columns = self._rows()
        if n_rows * n_columns == 0:
            return
        row_bytes, rest = divmod(self.n_bytes, n_rows)
        assert rest == 0, (self.path, self.shape, self.n_bytes)
        step = max(1, CHUNK_BYTES // (4 * n_columns * self.row_group)) * self.row_group
        buffer = np.empty(min(step, n_rows) * row_bytes, np.uint8)
        with _open(self.path) as file:
            file.seek(self.offset_bytes)
            for start in range(0, n_rows, step):
                stop = min(start + step, n_rows)
                raw = buffer[: (stop - start) * row_bytes]
                _read_exactly(file, raw, self.path)
                rows = self.decode(raw).reshape(stop - start, n_columns)
                yield slice(start, stop), rows if self.rearrange is None else self.rearrange(rows)

    def read(self, dtype: np.dtype, on_bytes: Callable[[int], None] | None = None) -> np.ndarray:
        """The whole tensor in `dtype`, in memory that JAX can take over; `on_bytes` hears of each chunk."""
        out = aligned_empty(self.shape, self.dtype or dtype)
        self.read_into(out, on_bytes)
        return out

    def read_into(self, out: np.ndarray, on_bytes: Callable[[int], None] | None = None) -> None:
        n_rows, n_columns = self._rows()
        table = out.reshape(n_rows, n_columns)
        for rows, numbers in self.chunks():
            cast_into(table[rows], numbers, self.path)
            if on_bytes is not None:
                on_bytes(self.n_bytes * (rows.stop - rows.start) // n_rows)

    def _rows(self) -> tuple[int, int]:
        if len(self.shape) < 2:
            n = int(np.prod(self.shape))
            return (1, n) if self.row_group == 1 else (n, 1)
        return int(np.prod(self.shape[:-1])), self.shape[-1]


@dataclass(frozen=True)
class StoredStack:
    """Tensors of one shape, from anywhere, as one tensor with a further first axis."""

    tensors: tuple[StoredTensor, ...]

    @property
    def path(self) -> Path:
        return self.tensors[0].path

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.tensors), *self.tensors[0].shape)

    @property
    def offset_bytes(self) -> int:
        return self.tensors[0].offset_bytes

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    def read(self, dtype: np.dtype, on_bytes: Callable[[int], None] | None = None) -> np.ndarray:
        """As `StoredTensor.read`."""
        out = aligned_empty(self.shape, dtype)
        for own, tensor in zip(out, self.tensors, strict=True):
            tensor.read_into(own, on_bytes)
        return out


Stored: TypeAlias = StoredTensor | StoredStack


def stream(
    stored: Mapping[str, Stored], dtype: np.dtype, progress: Progress | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor in turn, as (name, array in `dtype`); the caller decides how long each one lives."""
    total = sum(tensor.n_bytes for tensor in stored.values())
    done = 0

    def on_bytes(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, total)

    if progress is not None:
        progress(0, total)
    # In the order of the files: a disk reads forwards.
    for name, tensor in sorted(stored.items(), key=lambda item: (str(item[1].path), item[1].offset_bytes)):
        yield name, tensor.read(dtype, on_bytes)
    if progress is not None and done < total:
        progress(total, total)


def place(array: np.ndarray, device: jax.Device | jax.sharding.Sharding | None) -> jax.Array:
    """The array on its device(s). On CPU the memory is taken over, so nobody may write to `array` again."""
    placed = jax.device_put(array, device, may_alias=True)
    if any(d.platform != "cpu" for d in placed.devices()):
        placed.block_until_ready()  # else transfers pile up and every host copy stays alive
    return placed


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory at an address that XLA's CPU client does not copy from."""
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(n_bytes + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


def cast_into(out: np.ndarray, numbers: np.ndarray, path: Path) -> None:
    """out[...] = numbers, rounding to nearest; `UserError` where a finite number overflows."""
    if numbers.dtype == ml_dtypes.bfloat16 and out.dtype == np.float32:
        # A bfloat16 is the upper half of a float32; the cast of ml_dtypes is twenty times slower.
        np.left_shift(numbers.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
        return
    if numbers.dtype == ml_dtypes.bfloat16 and out.dtype == np.float16:
        wide = np.empty(numbers.shape, np.float32)
        cast_into(wide, numbers, path)
        numbers = wide
    try:
        with np.errstate(over="raise"):
            np.copyto(out, numbers, casting="unsafe")
    except FloatingPointError:
        raise too_large(path, out.dtype) from None
    if out.dtype == ml_dtypes.bfloat16 and numbers.dtype.itemsize > 2:  # the cast of ml_dtypes raises nothing
        infinite = out.view(np.uint16) & 0x7FFF == 0x7F80
        if np.isfinite(numbers[infinite]).any():
            raise too_large(path, out.dtype)


def too_large(path: Path, dtype: np.dtype) -> UserError:
    wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(dtype.name, "another model")
    return UserError(f"{path} has weights too large for {dtype.name}; use {wider}")


def _open(path: Path) -> Any:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _read_exactly(file: Any, out: np.ndarray, path: Path) -> None:
    view = out.data
    while view:
        try:
            n = file.readinto(view)
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror or os.strerror(error.errno or 0)}"
            ) from None
        if not n:
            raise UserError(
                f"{path} ends at byte {os.fstat(file.fileno()).st_size}, before or in a tensor; fetch it "
                "again"
            )
        view = view[n:]
