"""The rotary part of config.json: `rope_theta` and `rope_scaling` (transformers 4), `rope_parameters` (5).

Knows names and values, no arrays: the frequencies are made in `rope.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.models.families import Family

MOST_THETA = 1e15  # published ones go up to 1e8 or so; float32 has room for this

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OTHER_NAMES = {"su": "longrope"}

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
    "longrope": {
        "short_factor": True,
        "long_factor": True,
        "factor": False,
        "original_max_position_embeddings": False,
        "attention_factor": False,
    },
}
_IGNORED_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. Every type reads `theta` and `max_position_embeddings` (tokens), the rest as named.

    - `factor`: linear, dynamic, llama3, yarn, longrope. `original_max_position_embeddings`: the last three.
    - `low_freq_factor`, `high_freq_factor`: llama3.
    - `attention_factor` (None: derived): yarn, longrope.
    - `beta_*`, `mscale`, `mscale_all_dim`, `truncate`: yarn.
    - `short_factor`, `long_factor`: longrope. One number for each pair of dimensions, by which its period is
      stretched, in sequences of up to the original length and in longer ones.
    - `partial_rotary_factor`: the share of a head's dimensions, from the first on, that are turned at all.
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions are turned."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raise `UserError` if heads of this size cannot be turned so."""
        dim = self.rotary_dim(head_dim)
        if dim < 2 or dim % 2:
            raise UserError(
                f"config: head_dim={head_dim} must be even for rotary positions, and so must its part that "
                f"partial_rotary_factor={self.partial_rotary_factor} names; check config.json"
            )
        for name in ("short_factor", "long_factor"):
            found = len(getattr(self, name))
            if self.rope_type == "longrope" and found != dim // 2:
                raise UserError(f"config: {name} has {found} numbers and must have {dim // 2}")


def ropes_from_hf(
    hf: Mapping[str, Any], max_position_embeddings: int, family: Family
) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary positions of a model's layers, and of those with a sliding window where they have their own."""
    if "rope_local_base_freq" not in family.keys:
        return _rope_from_hf(hf, max_position_embeddings, family, None), None
    full, local = (
        _rope_from_hf(hf, max_position_embeddings, family, kind)
        for kind in ("full_attention", "sliding_attention")
    )
    return full, local


def _rope_from_hf(
    hf: Mapping[str, Any], max_position_embeddings: int, family: Family, kind: str | None
) -> RopeConfig:
    """Read either form, of one kind of layers where kinds differ; raises `UserError` naming the field for a
    type or a key that is not supported."""
    where, params = _rope_dict(hf, kind)
    rope_type = params.get("rope_type") or params.get("type") or "default"
    supported = family.rope_types or ROPE_TYPES
    rope_type = _OTHER_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if rope_type not in supported:
        raise UserError(f"config: {where} has rope_type={rope_type!r}; supported: {', '.join(supported)}")
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
        theta=_theta(
            where, params, hf, "rope_local_base_freq" if kind == "sliding_attention" else "rope_theta"
        ),
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
        short_factor=_numbers(where, params, "short_factor") if "short_factor" in keys else (),
        long_factor=_numbers(where, params, "long_factor") if "long_factor" in keys else (),
        partial_rotary_factor=_partial(where, params, hf, family),
    )


def rope_to_hf(rope: RopeConfig, local_rope: RopeConfig | None) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and what lies beside them, in the form that transformers 4 and 5 read."""
    found: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if local_rope is not None:
        found["rope_local_base_freq"] = local_rope.theta
    if rope.partial_rotary_factor != 1:
        found["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.rope_type == "default":
        return found
    values = {key: getattr(rope, key) for key in _TYPE_KEYS[rope.rope_type]}
    if rope.rope_type == "longrope":
        # transformers 4 takes `type` and the two lists, with the original length beside them.
        original = values.pop("original_max_position_embeddings")
        found["original_max_position_embeddings"] = original
        if values["factor"] == rope.max_position_embeddings / original:
            del values["factor"]
        values |= {key: list(values[key]) for key in ("short_factor", "long_factor")}
    scaling = {"type" if rope.rope_type == "longrope" else "rope_type": rope.rope_type}
    found["rope_scaling"] = scaling | {key: value for key, value in values.items() if value is not None}
    return found


def _rope_dict(hf: Mapping[str, Any], kind: str | None) -> tuple[str, Mapping[str, Any]]:
    old, new = hf.get("rope_scaling"), hf.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"config: {name}={value!r} must be an object or null")
        nested = value and any(isinstance(inner, Mapping) for inner in value.values())
        if nested and (kind is None or name == "rope_scaling"):
            raise UserError(f"config: {name} differs between kinds of layers, which is not supported")
        if value and not nested and kind is not None and name == "rope_parameters":
            raise UserError(f"config: {name} must have full_attention and sliding_attention")
    if new and kind is not None:
        if old:
            raise UserError("config: rope_scaling and rope_parameters are both there; keep one of the two")
        return f"rope_parameters.{kind}", new.get(kind) or {}
    if kind == "sliding_attention":
        return "rope_scaling", {}  # is of full attention alone
    if old and new and dict(old) != dict(new):
        raise UserError(
            "config: rope_scaling and rope_parameters are both there and differ; keep one of the two"
        )
    return ("rope_scaling", old) if old else ("rope_parameters", new or {})


def _numbers(where: str, params: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = params[key]
    if not isinstance(values, list | tuple):
        raise UserError(f"config: {where}.{key}={values!r:.60} must be a list of numbers")
    found = tuple(finite(f"{where}.{key}", value) for value in values)
    if any(value <= 0 for value in found):
        raise UserError(f"config: {where}.{key} must have positive numbers only")
    return found


def _theta(where: str, params: Mapping[str, Any], hf: Mapping[str, Any], key: str) -> float:
    theta = params.get("rope_theta")
    if theta is None:
        theta = hf.get(key)
    if theta is None:
        theta = 10000.0
    theta = finite(f"rope_theta in {where}", theta)
    if not 1 < theta <= MOST_THETA:
        raise UserError(f"config: rope_theta={theta!r} in {where} must be above 1 and at most {MOST_THETA:g}")
    return theta


def _partial(where: str, params: Mapping[str, Any], hf: Mapping[str, Any], family: Family) -> float:
    found = params.get("partial_rotary_factor")
    if found is None:
        found = hf.get("partial_rotary_factor")
    share = 1.0 if found is None else finite(f"{where}.partial_rotary_factor", found)
    if share != 1 and "partial_rotary_factor" not in family.keys:
        raise UserError(f"config: {where}.partial_rotary_factor={found} is not supported")
    if not 0 < share <= 1:
        raise UserError(f"config: {where}.partial_rotary_factor={found} must be above 0 and at most 1")
    return share


def finite(key: str, value: Any) -> float:
    """A number of a config.json as a float; `UserError` for anything else, infinities and NaN too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise UserError(f"config: {key}={value!r:.60} must be a finite number")
    return float(value)
