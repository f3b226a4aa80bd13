"""`jaxlamina doctor`: what `jaxlamina.cli.examine` found, as a table or JSON. Knows nothing of the checks
themselves."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON on stdout.")] = False,
) -> None:
    """Say what this machine has: versions, devices, MPI, caches, the demo model; and the command for what is
    missing.

    Exits with 1 if something that every use needs is broken, otherwise 0.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from jaxlamina.cli import examine
    from jaxlamina.console.tables import print_table

    with Console(stderr=True).status("looking"):
        findings = examine.examine()
    healthy = not any(f.status == "broken" for f in findings)
    if as_json:
        print(json.dumps({"ok": healthy, "findings": [f.to_dict() for f in findings]}))
        raise typer.Exit(0 if healthy else 1)
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    for f in findings:
        detail = Text(f.detail)
        if f.mend:
            detail.append(f"\n→ {f.mend}", style="bold")
        table.add_row(Text(f.status, style=colours[f.status]), f.name, detail)
    out = Console()
    print_table(out, table)
    out.print("ready" if healthy else "not ready: mend what is broken", style="bold")
    raise typer.Exit(0 if healthy else 1)
