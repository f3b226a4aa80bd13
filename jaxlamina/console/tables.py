"""How tables are printed. Numbers and names are never cut: in a narrow terminal a line wraps instead.

Knows rich; nothing of what is shown.
"""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_ANY_WIDTH = 10_000


def print_table(out: Console, table: Table) -> None:
    """Prints a table as wide as the console, or as wide as its columns must be for every word to be whole."""
    options = out.options.update(max_width=_ANY_WIDTH)
    for column in table.columns:
        sizes = [Measurement.get(out, options, cell) for cell in (column.header, *column.cells)]
        column.min_width = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
    width = out.width
    try:
        out.width = max(width, Measurement.get(out, options, table).minimum)
        out.print(table)
    finally:
        out.width = width
