"""`jaxlamina bench exchange`: its options, and how its results look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from jaxlamina.bench.flags import AsJson, Figure, Rounds, option
from jaxlamina.bench.report import Columns, Part, dim, left_out, progress, table, tell, verdict
from jaxlamina.console.figures import check_figure
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.exchange_bench import ExchangeReport
    from jaxlamina.bench.machine import Machine


def exchange_command(
    transport: Annotated[
        list[str] | None,
        option(
            "mpi or xla; may be repeated; with environment variables of its own: "
            "'xla:NCCL_PROTO=LL;VAR=VALUE', of which JAXLAMINA_PEER_MEMORY=0 leaves all to collectives. "
            "Default: all that are installed."
        ),
    ] = None,
    sizes: Annotated[
        str | None, option("Sizes separated by commas: 4K,1M. Default: 4 KiB to 64 MiB by fours.")
    ] = None,
    rounds: Rounds = 7,
    platform: Annotated[
        str, option("auto (GPUs where there are two), cpu, cuda, or rank 0's and rank 1's: cuda,cpu.")
    ] = "auto",
    link: Annotated[
        float | None, option("What the link can do one way, in GB/s, to compare with.", min=0.001, max=10**6)
    ] = None,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Time a tensor's way to another rank and back inside a program, by size and transport, on this host.

    Starts its own ranks. All round trips of a run are in one loop of one program, so that Python is in none
    of them.
    """
    from jaxlamina.bench import exchange_bench, exchange_figure, machine
    from jaxlamina.bench.exchange_ranks import RankError

    check_figure(figure)
    chosen = exchange_bench.platforms(platform)
    peers, missing = exchange_bench.installed(one_platform=chosen[0] == chosen[1])
    if transport is not None:
        peers, missing = [exchange_bench.ExchangePeer.parse(text) for text in dict.fromkeys(transport)], {}
    sizes_bytes = exchange_bench.SIZES_BYTES if sizes is None else exchange_bench.parse_sizes(sizes)
    where = machine.describe(("mpi4jax",))
    with progress() as on_progress:
        try:
            found = exchange_bench.measure(
                peers, sizes_bytes, n_rounds=rounds, platform=chosen, left_out=missing,
                link_bytes_per_s=None if link is None else 1e9 * link, on_progress=on_progress,
            )  # fmt: skip
        except RankError as error:
            raise UserError(f"no transport could be measured: {error}") from error
    tell("exchange", found.to_dict(), where, _parts(found), as_json=as_json)
    if figure is not None:
        exchange_figure.draw(found, _title(found, where), figure)


def _title(found: ExchangeReport, where: Machine) -> str:
    kinds = [kind for kinds in found.devices.values() for kind in kinds]
    device = where.device if found.devices and not found.on_gpus else kinds[0]
    when = f"JAX {where.versions['jax']}, {where.date[:10]}"
    return f"Ping-pong between two ranks inside a program; {device}, {when}"


def _parts(found: ExchangeReport) -> Iterator[Part]:
    from jaxlamina.bench.exchange_bench import size_text

    limit = found.limit_bytes_per_s
    columns: Columns = (
        ("size", lambda p: size_text(p.size_bytes), ""),
        ("transport", lambda p: p.peer, "<"),
        ("µs", lambda p: _us(p.round_trip_us), ""),
        ("range", lambda p: f"{_us(min(p.rounds_us))}–{_us(max(p.rounds_us))}", ""),
        ("GB/s", lambda p: p.bytes_per_s / 1e9, ".3g"),
        ("% of limit", lambda p: p.bytes_per_s / limit, ".1%"),
        ("round trips", lambda p: p.n_turns, ""),
    )
    title = f"ping-pong of two ranks inside a program, median of {found.n_rounds} interleaved rounds"
    yield table(found.points, columns, title, section=lambda p: p.size_bytes)
    yield dim("µs: of a round trip; GB/s: one way; round trips: in one program, which each round runs once")
    yield f"limit: {found.limit}, {limit / 1e9:.3g} GB/s"
    for peer, kinds in found.devices.items():
        yield dim(f"{peer}: rank 0 on {kinds[0]}, rank 1 on {kinds[1]}")
    for aim in found.aims():
        size, is_met = size_text(aim["size_bytes"]), verdict(aim["met"])
        yield f"{aim['peer']}, {size}: {aim['aim']}: {aim['value']:.3g}, {is_met}"
    yield from left_out(found.left_out)


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
