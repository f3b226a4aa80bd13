"""Which dtype a model's weights and KV get where nobody says. Plain Python; knows names alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

AUTO = "auto"
CHOICES = (AUTO, "float32", "bfloat16")


class Chosen(NamedTuple):
    """``dtype``: float32 or bfloat16. ``why``: one line; empty where somebody asked for it."""

    dtype: str
    why: str


def chosen(asked: str, own: str | None, on_cpu: bool) -> Chosen:
    """The dtype for ``asked`` (of `CHOICES`) where weights are stored as ``own``, None for a quantised form.

    "auto" is float32 on a CPU, which computes in it anyway, and the model's own elsewhere: float32 or
    bfloat16, and bfloat16 in place of float16 (whose bytes it has) and of quantised weights.
    """
    if asked != AUTO:
        return Chosen(asked, "")
    stored = f"the weights are stored as {own}" if own else "the weights are stored quantised, or not at all"
    if on_cpu:
        note = "; dtype=bfloat16 halves the memory" if own not in (None, "float32") else ""
        return Chosen("float32", f"dtype=float32, as everything on a CPU ({stored}{note})")
    if own in CHOICES:
        return Chosen(own, f"dtype={own}, the model's own")
    exact = "; dtype=float32 keeps every bit" if own else ""
    return Chosen("bfloat16", f"dtype=bfloat16 ({stored}{exact})")


def most_common_dtype(stored: Iterable[tuple[str | None, int]]) -> str | None:
    """Of ``(dtype, bytes)`` the dtype with the most bytes."""
    n_bytes: Counter[str | None] = Counter()
    for dtype, n in stored:
        n_bytes[dtype] += n
    return max(n_bytes, key=lambda dtype: n_bytes[dtype], default=None)
