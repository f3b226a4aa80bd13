"""Weights that files hold in one tensor and models in several: phi3's q, k, v and its gate and up.

Knows the names of both, whose rows lie one after the other; knows no format and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlamina.models import ModelConfig
from jaxlamina.models.families import FAMILIES
from jaxlamina.weights.fit import Shape

# Name of the last module in a file -> names of the model's, in the order of their rows.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# The whole's name -> the parts' names, each with its rows in the whole.
Parts = Mapping[str, Sequence[tuple[str, slice]]]


def fused_parts(config: ModelConfig, shapes: Mapping[str, Shape]) -> Parts:
    """The tensors that files of this family hold fused, of a model with these shapes; empty for most."""
    found: dict[str, list[tuple[str, slice]]] = {}
    if not FAMILIES[config.model_type].fused:
        return found
    for whole, parts in _FUSED.items():
        for name in shapes:
            stem, module, suffix = ([""] * 3 + name.rsplit(".", 2))[-3:]
            if module != parts[0]:
                continue
            names = [f"{stem}.{part}.{suffix}" for part in parts]
            ends = np.cumsum([shapes[part][0] for part in names]).tolist()
            rows = [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
            found[f"{stem}.{whole}.{suffix}"] = list(zip(names, rows, strict=True))
    return found


def fused_shapes(shapes: Mapping[str, Shape], parts: Parts) -> dict[str, Shape]:
    """The shapes that a file has, from those that the model has."""
    found = dict(shapes)
    for whole, rows in parts.items():
        columns = [found.pop(part)[1:] for part, _ in rows]
        found[whole] = (rows[-1][1].stop, *columns[0])
    return found


def fused(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """A model's arrays as transformers' model of its family names them, as do files if it has no experts."""
    found = dict(params)
    for name in params:
        if name.endswith(".experts.gate_proj"):
            up = name.replace("gate_proj", "up_proj")
            both = [np.asarray(found.pop(part)) for part in (name, up)]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both, axis=1)
    for whole, rows in fused_parts(config, {name: x.shape for name, x in params.items()}).items():
        found[whole] = np.concatenate([np.asarray(found.pop(part)) for part, _ in rows])
    return found
