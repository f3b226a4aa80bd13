"""From any checkpoint to a safetensors folder or an Orbax folder. Knows the formats' writers, no layout
itself."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax

from jaxlamina.errors import UserError
from jaxlamina.weights.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from jaxlamina.weights.expert_stacks import unstacked, unstacked_shapes
from jaxlamina.weights.fused import fused_parts
from jaxlamina.weights.orbax_io import write_orbax
from jaxlamina.weights.safetensors_io import write_safetensors
from jaxlamina.weights.streaming import TARGET_DTYPES, Progress, target_dtype

FORMATS = ("safetensors", "orbax")
MAX_SHARD_BYTES = 5 * 10**9


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "safetensors",
    dtype: Any = "auto",
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the checkpoint `source` (anything `open_checkpoint` takes) as a new folder `target`; returns it.

    `dtype`: "auto" is the source's own, float32 if it is quantised. safetensors go out one tensor at a time;
    Orbax takes the whole model at once, on the CPU. The folder appears only when it is complete. Raises
    `UserError` for an unknown format and a target that is there already.
    """
    if to not in FORMATS:
        raise UserError(f"to={to!r} must be one of {', '.join(FORMATS)}")
    if max_shard_bytes < 1:
        raise UserError(f"{max_shard_bytes=} must be positive")
    if dtype != "auto":
        dtype = target_dtype(dtype)
    target = Path(target).expanduser()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} is there already; remove it or give another folder")
    checkpoint = open_checkpoint(source)
    own = checkpoint.own_dtype
    kind = target_dtype((own if own in TARGET_DTYPES else "float32") if dtype == "auto" else dtype)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    except OSError as error:
        raise UserError(f"cannot write to {target.parent}: {error.strerror}") from None
    try:
        if to == "safetensors":
            config = checkpoint.config
            shapes = unstacked_shapes(config, expected_shapes(config))
            tensors, parts = checkpoint.host_tensors(kind, progress), fused_parts(config, shapes)
            tensors = unstacked(config, tensors)
            write_safetensors(folder, shapes, tensors, kind, max_shard_bytes, parts)
        else:
            write_orbax(folder, checkpoint.load(kind, jax.local_devices(backend="cpu")[0], progress))
        _write_side_files(folder, checkpoint, kind.name)
        folder.chmod(0o755)  # mkdtemp's folders are for their owner alone
        os.replace(folder, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _write_side_files(folder: Path, checkpoint: Checkpoint, dtype_name: str) -> None:
    config = checkpoint.config.to_hf() | {"torch_dtype": dtype_name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ends = list(checkpoint.eos_token_ids)
    if ends:
        text = json.dumps({"eos_token_id": ends if len(ends) > 1 else ends[0]}, indent=2)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    try:
        tokenizer = checkpoint.tokenizer()
    except UserError:
        return  # weights without a tokenizer are a model all the same
    tokenizer.save(folder)
