"""A number of ours beside the one that a paper prints, and a table or figure of a paper as rows of those.

Knows no formula and no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["formula", "trace", "calculated", "measured", "simulated", "given"]
"""How a number of ours came about. ``calculated``: by the planner, of a system of ours. ``given``: what the
paper prints, put into our tables, and no result."""

Sense = Literal["=", "<", ">", "about"]


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it.

    ``where``: page, section, table or figure. ``quote``: the words or the table's line around it, as in the
    paper's text. ``sense``: whether the paper says that the value is this, less, more, or about this.
    """

    text: str
    where: str
    quote: str
    sense: Sense = "="

    def __post_init__(self) -> None:
        assert self.text in self.quote, f"{self.text!r} is not in {self.quote!r}"

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])

    @property
    def tolerance(self) -> float:
        """Half a unit of the last printed digit; of "about 30", of the last digit that is not 0."""
        digits = -self.decimals
        if self.sense == "about" and not self.decimals:
            digits = len(self.text) - len(self.text.rstrip("0"))
        return 0.5 * 10.0**digits

    def agrees(self, ours: float) -> bool:
        if self.sense == "<":
            return ours < self.value
        if self.sense == ">":
            return ours > self.value
        return abs(ours - self.value) <= self.tolerance * (1 + 1e-9)

    def shown(self) -> str:
        words = {"=": "", "<": "below ", ">": "above ", "about": "about "}
        return words[self.sense] + self.text


@dataclass(frozen=True)
class ComparedRow:
    """One quantity. ``ours`` None: no formula gives it, and ``reason`` says what would.

    ``reason``: why ours is not what is printed, or why there is none of ours; there must be one exactly in
    these cases. ``decimals``: of ours as shown; None: as printed, and 1 where nothing is.
    """

    what: str
    unit: str
    ours: float | None
    how: How | None
    printed: Printed | None = None
    reason: str = ""
    decimals: int | None = None

    def __post_init__(self) -> None:
        assert (self.ours is None) == (self.how is None), self
        assert bool(self.reason) == (self.agrees is False or self.ours is None), self

    @property
    def agrees(self) -> bool | None:
        """Whether ours is the printed number, within its rounding; None where one of the two is missing."""
        if self.printed is None or self.ours is None:
            return None
        return self.printed.agrees(self.ours)

    @property
    def shown(self) -> str:
        if self.ours is None:
            return "–"
        decimals = self.decimals
        if decimals is None:
            decimals = self.printed.decimals if self.printed and self.printed.sense != "about" else 1
        shown = f"{self.ours:,.{decimals}f}"
        if self.printed and self.printed.sense == "=":
            # One digit more where rounding would hide that the two differ, or make them differ.
            looks_equal = shown == f"{self.printed.value:,.{decimals}f}"
            shown = shown if looks_equal == self.agrees else f"{self.ours:,.{decimals + 1}f}"
        return shown

    def to_dict(self) -> dict[str, Any]:
        printed = self.printed and {
            "text": self.printed.text,
            "sense": self.printed.sense,
            "where": self.printed.where,
            "quote": self.printed.quote,
        }
        return {
            "what": self.what,
            "unit": self.unit,
            "ours": self.ours,
            "how": self.how,
            "printed": printed,
            "agrees": self.agrees,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Curve:
    """A line of a figure: ours, by formula."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Axes:
    """What a figure's axes say."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Reproduction:
    """A table or figure of a paper, with ours beside it. ``remarks``: what holds for all rows."""

    title: str
    rows: Sequence[ComparedRow]
    remarks: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    axes: Axes | None = None

    def to_dict(self) -> dict[str, Any]:
        curves = [{"label": c.label, "x": list(c.x), "y": list(c.y)} for c in self.curves]
        rows = [row.to_dict() for row in self.rows]
        found: dict[str, Any] = {"title": self.title, "rows": rows, "remarks": list(self.remarks)}
        if self.axes is not None:
            found |= {"x": self.axes.x, "y": self.axes.y, "curves": curves}
        return found
