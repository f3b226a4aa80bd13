"""`jaxlamina bench serve`: its options, and how its results look. Options and results have vLLM's names."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina.bench import report
from jaxlamina.bench.flags import ApiKey, AsJson, BaseUrl, Host, Port, Seed, ServedModel, address, option
from jaxlamina.cli import model_options
from jaxlamina.console.outputs import check_output
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.loads import Size
    from jaxlamina.bench.serve_bench import Load, Measured
    from jaxlamina.bench.serve_client import Served, Target
    from jaxlamina.bench.serve_metrics import TimedAnswer, Wanted
    from jaxlamina.bench.server_numbers import Numbers

DRAWN = ("sharegpt-like", "alpaca-like", "azure-conversation", "azure-code", "kimi-conversation")
"""`jaxlamina.bench.loads.DRAWN`, which is not imported to say what options there are."""
DATASETS = ("random", *DRAWN, "trace")
_SHOWN_ERRORS = 5
_NUMBERS_S = 30.0
PAIRS: report.Columns = (("", lambda row: row[0], "<"), ("", lambda row: row[1], "<"))


def serve_command(
    context: typer.Context,
    base_url: BaseUrl = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    endpoint: Annotated[str, option("completions or chat.")] = "completions",
    model: ServedModel = None,
    api_key: ApiKey = None,
    dataset_name: Annotated[str, option(", ".join(DATASETS) + ".")] = "random",
    dataset_path: Annotated[
        Path | None,
        option(
            "The trace: CSV with TIMESTAMP,ContextTokens,GeneratedTokens, a .jsonl as of Mooncake, or a "
            ".json of --save-result, to send that load again."
        ),
    ] = None,
    speedup: Annotated[float, option("The trace's arrivals come so much faster.")] = 1.0,
    num_prompts: Annotated[
        int, option("Requests; of a trace the first ones.", min=1, max=model_options.MOST_REQUESTS)
    ] = 1000,
    input_len: model_options.InputLen = 1024,
    output_len: model_options.OutputLen = 128,
    request_rate: Annotated[
        float, option("Requests a second; inf: all at once. A trace has its own arrivals.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        option(
            "With --request-rate: shape of the gamma distribution between arrivals: 1 Poisson, less comes in "
            "bursts."
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, option("Requests at the server at most; others wait here, untimed.", min=1)
    ] = None,
    ignore_eos: Annotated[
        bool, option("Have outputs as long as asked for (vLLM, JaxLamina).", "--ignore-eos")
    ] = False,
    token_ids: Annotated[
        bool,
        option(
            "For a server without a tokenizer (JaxLamina, vLLM): prompts are ids that any vocabulary has, "
            "and a token without text counts when it comes, too.",
            "--token-ids",
        ),
    ] = False,
    seed: Seed = 0,
    percentile_metrics: Annotated[
        str, option("Metrics shown: some of ttft,tpot,itl,e2el.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, option("Percentiles of them.")] = "50,90,99",
    goodput: Annotated[
        list[str] | None, option("Also requests a second within limits in ms: --goodput ttft:200 tpot:50.")
    ] = None,
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="NAME:MS", help="More limits, after --goodput's first.")
    ] = None,
    timeout: Annotated[float, option("Seconds that the server may say nothing in an answer.", min=1)] = 600.0,
    save_result: Annotated[Path | None, option("A JSON file for the results, with every request's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load an OpenAI-compatible server and time its streamed answers: TTFT, TPOT, ITL, throughput,
    goodput."""
    from jaxlamina.bench import loads, machine, serve_client, serve_metrics

    if more_goodput and not goodput:
        raise UserError(f"what is {more_goodput[0]!r}? this command takes options alone")
    limits = [*(goodput or []), *(more_goodput or [])]
    wanted = serve_metrics.Wanted.parse(percentile_metrics, metric_percentiles, limits)
    _check(endpoint, dataset_name, dataset_path, speedup, request_rate, token_ids)
    _check_effects(context, dataset_name, request_rate)
    check_output(save_result, "--save-result")
    url = address(base_url, host, port)
    served = asyncio.run(serve_client.look(url, model, api_key))
    if token_ids:
        served = replace(served, token_ids=serve_client.ANY_TOKEN_IDS)
    target = serve_client.Target(url, endpoint, served.model, api_key, ignore_eos, timeout, token_ids)
    if dataset_path is not None:
        sizes, arrive_s = loads.read_trace(dataset_path, speedup)
    else:
        size = loads.Size(input_len, output_len)
        sizes = loads.sizes_of(dataset_name, num_prompts, size, seed=seed, most_tokens=served.max_model_len)
        arrive_s = loads.arrivals(num_prompts, request_rate, burstiness, seed=seed)
    load, n_too_long = _load(served, target, sizes, arrive_s, num_prompts, max_concurrency, seed)
    where = machine.describe(["aiohttp"])
    measured, host_ms = _run(target, load)
    record: dict[str, Any] = {
        "base_url": url,
        "endpoint": endpoint,
        "model": served.model,
        "dataset_name": dataset_name,
        "token_ids": token_ids,
    }
    record |= {"num_prompts": len(load.sizes), "num_too_long": n_too_long, "burstiness": burstiness}
    record |= {"request_rate": None if dataset_path or math.isinf(request_rate) else request_rate}
    record |= {"speedup": speedup if dataset_path else None, "max_concurrency": max_concurrency, "seed": seed}
    record |= wanted.of(measured.answers, measured.duration_s) | {"latest_ms": 1e3 * measured.latest_s}
    record |= {"host_ms": host_ms}
    report.tell("serve", record, where, parts(record, measured, load, wanted), as_json=as_json)
    if save_result is not None:
        report.save(
            save_result, report.whole("serve", record | _each(measured, load), where), "--save-result"
        )
    if not record["completed"]:
        raise UserError(f"no request was answered: {next(iter(record['errors']))}")


