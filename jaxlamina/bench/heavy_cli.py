"""`jaxlamina bench heavy`: its options, and how its results look."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

from jaxlamina.bench.flags import ApiKey, AsJson, BaseUrl, Host, Port, ServedModel, Streams, address, option
from jaxlamina.bench.lists import named
from jaxlamina.bench.report import Columns, dim, progress, table, tell, verdict
from jaxlamina.cli import model_options

COLUMNS: Columns = (
    ("heavy request", lambda x: x.name, "<"),
    ("MiB", lambda x: x.mib, ".1f"),
    ("answers", lambda x: ", ".join(f"{n} × {status}" for status, n in x.statuses.items()), ""),
    ("s", lambda x: x.answer_s, ".2f"),
    ("ITL ms", lambda x: x.beside_itl_ms, ".0f"),
    ("alone", lambda x: x.alone_itl_ms, ".0f"),
    ("ratio", lambda x: x.ratio, ".2f"),
    ("/health ms", lambda x: x.beside_health_ms, ".0f"),
    ("alone", lambda x: x.alone_health_ms, ".0f"),
    ("", lambda x: verdict(x.is_met), ""),
)


def heavy_command(
    base_url: BaseUrl = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model: ServedModel = None,
    api_key: ApiKey = None,
    only: Annotated[str, option("Names of heavy requests, separated by commas. Default: all.")] = "",
    streams: Streams = 2,
    output_len: model_options.OutputLen = 128,
    window: Annotated[
        float, option("Seconds without the heavy request, and as many with it.", min=0.1)
    ] = 5.0,
    rounds: Annotated[int, option("Times that each heavy request has its turn.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Send a server single requests that are made to keep it busy, and time what others notice.

    The server must be yours: these are attacks, as large as its limits allow and larger.
    """
    from jaxlamina.bench import heavy_bench, machine, serve_client
    from jaxlamina.bench.heavy import heavy_requests
    from jaxlamina.bench.loads import Size

    heavy = {request.name: request for request in heavy_requests()}
    chosen = [heavy[name] for name in named("--only", only, heavy) or heavy]
    url = address(base_url, host, port)
    served = asyncio.run(serve_client.look(url, model, api_key))
    target = serve_client.Target(url, "completions", served.model, api_key, ignore_eos=True)
    size = Size(16, output_len)
    [prompt] = serve_client.prompts([size], served.token_ids, seed=0)
    where = machine.describe(["aiohttp"])
    with progress("others alone") as on_progress:
        measured = heavy_bench.measure(
            target, prompt, size, chosen, n_streams=streams, window_s=window, n_rounds=rounds,
            on_progress=on_progress,
        )  # fmt: skip
        effects = asyncio.run(measured)
    health_ms, ratio = heavy_bench.HEALTH_LIMIT_MS, heavy_bench.RATIO_LIMIT
    record = {
        "base_url": url,
        "model": served.model,
        "streams": streams,
        "window_s": window,
        "rounds": rounds,
    }
    record["limits"] = {"health_ms": health_ms, "ratio": ratio}
    record["effects"] = [asdict(effect) | {"is_met": effect.is_met} for effect in effects]
    note = (
        f"ITL: p99 of the time between others' pieces of text, {streams} streams; its ratio is the median of "
        f"{rounds} rounds (limit {ratio:g}). /health: the longest (limit {health_ms:g} ms)."
    )
    tell("heavy", record, where, [table(effects, COLUMNS), dim(note)], as_json=as_json)
