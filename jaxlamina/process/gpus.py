"""How many NVIDIA GPUs a process may use, without loading a driver. Knows nothing of JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # what JAX takes of a GPU's memory, once it starts


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """The names that CUDA_VISIBLE_DEVICES leaves; None where it is not set, and all are."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]


def n_gpus(environment: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a process here may use."""
    visible = visible_gpus(environment)
    if visible is not None:
        return len(visible)
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
