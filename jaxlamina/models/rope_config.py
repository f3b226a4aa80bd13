"""The rotary part of config.json: `rope_theta` and `rope_scaling` (transformers 4), `rope_parameters` (5).

Knows names and values, no arrays: the frequencies are made in `rope.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlamina.errors import UserError

MOST_THETA = 1e15  # published ones go up to 1e8 or so; float32 has room for this

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# The keys each type reads beyond rope_theta, with True where the type cannot do without.
_TYPE_KEYS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": {"factor": True},
    "dynamic": {"factor": True},
    "llama3": {
        "factor": True,
        "low_freq_factor": True,
        "high_freq_factor": True,
        "original_max_position_embeddings": False,
    },
    "yarn": {
        "factor": False,
        "original_max_position_embeddings": False,
        "attention_factor": False,
        "beta_fast": False,
        "beta_slow": False,
        "mscale": False,
        "mscale_all_dim": False,
        "truncate": False,
    },
}
_IGNORED_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. Every type reads `theta` and `max_position_embeddings` (tokens), the rest as named.

    - `factor`: linear, dynamic, llama3, yarn. `original_max_position_embeddings`: llama3, yarn.
    - `low_freq_factor`, `high_freq_factor`: llama3.
    - `attention_factor` (None: derived), `beta_*`, `mscale`, `mscale_all_dim`, `truncate`: yarn.
    """

    rope_type: str
    theta: float
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def rope_from_hf(hf: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read either form; raises `UserError` naming the field for a type or a key that is not supported."""
    where, params = _rope_dict(hf)
    rope_type = params.get("rope_type") or params.get("type") or "default"
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise UserError(f"config: {where} has rope_type={rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
    if params.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(
            f"config: {where}.partial_rotary_factor={params['partial_rotary_factor']} is not supported"
        )
    keys = _TYPE_KEYS[rope_type]
    # transformers ignores what a type does not read if another type reads it; a key that no type knows is an
    # error.
    known = _IGNORED_KEYS.union(*_TYPE_KEYS.values())
    unknown = sorted(key for key, value in params.items() if key not in known and value is not None)
    if unknown:
        raise UserError(
            f"config: {where} has {', '.join(unknown)}, which rope_type={rope_type!r} does not know"
        )
    missing = sorted(key for key, needed in keys.items() if needed and params.get(key) is None)
    if missing:
        raise UserError(f"config: {where} with rope_type={rope_type!r} must have {', '.join(missing)}")

    def number(key: str) -> float | None:
        value = params.get(key)
        if value is None or key not in keys:
            return None
        return finite(f"{where}.{key}", value)

    original = None
    if "original_max_position_embeddings" in keys:
        # A value beside the rope dict wins over one inside it, and the model's own length stands in for both.
        original = (
            hf.get("original_max_position_embeddings")
            or params.get("original_max_position_embeddings")
            or max_position_embeddings
        )
        original = int(finite(f"{where}.original_max_position_embeddings", original))
        if original <= 0:
            raise UserError(
                f"config: {where}.original_max_position_embeddings={original!r} must be a positive integer"
            )
    factor = number("factor")
    if factor is None:
        factor = max_position_embeddings / original if original is not None else 1.0
    if factor <= 0:
        raise UserError(f"config: {where}.factor={factor} must be positive")
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if low is not None and high is not None and not 0 < low < high:
        raise UserError(
            f"config: {where} must have 0 < low_freq_factor < high_freq_factor, not {low} and {high}"
        )
    truncate = params.get("truncate")
    return RopeConfig(
        rope_type=rope_type,
        theta=_theta(where, params, hf),
        max_position_embeddings=max_position_embeddings,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
        attention_factor=number("attention_factor"),
        beta_fast=number("beta_fast") or 32.0,
        beta_slow=number("beta_slow") or 1.0,
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        truncate=True if truncate is None or "truncate" not in keys else bool(truncate),
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the form that both transformers 4 and 5 read."""
    if rope.rope_type == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    values = {key: getattr(rope, key) for key in _TYPE_KEYS[rope.rope_type]}
    scaling = {"rope_type": rope.rope_type} | {
        key: value for key, value in values.items() if value is not None
    }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _rope_dict(hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    old, new = hf.get("rope_scaling"), hf.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"config: {name}={value!r} must be an object or null")
        if value and any(isinstance(inner, Mapping) for inner in value.values()):
            raise UserError(f"config: {name} differs between kinds of layers, which is not supported")
    if old and new and dict(old) != dict(new):
        raise UserError(
            "config: rope_scaling and rope_parameters are both there and differ; keep one of the two"
        )
    return ("rope_scaling", old) if old else ("rope_parameters", new or {})


def _theta(where: str, params: Mapping[str, Any], hf: Mapping[str, Any]) -> float:
    theta = params.get("rope_theta")
    if theta is None:
        theta = hf.get("rope_theta")
    if theta is None:
        theta = 10000.0
    theta = finite(f"rope_theta in {where}", theta)
    if not 1 < theta <= MOST_THETA:
        raise UserError(f"config: rope_theta={theta!r} in {where} must be above 1 and at most {MOST_THETA:g}")
    return theta


def finite(key: str, value: Any) -> float:
    """A number of a config.json as a float; `UserError` for anything else, infinities and NaN too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise UserError(f"config: {key}={value!r:.60} must be a finite number")
    return float(value)
