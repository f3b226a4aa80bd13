"""Hugging Face folders: config.json beside one safetensors file or shards with an index; reading and writing.

Knows the safetensors byte layout (8 bytes of header length, a JSON header, then the data) and the index file.
Does not parse the config or the tokenizer, and never holds more than one tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

from jaxlamina.dtypes import most_common_dtype
from jaxlamina.errors import UserError
from jaxlamina.model_files.hub import INDEX_NAME, SINGLE_NAME, weight_files
from jaxlamina.models import ModelConfig
from jaxlamina.weights.checkpoint import StreamedCheckpoint, expected_shapes, read_json
from jaxlamina.weights.expert_stacks import stacked
from jaxlamina.weights.fit import check_fit, is_buffer, model_names, unique
from jaxlamina.weights.fused import Parts, fused_parts, fused_shapes
from jaxlamina.weights.streaming import Stored, StoredTensor

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

# Element types a weight may have; the rest of the format's types are known by size alone.
FLOATS: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_OTHER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class SafetensorsCheckpoint(StreamedCheckpoint):
    """A Hugging Face folder."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = ModelConfig.from_hf(read_json(path / "config.json"))
        _ = self.stored  # so that a truncated file or a wrong tensor is an error now and not after a prompt

    @property
    def own_dtype(self) -> str | None:
        return most_common_dtype((np.dtype(FLOATS[kind]).name, t.n_bytes) for kind, t in self._found.values())

    @cached_property
    def stored(self) -> dict[str, Stored]:
        return {name: tensor for name, (_, tensor) in self._found.items()}

    @cached_property
    def _found(self) -> dict[str, tuple[str, Stored]]:
        tensors: dict[str, tuple[str, StoredTensor]] = {}
        for file in _weight_files(self.path):
            for name, entry in read_header(file).items():
                if name in tensors:
                    raise UserError(f"{self.path}: tensor {name} is in two files; remove the older one")
                tensors[name] = entry
        expected = expected_shapes(self.config)
        parts = fused_parts(self.config, expected)
        in_files = fused_shapes(expected, parts)
        whole_stacks = stacked(self.config, tensors, str(self.path))
        renamed = model_names(whole_stacks, in_files)
        kept = ((renamed[name], entry) for name, entry in whole_stacks.items() if not is_buffer(name))
        found = unique(kept, str(self.path))
        if self.config.tie_word_embeddings and "lm_head.weight" not in expected:
            _drop_tied_head(found, self.config)
        check_fit(in_files, {name: tensor.shape for name, (_, tensor) in found.items()}, str(self.path))
        strange = sorted({dtype for dtype, _ in found.values() if dtype not in FLOATS})
        if strange:
            raise UserError(
                f"{self.path} stores weights as {', '.join(strange)}, which is not supported; supported: "
                f"{', '.join(FLOATS)}"
            )
        for whole, rows in parts.items():
            kind, tensor = found.pop(whole)
            assert isinstance(tensor, StoredTensor)
            found |= {name: (kind, tensor.part(where)) for name, where in rows}
        return found


def read_header(path: Path) -> dict[str, tuple[str, StoredTensor]]:
    """Tensor name -> (element type, where it lies), every byte of the file accounted for.

    Raises `UserError` naming the file for a header that is cut short, no JSON, or inconsistent, and for data
    that is shorter (bytes expected and present) or longer than the header says.
    """
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            first = file.read(8)
            n = int.from_bytes(first, "little")
            if len(first) < 8 or n > size_bytes - 8:
                raise UserError(
                    f"{path} is truncated: its header takes {8 + n if len(first) == 8 else 8} bytes and the "
                    f"file has {size_bytes}; fetch it again"
                )
            if n > MAX_HEADER_BYTES:
                raise UserError(f"{path} is not a safetensors file: it claims a header of {n} bytes")
            text = file.read(n)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    start = 8 + n
    entries: dict[str, tuple[str, StoredTensor]] = {}
    spans: list[tuple[int, int, str]] = []
    for name, info in _parse_header(text, path).items():
        dtype, shape, begin, end = _parse_entry(name, info, path)
        decode = (lambda raw, t=FLOATS[dtype]: raw.view(t)) if dtype in FLOATS else _undecodable
        entries[name] = dtype, StoredTensor(path, shape, start + begin, end - begin, decode)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise UserError(
                f"{path} has a corrupt header: {name} begins at byte {begin}, not {position}; fetch it again"
            )
        position = end
    if start + position != size_bytes:
        how = "truncated" if size_bytes < start + position else "longer than its header says"
        raise UserError(
            f"{path} is {how}: {start + position} bytes expected, {size_bytes} present; fetch it again"
        )
    return entries


