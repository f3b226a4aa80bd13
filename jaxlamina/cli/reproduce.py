"""`jaxlamina reproduce`: tables and figures of the Lamina papers, ours beside what is printed.

Knows how a comparison looks; `jaxlamina.planner` makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.planner.comparison import ComparedRow, Reproduction


def reproduce(
    paper: Annotated[str | None, typer.Argument(help="lamina-2024 or lamina-2025; both if left out.")] = None,
    item: Annotated[str | None, typer.Argument(help="Such as table-4 or figure-3; left out: a list.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every item of the paper, or of both.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the item's curves, ours alone: a .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout, no tables.")] = False,
) -> None:
    """Print tables and figures of the Lamina papers: ours beside the published numbers, with the reason where
    they differ."""
    from jaxlamina.console.figures import check_figure
    from jaxlamina.planner import reproduction

    if item is not None and everything:
        raise UserError(f"--all takes every item: leave out {item!r}, or --all")
    if figure is not None and item is None:
        raise UserError("--figure draws one item: name it, such as lamina-2025 figure-3")
    papers = {name: reproduction.items(name) for name in ([paper] if paper else reproduction.PAPERS)}
    if paper is not None and item is not None:
        wanted = [(paper, item)]
    elif everything:
        wanted = [(name, one) for name, of in papers.items() for one, needs in of.items() if not needs]
    else:
        _list(papers, as_json)
        return
    check_figure(figure)
    found = [(*names, reproduction.reproduce(*names)) for names in wanted]
    if figure is not None:
        _draw(*found[0], figure)
    if as_json:
        print(json.dumps([{"paper": name, "item": one, **result.to_dict()} for name, one, result in found]))
        return
    for name, one, result in found:
        _show(name, one, result)


def _list(papers: Mapping[str, Mapping[str, str]], as_json: bool) -> None:
    """Items by paper, with what is missing for those that are not there yet."""
    if as_json:
        print(
            json.dumps(
                {name: {one: needs or None for one, needs in of.items()} for name, of in papers.items()}
            )
        )
        return
    from rich.console import Console

    from jaxlamina.planner.reproduction import PAPERS

    out = Console()

    def say(line: str) -> None:
        out.print(line, markup=False, highlight=False, soft_wrap=True)

    for name, of in papers.items():
        say(f"{name}: {PAPERS[name].TITLE}")
        say(f"  {', '.join(one for one, needs in of.items() if not needs)}")
        say("  not yet:")
        for one, needs in of.items():
            if needs:
                say(f"    {one}: {PAPERS[name].NOT_YET[one][0]}; it needs {needs}")
    say("jaxlamina reproduce PAPER ITEM shows one of them, --all all of them")


def _show(paper: str, item: str, found: Reproduction) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from jaxlamina.console.tables import print_table

    out: Any = Console()
    reasons = list(dict.fromkeys(row.reason for row in found.rows if row.reason))
    table = Table(title=f"{paper} {item}: {found.title}", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("ours", "unit", "how", "published", "where", ""):
        table.add_column(
            name, justify="right" if name in ("ours", "published") else "left", no_wrap=name != "where"
        )
    for row in found.rows:
        printed = (row.printed.shown(), row.printed.where) if row.printed else ("", "")
        table.add_row(row.what, row.shown, row.unit, row.how or "", *printed, _verdict(row, reasons))
    print_table(out, table)
    lines = [f"({n}) {reason}" for n, reason in enumerate(reasons, start=1)]
    for line in (*lines, *found.remarks):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _verdict(row: ComparedRow, reasons: list[str]) -> str:
    words = {True: "agrees", False: "differs", None: "" if row.ours is not None else "not ours"}[row.agrees]
    return f"{words} ({reasons.index(row.reason) + 1})" if row.reason else words


def _draw(paper: str, item: str, found: Reproduction, path: Path) -> None:
    from rich.console import Console

    from jaxlamina.planner import figures

    figures.draw(found, f"{paper} {item}", path)
    Console(stderr=True).print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
