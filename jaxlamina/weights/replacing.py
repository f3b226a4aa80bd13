"""What may take the place of a model's weights: those of the same model, whatever was learned.

Compares models and shapes, and copies arrays; knows no format and no device's use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.models.config import ModelConfig
from jaxlamina.models.rope_config import RopeConfig
from jaxlamina.weights.fit import check_fit, folded

Likes = Mapping[str, jax.ShapeDtypeStruct]


# Of a config.json; nothing is computed with them, and a model keeps its own.
_STAYS = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")


def check_same_model(now: CausalLM, new: CausalLM, where: str) -> None:
    """``UserError`` unless both compute the same but for their weights. Says what is different."""
    if _are_same(now, new):
        return
    a, b = dict(now.description), dict(new.description)
    other = [
        f"{key}={b.get(key)!r:.60} ({a.get(key)!r:.60} now)"
        for key in sorted({*a, *b}.difference(_STAYS))
        if a.get(key) != b.get(key)
    ]
    says = f": {', '.join(other)}" if other else ""
    raise UserError(
        f"{where} is another model than the one that runs{says}. An update changes weights alone: start anew "
        "with it"
    )


def _are_same(now: CausalLM, new: CausalLM) -> bool:
    if now.config is None or new.config is None:
        return now.name == new.name and now.description == new.description
    return _computed(now.config) == _computed(new.config) and now.max_len <= new.max_len


def _computed(config: ModelConfig) -> ModelConfig:
    """``config`` without what computes nothing: its name, its tokens, and the length that was meant."""

    def any_length(rope: RopeConfig | None) -> RopeConfig | None:
        if rope is None or rope.rope_type == "dynamic":
            return rope
        return replace(rope, max_position_embeddings=0)

    return replace(
        config,
        model_type="opt" if config.model_type == "opt" else "",
        max_position_embeddings=0,
        rope=any_length(config.rope),
        local_rope=any_length(config.local_rope),
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


def check_same_arrays(now: Likes, new: Mapping[str, Any], where: str) -> None:
    """``UserError`` that names every array which is missing, unexpected, or of another shape or dtype."""
    strange = [name for name, x in new.items() if not hasattr(x, "shape") or not hasattr(x, "dtype")]
    if strange:
        raise UserError(f"{where}: {', '.join(map(str, strange[:9]))} must be arrays")
    shapes = {name: tuple(x.shape) for name, x in now.items()}
    check_fit(shapes, {name: tuple(x.shape) for name, x in new.items()}, where)
    wrong = [
        f"{name} is {new[name].dtype} and must be {like.dtype}"
        for name, like in now.items()
        if str(new[name].dtype) != str(like.dtype)
    ]
    if wrong:
        raise UserError(f"{where}: {', '.join(folded(wrong))}")


def copied(params: Mapping[str, Any], device: jax.Device) -> dict[str, jax.Array]:
    """On ``device``, in memory of their own: whoever gave them may go on training in place."""
    return {name: jax.device_put(np.array(x), device) for name, x in params.items()}