def _parse_header(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UserError(f"{path} has a corrupt header ({reason}); fetch it again") from None
    if not isinstance(header, dict):
        raise UserError(f"{path} has a corrupt header (no JSON object); fetch it again")
    header.pop("__metadata__", None)
    return header


_Size = Annotated[int, msgspec.Meta(ge=0)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=8)]  # a weight's axes; many are minutes of sums


class _Entry(msgspec.Struct):
    """A tensor of the header, as it is written."""

    dtype: str
    shape: _Shape
    data_offsets: tuple[_Size, _Size]


def _parse_entry(name: str, info: Any, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    corrupt = UserError(f"{path} has a corrupt header at tensor {name[:100]!r}; fetch it again")
    try:
        entry = msgspec.convert(info, _Entry)
    except msgspec.ValidationError:
        raise corrupt from None
    dtype, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
    if dtype in FLOATS:
        bits = np.dtype(FLOATS[dtype]).itemsize * 8
    elif dtype in _OTHER_BITS:
        bits = _OTHER_BITS[dtype]
    else:
        raise UserError(f"{path}: tensor {name} has the unknown element type {dtype!r}")
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise corrupt
    return dtype, shape, begin, end


def _undecodable(raw: np.ndarray) -> np.ndarray:
    raise AssertionError("element types were checked when the file was opened")


def _weight_files(folder: Path) -> list[Path]:
    files = {path.name for path in folder.iterdir() if path.is_file()}
    return [folder / name for name in weight_files(folder, files, lambda: read_json(folder / INDEX_NAME))]


def _drop_tied_head(found: dict[str, tuple[str, Stored]], config: ModelConfig) -> None:
    """Some exports store a tied head again. Equal to the embedding it is dropped; else the config lies."""
    if "lm_head.weight" not in found:
        return
    embedding = (
        "model.decoder.embed_tokens.weight" if config.model_type == "opt" else "model.embed_tokens.weight"
    )
    if embedding not in found:
        return  # reported as missing, and the head as unexpected
    (head_type, head), (body_type, body) = found["lm_head.weight"], found[embedding]
    assert isinstance(head, StoredTensor) and isinstance(body, StoredTensor)  # no experts
    if head.shape != body.shape or head_type not in FLOATS or body_type not in FLOATS:
        return
    if not all(np.array_equal(a, b) for (_, a), (_, b) in zip(head.chunks(), body.chunks(), strict=True)):
        raise UserError(
            f"{head.path}: lm_head.weight differs from {embedding} although config.json says "
            "tie_word_embeddings=true; set it to false to use the head"
        )
    del found["lm_head.weight"]


def write_safetensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: np.dtype,
    max_shard_bytes: int,
    parts: Parts | None = None,
) -> None:
    """Write `tensors` (any order, every name of `shapes` once) as one file, or as shards with an index.

    The headers are known before the data, so each tensor goes to its place and is forgotten. What `parts`
    names lies in the file as parts of one tensor.
    """
    parts = parts or {}
    shapes = fused_shapes(shapes, parts)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, n_bytes in sizes.items():
        if shards[-1] and filled + n_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += n_bytes
    n = len(shards)
    files = [SINGLE_NAME] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    places: dict[str, tuple[Path, int]] = {}
    for file, names in zip(files, shards, strict=True):
        places |= _write_header(folder / file, {name: shapes[name] for name in names}, dtype)
    for whole, rows in parts.items():
        path, offset = places.pop(whole)
        row_bytes = sizes[whole] // shapes[whole][0]
        places |= {name: (path, offset + where.start * row_bytes) for name, where in rows}
    for name, array in tensors:
        path, offset = places.pop(name)
        with open(path, "r+b") as out:
            out.seek(offset)
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(out)
    assert not places, sorted(places)
    if n > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_header(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype
) -> dict[str, tuple[Path, int]]:
    code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype.name]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    position = 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + position)
    start = 8 + len(text)
    return {name: (path, start + header[name]["data_offsets"][0]) for name in shapes}
