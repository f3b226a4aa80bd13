"""What devices and links reach in this runtime, as numbers from which tasks' times are made
(`jaxlamina.planner.task_times`). Pure: nothing is measured here, and no file is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxlamina.errors import UserError
from jaxlamina.planner.hardware import Hardware

TILED_ROWS = range(32, 129)
"""Rows whose products are of whole tiles of rows (`pallas_kernels.products`, FEWEST_ROWS to MOST_ROWS)."""

QUERIES_A_PASS = 16
"""Of a KV head, the queries for which the attention kernel reads a stored token once."""

Numbers: TypeAlias = float | NDArray[np.float64]
"""Of one step, or of several at once: an array with one for each. Both give the same bits."""


def longer(one: Numbers, other: Numbers) -> Numbers:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


@dataclass(frozen=True)
class Terms:
    """What one device reaches in this runtime. ``scaled_from``: the device that it was measured on, where
    this one was not at hand and data sheets' ratios were taken; None: measured here.

    A product of some rows takes ``(read ** p + multiply ** p) ** (1 / p)``, p being ``product_knee``: at
    infinity the longer of the two, as a roofline has it; at 1 their sum."""

    hardware: Hardware
    product_bytes_s: float  # of weights, by products of few rows
    product_flop_s: float  # by products of many rows
    attention_bytes_s: float  # of stored KV, by decode attention
    slice_fixed_s: float  # a slice's small kernels between its products
    attention_fixed_s: float  # a layer's attention without any KV, and storing new tokens
    step_fixed_s: float  # what a step has once, on the rank that has the tokens
    scaled_from: str | None = None
    product_knee: float = math.inf
    attention_step_s: float = 0.0  # what a batch has once a step on each device that attends: planning
    attention_row_bytes: float = 0.0  # a token's K takes, and its V, as long as so many bytes at least,
    attention_token_bytes: float = 0.0  # and so many more: rows lie anywhere
    combine_fixed_s: float = 0.0  # a layer's partials of the same rows put together
    product_fixed_s: float = 0.0  # a product's beginning and end
    product_tile: int = 1  # of `TILED_ROWS`, that a kernel multiplies at once: fewer take as long
    row_fixed_s: float = 0.0  # what a decode step has for each request beside its arithmetic

    def __post_init__(self) -> None:
        for name in ("product_bytes_s", "product_flop_s", "attention_bytes_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)} must be above 0")
        for name in (*_FIXED, "attention_row_bytes", "attention_token_bytes"):
            if not (0 <= getattr(self, name) < math.inf):
                raise UserError(f"{name}={getattr(self, name)} must be a number of at least 0")
        if not (isinstance(self.product_tile, int) and self.product_tile >= 1):
            raise UserError(f"product_tile={self.product_tile} must be a whole number of at least 1")
        if not self.product_knee >= 1:
            raise UserError(f"product_knee={self.product_knee} must be at least 1")

    @classmethod
    def of_data_sheet(cls, hardware: Hardware) -> Terms:
        """A roofline: everything as fast as the data sheet says."""
        flop_s, bytes_s = hardware.rates()
        return cls(hardware, bytes_s, flop_s, bytes_s, 0.0, 0.0, 0.0, scaled_from="data sheet")

    @classmethod
    def load(cls, name: str) -> Terms:
        """Of a device of `configs/hardware`: its calibration if there is one, else the nearest one, scaled.
        ``UserError`` as of `jaxlamina.planner.calibration.load`."""
        from jaxlamina.planner import calibration

        return calibration.for_device(name).terms

    def scaled(self, hardware: Hardware) -> Terms:
        """The same runtime on another device: rates go with the data sheets' ratios, fixed times stay.

        ``UserError`` where a data sheet has no FLOP/s."""
        own, other = self.hardware.rates(), hardware.rates()
        by_bytes, by_flop = other.bytes_s / own.bytes_s, other.flop_s / own.flop_s
        return replace(
            self,
            hardware=hardware,
            product_bytes_s=by_bytes * self.product_bytes_s,
            product_flop_s=by_flop * self.product_flop_s,
            attention_bytes_s=by_bytes * self.attention_bytes_s,
            scaled_from=self.scaled_from or self.hardware.name,
        )

    def product_s(self, n_weights: float, n_rows: Numbers, weight_bytes: float) -> Numbers:
        """Rows times a matrix, or several matrices of the same rows."""
        read_s = weight_bytes * n_weights / self.product_bytes_s
        if isinstance(n_rows, np.ndarray):
            return self._products_s(n_weights, n_rows, read_s)
        if TILED_ROWS.start <= n_rows <= TILED_ROWS[-1]:
            n_rows = self.product_tile * math.ceil(n_rows / self.product_tile)
        multiply_s = 2 * n_weights * n_rows / self.product_flop_s
        longer, shorter = max(read_s, multiply_s), min(read_s, multiply_s)
        if not longer or math.isinf(self.product_knee):
            return self.product_fixed_s + longer
        return self.product_fixed_s + longer * (1 + (shorter / longer) ** self.product_knee) ** (
            1 / self.product_knee
        )

    def _products_s(self, n_weights: float, n_rows: NDArray[np.float64], read_s: float) -> Numbers:
        tiled = (n_rows >= TILED_ROWS.start) & (n_rows <= TILED_ROWS[-1])
        n_rows = np.where(tiled, self.product_tile * np.ceil(n_rows / self.product_tile), n_rows)
        multiply_s = 2 * n_weights * n_rows / self.product_flop_s
        longest, shortest = np.maximum(read_s, multiply_s), np.minimum(read_s, multiply_s)
        if not read_s or math.isinf(self.product_knee):
            return self.product_fixed_s + longest
        # Powers by Python: NumPy's differ in the last bit from processor to processor.
        knee, root = self.product_knee, 1 / self.product_knee
        ratios = (shortest / longest).tolist()
        return self.product_fixed_s + longest * np.array([(1 + ratio**knee) ** root for ratio in ratios])

    def fuller_rows(self, n_rows: float) -> tuple[int, ...]:
        """Fewer rows than these whose products may take less time for each row: as many as there are without
        tiles, or in full tiles."""
        if self.product_tile == 1 or n_rows not in range(TILED_ROWS[-1] + 1):
            return ()
        full = range(self.product_tile, TILED_ROWS[-1] + 1, self.product_tile)
        return tuple(n for n in (TILED_ROWS.start - 1, *full) if n < n_rows)

    def attention_s(self, n_tokens: Numbers, row_bytes: Numbers) -> Numbers:
        """Of one layer, over so many stored tokens whose K has ``row_bytes``, and so has their V."""
        n_bytes = 2 * n_tokens * (longer(row_bytes, self.attention_row_bytes) + self.attention_token_bytes)
        return self.attention_fixed_s + n_bytes / self.attention_bytes_s


_FIXED = [f.name for f in fields(Terms) if f.name.endswith("_fixed_s") or f.name == "attention_step_s"]


class LinkTerms(NamedTuple):
    """Between a model worker and the memory pool: one message takes fixed_s + bytes / bytes_s.

    ``is_rendezvous``: neither end goes on before the other has come, as in a collective. Otherwise a sender
    writes into the receiver's memory and goes on. ``by_nic``: a network card does the writing, so that the
    sender goes on at once, and a message waits for earlier ones of the same sender (Lamina 2025, §4.1)."""

    fixed_s: float
    bytes_s: float
    is_rendezvous: bool = False
    by_nic: bool = False

    def message_s(self, n_bytes: Numbers) -> Numbers:
        return self.fixed_s + n_bytes / self.bytes_s
