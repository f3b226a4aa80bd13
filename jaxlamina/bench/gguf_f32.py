"""An F32 copy of a quantised GGUF file: the same tensors and metadata, every matrix dequantised.

llama.cpp then reads exactly the numbers that the other peers compute with. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxlamina.process.cache_folder import cache_dir

# Written by the writer itself, or no longer true of the copy.
_NOT_COPIED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
_ALL_F32 = 0  # general.file_type


def f32_gguf(source: Path, folder: Path | None = None) -> Path:
    """Path of the F32 copy of `source`, made at the first call (four bytes a parameter of disk) and kept in
    `folder`.

    folder: default `bench` in the project's cache. The copy is found again while the source is the same size
    and age.
    """
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = folder or cache_dir() / "bench"
    target = folder / f"{source.stem}.F32.{key}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.part")
        try:
            write_f32(source, unfinished)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    return target


def write_f32(source: Path, target: Path) -> None:
    """Writes the F32 copy: metadata field by field, tensors one by one."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch=architecture)
    for name, field in reader.fields.items():
        if not name.startswith(_NOT_COPIED):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(_ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor_info(tensor.name, _shape(tensor), np.dtype(np.float32), 4 * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        writer.write_tensor_data(values.reshape(_shape(tensor)))
    writer.close()


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))  # GGUF counts the fastest axis first
