"""`jaxlamina bench exchange`: options in, a table, a figure and one last line of JSON out. Knows how results look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.console.tables import print_table, print_where
from jaxlamina.errors import UserError


def exchange_command(
    transport: Annotated[
        list[str] | None,
        typer.Option(
            help="mpi or xla; may be repeated; with environment variables of its own: 'xla:NCCL_PROTO=LL;VAR=VALUE', "
            "of which JAXLAMINA_PEER_MEMORY=0 leaves all to collectives. Default: all that are installed."
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes separated by commas: 4K,1M. Default: 4 KiB to 64 MiB by fours.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, in which transports take turns.")] = 7,
    platform: Annotated[
        str,
        typer.Option(help="auto (GPUs where there are two), cpu, cuda, or rank 0's and rank 1's: cuda,cpu."),
    ] = "auto",
    link: Annotated[
        float | None, typer.Option(min=0.001, help="What the link can do one way, in GB/s, to compare with.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw time and bandwidth: a .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout.")] = False,
) -> None:
    """Time a tensor's way to another rank and back inside a program, by size and transport, on this host.

    Starts its own ranks. All round trips of a run are in one loop of one program, so that Python is in none of them.
    """
    from jaxlamina.bench import exchange_bench, exchange_figure, machine
    from jaxlamina.bench.exchange_ranks import RankError

    if figure is not None:
        exchange_figure.check(figure)
    chosen = exchange_bench.platforms(platform)
    found, left_out = exchange_bench.installed()
    if chosen[0] != chosen[1]:
        found = [peer for peer in found if peer.transport == "mpi"]
        left_out |= {"xla": "has one platform for all ranks"} if transport is None else {}
    peers = found
    if transport is not None:
        peers = [exchange_bench.ExchangePeer.parse(text) for text in dict.fromkeys(transport)]
        left_out = {}
    where = machine.describe(("mpi4jax",))
    with Console(stderr=True).status("starting") as status:
        try:
            report = exchange_bench.measure(
                peers,
                exchange_bench.SIZES_BYTES if sizes is None else exchange_bench.parse_sizes(sizes),
                n_rounds=rounds,
                platform=chosen,
                link_bytes_per_s=None if link is None else 1e9 * link,
                left_out=left_out,
                on_progress=status.update,
            )
        except RankError as error:
            raise UserError(f"no transport could be measured: {error}") from error
    if not as_json:
        _show(Console(), report, where)
    if figure is not None:
        exchange_figure.draw(report, _title(report, where), figure)
    record = {"bench": "exchange", "aims": _aims(report), **report.to_dict(), **where.to_dict()}
    print(json.dumps(record))


def _title(report: Any, where: Any) -> str:
    kinds = [kind for kinds in report.devices.values() for kind in kinds]
    device = where.device if report.devices and not report.on_gpus else kinds[0]
    return f"Ping-pong between two ranks inside a program; {device}, JAX {where.versions['jax']}, {where.date[:10]}"


def _aims(report: Any) -> list[dict[str, Any]]:
    """What `xla` aims at between GPUs of one host, and what it did; none on other platforms."""
    from jaxlamina.bench.exchange_bench import LINK_AIM, ROUND_TRIP_AIM_US

    aims = []
    for p in report.points:
        if not report.on_gpus or p.peer.partition(":")[0] != "xla":
            continue
        of_limit = p.bytes_per_s / report.limit_bytes_per_s
        if p.size_bytes == 4096:
            wanted, value, met = f"round trip of at most {ROUND_TRIP_AIM_US:g} µs", p.round_trip_us, None
            met = value <= ROUND_TRIP_AIM_US
        elif p.size_bytes == 64 * 2**20:
            wanted, value = f"at least {LINK_AIM:.0%} of the limit", of_limit
            met = value >= LINK_AIM
        else:
            continue
        aims.append({"peer": p.peer, "size_bytes": p.size_bytes, "aim": wanted, "value": value, "met": met})
    return aims


def _show(out: Console, report: Any, where: Any) -> None:
    from jaxlamina.bench.exchange_bench import size_text

    print_where(out, where)
    table = Table(
        title=f"ping-pong of two ranks inside a program, median of {report.n_rounds} interleaved rounds",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("transport")
    for name in ("µs", "range", "GB/s", "% of limit", "round trips"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for p in report.points:
        if last is not None and p.size_bytes != last:
            table.add_section()
        table.add_row(
            size_text(p.size_bytes) if p.size_bytes != last else "",
            p.peer,
            _us(p.round_trip_us),
            f"{_us(min(p.rounds_us))}–{_us(max(p.rounds_us))}",
            f"{p.bytes_per_s / 1e9:.3g}",
            f"{p.bytes_per_s / report.limit_bytes_per_s:.1%}",
            f"{p.n_turns}",
        )
        last = p.size_bytes
    print_table(out, table)
    out.print(
        "µs: of a round trip; GB/s: one way; round trips: in one program, which each round runs once",
        style="dim",
    )
    out.print(f"limit: {report.limit}, {report.limit_bytes_per_s / 1e9:.3g} GB/s", soft_wrap=True)
    for peer, kinds in report.devices.items():
        out.print(f"{peer}: rank 0 on {kinds[0]}, rank 1 on {kinds[1]}", style="dim", soft_wrap=True)
    for aim in _aims(report):
        met = "met" if aim["met"] else "missed"
        out.print(f"{aim['peer']}, {size_text(aim['size_bytes'])}: {aim['aim']}: {aim['value']:.3g}, {met}")
    for peer, why in report.left_out.items():
        out.print(f"left out: {peer}: {why}", style="yellow", soft_wrap=True)


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
