"""`jaxlamina bench heavy`: options in, a table and one last line of JSON out. Knows how results look."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.bench.server_options import ApiKey, BaseUrl, Host, Port, ServedModel, Streams, address
from jaxlamina.cli import model_options
from jaxlamina.console.tables import print_table, print_where
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.heavy_bench import Effect


def heavy_command(
    base_url: BaseUrl = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model: ServedModel = None,
    api_key: ApiKey = None,
    only: Annotated[
        str, typer.Option(help="Names of heavy requests, separated by commas. Default: all.")
    ] = "",
    streams: Streams = 2,
    output_len: model_options.OutputLen = 128,
    window: Annotated[
        float, typer.Option(min=0.1, help="Seconds without the heavy request, and as many with it.")
    ] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each heavy request has its turn.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout.")] = False,
) -> None:
    """Send a server single requests that are made to keep it busy, and time what others notice.

    The server must be yours: these are attacks, as large as its limits allow and larger.
    """
    from jaxlamina.bench import heavy_bench, machine, serve_client
    from jaxlamina.bench.heavy import heavy_requests
    from jaxlamina.bench.loads import Size

    heavy = {request.name: request for request in heavy_requests()}
    names = [name.strip() for name in only.split(",") if name.strip()] or list(heavy)
    for name in names:
        if name not in heavy:
            raise UserError(f"--only: {name!r} is not one of {', '.join(heavy)}")
    url = address(base_url, host, port)
    served = asyncio.run(serve_client.look(url, model, api_key))
    target = serve_client.Target(url, "completions", served.model, api_key, ignore_eos=True)
    size = Size(16, output_len)
    [prompt] = serve_client.prompts([size], served.token_ids, seed=0)
    where = machine.describe(["aiohttp"])
    with Console(stderr=True).status("others alone") as status:
        effects = asyncio.run(
            heavy_bench.measure(
                target,
                prompt,
                size,
                [heavy[name] for name in names],
                n_streams=streams,
                window_s=window,
                n_rounds=rounds,
                on_progress=status.update,
            )
        )
    record = {
        "bench": "heavy",
        "base_url": url,
        "model": served.model,
        "streams": streams,
        "window_s": window,
        "rounds": rounds,
        "limits": {"health_ms": heavy_bench.HEALTH_LIMIT_MS, "ratio": heavy_bench.RATIO_LIMIT},
        "effects": [asdict(effect) | {"is_met": effect.is_met} for effect in effects],
        **where.to_dict(),
    }
    if not as_json:
        out = Console()
        print_where(out, where)
        print_table(out, _table(effects))
        out.print(
            f"ITL: p99 of the time between others' pieces of text, {streams} streams; its ratio is the median of {rounds} "
            f"rounds (limit {heavy_bench.RATIO_LIMIT:g}). /health: the longest (limit {heavy_bench.HEALTH_LIMIT_MS:g} ms).",
            style="dim",
            soft_wrap=True,
        )
    print(json.dumps(record))


def _table(effects: list[Effect]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("heavy request", no_wrap=True)
    for name in ("MiB", "answers", "s", "ITL ms", "alone", "ratio", "/health ms", "alone", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for x in effects:
        table.add_row(
            x.name,
            f"{x.mib:.1f}",
            ", ".join(f"{n} × {status}" for status, n in x.statuses.items()),
            f"{x.answer_s:.2f}",
            f"{x.beside_itl_ms:.0f}",
            f"{x.alone_itl_ms:.0f}",
            f"{x.ratio:.2f}",
            f"{x.beside_health_ms:.0f}",
            f"{x.alone_health_ms:.0f}",
            "met" if x.is_met else "missed",
        )
    return table
