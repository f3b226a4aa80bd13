"""How numbers and text look in a drawing: bytes for people, and how wide a line will be.

Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

# Average advance of a character over the font size, for the widest of the usual sans-serif fonts.
_NARROW, _NORMAL, _WIDE = frozenset("iljtfr.,:;'|!()[] "), 0.63, frozenset("mwMW%@—…")


def human_bytes(n: int) -> str:
    """`4608` -> `4.5 KiB`: three significant digits, exact below 1 KiB."""
    if n < 1024:
        return f"{n} B"
    value, units = float(n), ["KiB", "MiB", "GiB", "TiB", "PiB"]
    while True:
        value /= 1024
        unit = units.pop(0)
        if value < 1023.5 or not units:
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Pixels that a line of sans-serif text needs at most, near enough."""
    units = sum(0.38 if c in _NARROW else 0.95 if c in _WIDE else _NORMAL for c in text)
    return units * size * (1.09 if bold else 1.0)


def shape_text(dtype: str, shape: Sequence[int]) -> str:
    """`float32[2,1,576]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def shortened(text: str, most: int) -> str:
    """At most `most` characters, the middle left out."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def span(numbers: Sequence[int]) -> str:
    """`2 … 29`, or `2`: a run of consecutive numbers."""
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} … {numbers[-1]}"