def _check(endpoint: str, name: str, path: Path | None, speedup: float, rate: float, token_ids: bool) -> None:
    from jaxlamina.bench.serve_client import PATHS

    if endpoint not in PATHS:
        raise UserError(f"--endpoint {endpoint!r} must be {' or '.join(PATHS)}")
    if token_ids and endpoint != "completions":
        raise UserError("--token-ids is of --endpoint completions: a chat's messages are text")
    if name not in DATASETS:
        raise UserError(f"--dataset-name {name!r} must be one of {', '.join(DATASETS)}")
    if (name == "trace") != (path is not None):
        raise UserError("--dataset-path goes with --dataset-name trace, and each needs the other")
    if name == "trace" and math.isfinite(rate):
        raise UserError("a trace has its own arrivals: leave out --request-rate, or change them by --speedup")
    if not (speedup > 0 and math.isfinite(speedup)):
        raise UserError(f"--speedup {speedup:g} must be above 0")


def _check_effects(context: typer.Context, name: str, rate: float) -> None:
    """``UserError`` for an option that this load does not look at."""
    refuse = partial(model_options.refuse_given, context)
    if name != "random":
        refuse("is of --dataset-name random: add that, or leave it out", "input_len", "output_len")
    if name != "trace":
        refuse("is of --dataset-name trace: leave it out, or change --request-rate", "speedup")
    else:
        refuse("is of drawn arrivals, and a trace has its own: leave it out", "burstiness")
    if math.isinf(rate):
        refuse("is of arrivals at a --request-rate: give one, or leave it out", "burstiness")


def _load(
    served: Served,
    target: Target,
    sizes: list[Size],
    arrive_s: list[float],
    n: int,
    max_concurrency: int | None,
    seed: int,
) -> tuple[Load, int]:
    """The first ``n`` requests that the server has room for, and how many before them it has none for."""
    from jaxlamina.bench import serve_bench, serve_client

    kept: list[int] = []
    n_too_long = 0
    for i, size in enumerate(sizes):
        if len(kept) == n:
            break
        if served.max_model_len is not None and size.n_tokens > served.max_model_len:
            n_too_long += 1
        else:
            kept.append(i)
    if not kept:
        raise UserError(f"every request is longer than the {served.max_model_len} tokens the server takes")
    chosen = [sizes[i] for i in kept]
    ids = served.token_ids if target.endpoint == "completions" else None
    prompts = serve_client.prompts(chosen, ids, seed=seed)
    first_s = arrive_s[kept[0]]
    return serve_bench.Load(
        chosen, prompts, [arrive_s[i] - first_s for i in kept], max_concurrency
    ), n_too_long


