"""Words for operators: which primitives are light, and what a parameter's path says to a reader.

Plain data and text. Knows nothing of JAX or of drawing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAYOUT = _words(
    "broadcast_in_dim convert_element_type copy expand_dims optimization_barrier pad reduce_precision "
    "reshape rev slice split squeeze stop_gradient transpose"
)
ARITHMETIC = _words("add add_any div mul neg sub")
LIGHT = (
    LAYOUT
    | ARITHMETIC
    | _words(
        "abs and argmax argmin atan2 bitcast_convert_type ceil clamp concatenate cos cosh cumlogsumexp "
        "cummax cummin "
        "cumprod cumsum eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow iota is_finite le log "
        "log1p "
        "logistic lt max min ne nextafter not or pow reduce_and reduce_max reduce_min reduce_or reduce_prod "
        "reduce_sum "
        "rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt "
        "square tan tanh xor"
    )
)
PRODUCTS = _words("dot_general ragged_dot ragged_dot_general conv_general_dilated")
LOOKUPS = _words("gather dynamic_slice")
JOINT_TITLES = {
    "add": "Add", "add_any": "Add", "sub": "Subtract", "mul": "Multiply", "div": "Divide",
    "select_n": "Select", "concatenate": "Concatenate",
}  # fmt: skip
# What light operations are, by the primitives that all must be among them; the first that fits.
FEATURES = tuple(
    (_words(needed), title)
    for needed, title in (
        ("logistic mul", "SiLU"), ("logistic", "Sigmoid"), ("erf", "GELU"), ("erfc", "GELU"),
        ("tanh integer_pow", "GELU"), ("tanh pow", "GELU"), ("tanh mul", "Soft cap"),
        ("tanh div", "Soft cap"), ("tanh", "Tanh"), ("log1p", "Softplus"), ("max", "ReLU"),
        ("clamp", "Clamp"),
    )
)  # fmt: skip
ACTIVATIONS = ("SiLU", "GELU", "ReLU", "Sigmoid", "Tanh")
TURNS = _words("concatenate slice split select_n neg rev")  # what rotary embedding swaps halves with
HEAD_WORDS = re.compile(r"head|embed|vocab|logit|wte|unembed|output", re.IGNORECASE)
# Last parts of a parameter's path that name the array and not the layer; and those of a box around the array.
_LEAVES = _words("weight kernel bias scale embedding w b")
_BOXES = _words("value raw_value array")


def path_of(name: str) -> tuple[str, ...]:
    """The parts of a parameter's name, as `jax.tree_util.keystr` writes it or joined by dots.

    `params['layers'][0]['attn.q_proj'].value` gives `('layers', '0', 'attn', 'q_proj', 'value')`.
    """
    inside = re.findall(r"\['((?:[^'\\]|\\.)*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|\.(\w+)", name)
    parts = [re.sub(r"\\(.)", r"\1", p) for found in inside for p in found if p] if inside else [name]
    return tuple(q for p in parts for q in p.split(".") if q)


def short_name(name: str) -> str:
    """What a reader would call the layer that a parameter belongs to: `q_proj`, `input_layernorm`."""
    parts = list(path_of(name)) or [name]
    for last in (str.isdigit, _BOXES.__contains__, _LEAVES.__contains__, str.isdigit):
        if len(parts) > 1 and last(parts[-1]) and not (last is not str.isdigit and parts[-2].isdigit()):
            parts.pop()
    return f"parameter {parts[-1]}" if parts[-1].isdigit() else parts[-1]


def shared_name(weights: Sequence[str]) -> str:
    """One name for several parameters: those of one layer (weight and bias) count once."""
    return " · ".join(dict.fromkeys(short_name(w) for w in weights))


def joined(names: Sequence[str], most: int = 3) -> str:
    return " · ".join(names[:most]) + (" …" if len(names) > most else "")
