"""How many NVIDIA GPUs a process may use, without loading a driver or JAX."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # what JAX takes of a GPU's memory, once it starts
# As CUDA reads it: a number, whatever comes after it, or (the begin of) an identifier.
_NAME = re.compile(r"\d|GPU-|MIG-")


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """The names that CUDA_VISIBLE_DEVICES leaves; None where it is not set, and all are. CUDA reads it up to
    the first one that is none: "0,,1" and "0,-1,1" leave one GPU, and ",0,1" none."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [*takewhile(_NAME.match, map(str.strip, visible.split(",")))]


def n_gpus(environment: Mapping[str, str]) -> int:
    """NVIDIA GPUs that JAX runs on in a process here: 0 without its plugin for CUDA, or where JAX_PLATFORMS
    begins with another platform."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    if not plugin or environment.get("JAX_PLATFORMS", "").split(",")[0] not in ("", "cuda", "gpu"):
        return 0
    visible = visible_gpus(environment)
    if visible is not None:
        return len(visible)
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
