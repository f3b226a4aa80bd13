"""How every bench tells what it found: tables and lines for people, and one line of JSON last.

Knows rich and JSON; nothing of what is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxlamina.console.tables import print_table
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.machine import Machine

# Heading, a row's value (None is shown as "–"), and how it is formatted; a format that begins with "<" is of
# words.
Column = tuple[str, Callable[[Any], Any], str]
Columns = Sequence[Column]
Part = Table | Text | str

dim, warning, failure = (partial(Text, style=style) for style in ("dim", "yellow", "red"))


def table(
    rows: Iterable[Any],
    columns: Columns,
    title: str | None = None,
    section: Callable[[Any], Any] | None = None,
) -> Table:
    """``section``: what the rows of one section share; its first column is shown once."""
    is_headed = any(heading for heading, *_ in columns)
    made = Table(
        title=title, box=box.SIMPLE_HEAD, show_header=is_headed, collapse_padding=True, pad_edge=False
    )
    for heading, _, spec in columns:
        made.add_column(heading, justify="left" if spec.startswith("<") else "right", no_wrap=True)
    before: Any = made  # no row's
    for row in rows:
        values = [(of(row), spec) for _, of, spec in columns]
        cells = ["–" if value is None else format(value, spec) for value, spec in values]
        if section is not None:
            if section(row) == before:
                cells[0] = ""
            elif made.row_count:
                made.add_section()
            before = section(row)
        made.add_row(*cells)
    return made


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def left_out(reasons: Mapping[str, str]) -> Iterator[Part]:
    """A line for each thing that was not measured, with its reason."""
    for what, why in reasons.items():
        yield warning(f"left out: {what}: {why}")


def show(out: Console, where: Machine, parts: Iterable[Part]) -> None:
    """The machine, a warning if others were busy there, and the parts."""
    head = [dim(where.line()), *(warning(line) for line in (where.busy(),) if line)]
    for part in (*head, *parts):
        if isinstance(part, Table):
            print_table(out, part)
        else:
            out.print(part, soft_wrap=True, markup=False)


def tell(
    bench: str, record: Mapping[str, Any], where: Machine, parts: Iterable[Part], *, as_json: bool
) -> None:
    """Prints the parts, unless ``as_json``, and the record with the bench's name and the machine as one line
    of JSON."""
    if not as_json:
        show(Console(highlight=False), where, parts)
    print(json.dumps(whole(bench, record, where)))


def whole(bench: str, record: Mapping[str, Any], where: Machine) -> dict[str, Any]:
    return {"bench": bench, **record, **where.to_dict()}


def save(path: Path, record: Mapping[str, Any], option: str) -> None:
    """Writes a record to a file. ``UserError``, naming the option, if that cannot be."""
    try:
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {option} {path}: {error}") from None


@contextmanager
def progress(what: str = "starting") -> Iterator[Callable[[str], None]]:
    """Yields a function that is told what is being done, which is shown on stderr: a line each where that is
    no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status(what) as status:
        yield status.update


@contextmanager
def counted_progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """As `progress`, with how many things are done and how many there are."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, n_done, n_all: bar.update(task, description=what, completed=n_done, total=n_all)
