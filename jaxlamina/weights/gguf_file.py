"""The GGUF container: metadata, tensor directory, and quantised blocks as numbers.

The directory is parsed here, because the `gguf` package's reader takes five seconds over a vocabulary and
crashes on a truncated file; the block formats are the package's (`gguf.dequantize`). Knows nothing of models.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxlamina.errors import UserError

# Those that tests compare with ggml's own definition.
SUPPORTED = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """`shape` has the slowest axis first ([out, in] for a linear), the reverse of the order in the file."""

    shape: tuple[int, ...]
    type_name: str
    offset_bytes: int
    n_bytes: int


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]  # scalars, strings and lists of them; numbers as Python's own
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor directory, every tensor's bytes known to be in the file.

    Raises `UserError` naming the file if it is no GGUF, is cut short, has tensors that do not lie one after
    the other, or uses an unknown tensor type.
    """
    try:
        if not path.is_file():  # what a pipe or a device gives need not end
            raise UserError(f"{path} is no file")
        with open(path, "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file")
            if size_bytes < 24:
                raise _truncated(path, 24, size_bytes)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, size_bytes, path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def decoder(type_name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Bytes of whole blocks -> numbers: F32, F16, BF16 as they are, quantised types as float32."""
    plain = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(type_name)
    if plain is not None:
        return lambda raw: raw.view(plain)
    gguf = _gguf()
    kind = gguf.GGMLQuantizationType[type_name]
    # One row however many blocks: the package goes 16 rows at a time, which makes small rows five times
    # slower.
    return lambda raw: gguf.dequantize(raw.reshape(1, -1), kind).reshape(-1)


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError(
            "GGUF files need the gguf package: pip install 'jaxlamina[demo]' (or pip install gguf)"
        ) from None
    return gguf


def _truncated(path: Path, expected: int, present: int) -> UserError:
    return UserError(
        f"{path} is truncated: {expected} bytes expected at least, {present} present; fetch it again"
    )


class _Cursor:
    """A position in the mapped file; reading past its end is a `UserError`."""

    def __init__(self, data: mmap.mmap, size_bytes: int, path: Path) -> None:
        self.data, self.size_bytes, self.path = data, size_bytes, path
        self.position = 0

    def need(self, n_bytes: int) -> None:
        if self.position + n_bytes > self.size_bytes:
            raise _truncated(self.path, self.position + n_bytes, self.size_bytes)

    def take(self, form: str) -> Any:
        n = struct.calcsize(form)
        self.need(n)
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position += n
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, n: int) -> list[str]:
        # A vocabulary has 10^5 strings: a loop without calls is worth a second.
        self.need(8 * n)
        data, position, size_bytes, unpack = (
            self.data,
            self.position,
            self.size_bytes,
            struct.Struct("<Q").unpack_from,
        )
        raws: list[bytes] = []
        try:
            for _ in range(n):
                (length,) = unpack(data, position)
                position += 8
                if position + length > size_bytes:
                    raise _truncated(self.path, position + length, size_bytes)
                raws.append(data[position : position + length])
                position += length
            self.position = position
            return [raw.decode("utf-8") for raw in raws]
        except struct.error:
            raise _truncated(self.path, position + 8, size_bytes) from None
        except UnicodeDecodeError:
            raise self.corrupt("a string that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, n = self.take("<I"), self.take("<Q")
            if item == _STRING:
                return self.strings(n)
            return self.numbers(item, n).tolist()
        return self.numbers(kind, 1).tolist()[0]

    def numbers(self, kind: int, n: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise self.corrupt(f"value type {kind}")
        dtype = _SCALARS[kind]
        self.need(n * dtype.itemsize)
        result = np.frombuffer(self.data[self.position : self.position + n * dtype.itemsize], dtype)
        self.position += n * dtype.itemsize
        return result

    def corrupt(self, what: str) -> UserError:
        return UserError(f"{self.path} is corrupt: {what} before byte {self.position}; fetch it again")


def _parse(cursor: _Cursor) -> GgufFile:
    path = cursor.path
    cursor.position = 4
    version = cursor.take("<I")
    if version not in (2, 3):
        raise UserError(
            f"{path} is GGUF version {version} (or big-endian); supported: versions 2 and 3, little-endian"
        )
    n_tensors, n_values = cursor.take("<Q"), cursor.take("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("<I"))
    directory = [_tensor_info(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise cursor.corrupt(f"alignment {str(alignment)[:60]}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_name, offset, n_bytes in directory:
        if name in tensors:
            raise cursor.corrupt(f"tensor {name} twice")
        tensors[name] = GgufTensor(shape, type_name, start + offset, n_bytes)
    _check_places(tensors, start, alignment, path)
    end = max((tensor.offset_bytes + tensor.n_bytes for tensor in tensors.values()), default=start)
    if end > cursor.size_bytes:
        lost = sum(t.offset_bytes + t.n_bytes > cursor.size_bytes for t in tensors.values())
        raise UserError(
            f"{path} is truncated: {end} bytes expected, {cursor.size_bytes} present "
            f"({lost} of {len(tensors)} tensors are cut off); fetch it again"
        )
    return GgufFile(path, metadata, tensors)


def _check_places(tensors: Mapping[str, GgufTensor], start: int, alignment: int, path: Path) -> None:
    """Each tensor begins where the one before it ends, aligned, as llama.cpp also asks of a file."""
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset_bytes, item[1].n_bytes)):
        if tensor.offset_bytes != position:
            raise UserError(
                f"{path} is corrupt: tensor {name[:64]!r} begins at byte {tensor.offset_bytes}, not "
                f"{position}; fetch it again"
            )
        position += -(-tensor.n_bytes // alignment) * alignment


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    name = cursor.string()
    n_axes = cursor.take("<I")
    if n_axes > 8:
        raise cursor.corrupt(f"tensor {name[:64]!r} with {n_axes} axes")
    shape = tuple(cursor.take("<Q") for _ in range(n_axes))[::-1]
    number, offset = cursor.take("<I"), cursor.take("<Q")
    gguf = _gguf()
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise UserError(
            f"{cursor.path}: tensor {name[:64]!r} has the unknown type {number}; supported: "
            f"{', '.join(SUPPORTED)}"
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise cursor.corrupt(f"tensor {name[:64]!r} of shape {list(shape)} in blocks of {block}")
    return name, shape, kind.name, offset, math.prod(shape) // block * block_bytes