def _run(target: Target, load: Load) -> tuple[Measured, float | None]:
    """Also the milliseconds that the server's host was at work for each program, if it says so."""
    from jaxlamina.bench import serve_bench, serve_client

    first = load.prompts[0]
    [trial] = serve_client.prompts(load.sizes[:1], None if isinstance(first, str) else first, seed=2**31)
    n_done = n_failed = 0

    with report.counted_progress("trying one request") as on_progress:

        def on_answer(answer: TimedAnswer) -> None:
            nonlocal n_done, n_failed
            n_done, n_failed = n_done + 1, n_failed + (answer.error is not None)
            what = f"requests, {n_failed} failed" if n_failed else "requests"
            on_progress(what, n_done, len(load.sizes))

        try:
            asyncio.run(serve_bench.try_out(target, trial, load.sizes[0]))
        except UserError as error:
            if isinstance(trial, str) and "tokenizer" in str(error):
                raise UserError(f"{error} (--endpoint completions --token-ids does so)") from None
            raise
        before = _numbers(target)
        measured = asyncio.run(serve_bench.run(target, load, on_answer))
        return measured, _numbers(target).host_ms(before)


def _numbers(target: Target) -> Numbers:
    """None in them, of a server that says none."""
    from jaxlamina.bench.server_numbers import Numbers
    from jaxlamina.server.client import Client

    try:
        return Numbers.of(Client(target.base_url, api_key=target.api_key, silence_s=_NUMBERS_S))
    except UserError:
        return Numbers("")


def _each(measured: Measured, load: Load) -> dict[str, Any]:
    """Every request's numbers, as vLLM's detailed results have them."""
    answers = measured.answers
    return {
        "arrivals": list(load.arrive_s),
        "input_lens": [a.n_prompt for a in answers],
        "output_lens": [a.n_output for a in answers],
        "ttfts": [None if a.error else a.ttft_s for a in answers],
        "itls": [a.itl_s for a in answers],
        "e2els": [None if a.error else a.e2el_s for a in answers],
        "errors_by_request": [a.error for a in answers],
    }


def parts(record: dict[str, Any], measured: Measured, load: Load, wanted: Wanted) -> Iterator[report.Part]:
    """What is shown of a result."""
    from jaxlamina.bench import loads, serve_metrics

    n_in, n_out = loads.means(load.sizes)
    yield (
        f"{record['model']} at {record['base_url']}, {record['endpoint']}: {record['num_prompts']} requests "
        f"({record['dataset_name']}), asked for {n_in:.0f} prompt and {n_out:.0f} output tokens each on "
        "average"
    )
    normalised_ms = record["mean_normalized_latency_ms"]
    rows = [
        ("completed / failed", f"{record['completed']} / {record['failed']}"),
        ("duration", f"{record['duration']:.2f} s"),
        ("tokens in / out", f"{record['total_input_tokens']:,} / {record['total_output_tokens']:,}"),
        ("requests", f"{record['request_throughput']:.3f} /s"),
        ("output tokens", f"{record['output_throughput']:.1f} /s"),
        ("all tokens", f"{record['total_token_throughput']:.1f} /s"),
        ("most requests at once", f"{record['max_concurrent_requests']}"),
        ("normalised latency", "–" if normalised_ms is None else f"{normalised_ms:.2f} ms a token"),
    ]
    if record["host_ms"] is not None:
        rows.append(("the server's host, for each program", f"{record['host_ms']:.2f} ms"))
    if "request_goodput" in record:
        limits = ", ".join(f"{name} ≤ {ms:g} ms" for name, ms in wanted.limits_ms.items())
        rows.append((f"goodput ({limits})", f"{record['request_goodput']:.3f} requests/s"))
    yield report.table(rows, PAIRS)
    keys = ("mean", "median", "std", *(f"p{p:g}" for p in wanted.percentiles))
    rows_ms = [(name.upper(), *(record[f"{key}_{name}_ms"] for key in keys)) for name in wanted.names]
    columns: list[report.Column] = [(key, itemgetter(i), ".2f") for i, key in enumerate(keys, start=1)]
    yield report.table(rows_ms, (PAIRS[0], *columns), "ms")
    yield report.dim("; ".join(f"{name.upper()}: {serve_metrics.TITLES[name]}" for name in wanted.names))
    if record["num_too_long"]:
        yield report.warning(f"left out: {record['num_too_long']} requests longer than the server takes")
    if any(a.error is None and not a.usage for a in measured.answers):
        yield report.warning("the server does not say how many tokens there were: pieces were counted")
    yield report.dim(f"requests were begun at most {record['latest_ms']:.1f} ms late by this client")
    for text, n in serve_metrics.errors(measured.answers)[:_SHOWN_ERRORS]:
        yield report.failure(f"{n} failed: {text}")
