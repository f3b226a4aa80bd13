"""`jaxlamina bench throughput`: options in, a table and one last line of JSON out. Knows how results look."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.cli import model_options
from jaxlamina.console.tables import print_table, print_where
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config
from jaxlamina.options import DEFAULT_SEQS, MODEL_HELP

if TYPE_CHECKING:
    from jaxlamina.bench.loads import Size

DEFAULT_MODEL = "smollm2-135m-instruct"


def throughput_command(
    model: Annotated[str | None, typer.Option(help=f"{MODEL_HELP} Default: {DEFAULT_MODEL}.")] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Instead: a shape of configs/models, or a config.json, with random weights."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than --config's shape has.")] = None,
    dtype: Annotated[str, typer.Option(help="Weights and KV: float32 or bfloat16.")] = "float32",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 32,
    dataset_name: Annotated[
        str,
        typer.Option(
            help="Lengths: sharegpt-like, alpaca-like, azure-conversation or random (all the same)."
        ),
    ] = "sharegpt-like",
    input_len: model_options.InputLen = 256,
    output_len: model_options.OutputLen = 128,
    max_num_seqs: model_options.MaxNumSeqs = None,
    max_num_batched_tokens: model_options.MaxNumBatchedTokens = 2048,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Draw no longer requests. Default: the model's length.")
    ] = None,
    kv_slots: model_options.KvSlots = None,
    padded: Annotated[
        bool,
        typer.Option(
            "--padded", help="Also with a padded KV cache of as many bytes, as --kv-manager padded."
        ),
    ] = False,
    kv_headroom: model_options.KvHeadroom = None,
    split: model_options.Split = True,
    one_at_a_time: Annotated[
        int, typer.Option(min=0, help="Also serve so many of the requests one after another.")
    ] = 0,
    compare: Annotated[
        str | None, typer.Option(help="transformers: its continuous batching, on the same requests.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, in which the ways take turns.")] = 1,
    profile_s: Annotated[
        float,
        typer.Option(
            min=0, help="Record so many seconds of one more run: what each rank's device does. 0: none."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout.")] = False,
) -> None:
    """Serve a full queue of requests in this process, greedily: requests and tokens a second. Over ranks, too:
    `jaxlamina launch --dop 1,1 -- bench throughput`."""
    if model is not None and config is not None:
        raise UserError("--model and --config are two ways to say which model: give one")
    path = shape = None
    if config is None:
        path = model_options.find(model or DEFAULT_MODEL)
    else:
        shape = model_config(config)
    from jaxlamina import ranks
    from jaxlamina.bench import machine, split_bench, throughput_bench
    from jaxlamina.bench.loads import means
    from jaxlamina.bench.prompts import encoder_of
    from jaxlamina.run.make import DTYPES
    from jaxlamina.weights import open_checkpoint

    if dtype not in DTYPES:
        raise UserError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    if compare not in (None, "transformers"):
        raise UserError(f"--compare {compare!r} must be transformers")
    if one_at_a_time > num_prompts:
        raise UserError(f"--one-at-a-time {one_at_a_time} must be at most --num-prompts {num_prompts}")
    encode = None
    if path is not None:
        checkpoint = open_checkpoint(path)
        shape, encode = checkpoint.config, encoder_of(checkpoint)
    assert shape is not None
    if layers is not None:
        if config is None:
            raise UserError("--layers is for --config: a model of trained weights has all of its layers")
        shape = split_bench.with_layers(shape, layers)
    group = ranks.current()
    if padded and group is not None:
        raise UserError("--padded is for one process: run it without launch")
    most = min(max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    sizes = _sizes(dataset_name, num_prompts, input_len, output_len, most, seed)
    max_num_seqs = max_num_seqs or DEFAULT_SEQS
    where = machine.describe(["torch", "transformers"] if compare else [])
    options = throughput_bench.ThroughputOptions(
        model=None if config is not None else model or DEFAULT_MODEL,
        config=shape,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        split=split,
        n_rounds=rounds,
        n_alone=one_at_a_time,
        compare=compare is not None,
        kv_slots=kv_slots,
        padded=padded,
        kv_headroom=kv_headroom,
        profile_s=profile_s,
    )
    with Console(stderr=True).status("starting") as status:
        report = throughput_bench.measure(
            options, sizes, encode=encode, group=group, on_progress=status.update
        )
    record = {
        "bench": "throughput",
        "model": config or options.model,
        "n_layers": shape.num_hidden_layers,
        "dtype": dtype,
        "split": options.split,
        "job": "one process" if group is None else str(group.cluster.pools),
        "accelerator": report.device,
        "dataset_name": dataset_name,
        "num_prompts": num_prompts,
        "mean_lengths": means(sizes),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_slots": report.kv_slots,
        "kv_headroom": kv_headroom,
        "kv_bytes": report.kv_slots * options.kv_token_bytes,
        "seed": seed,
        "warm_up_s": report.warm_up_s,
        "results": {way: [run.to_dict() for run in runs] for way, runs in report.runs.items()},
        "ratios": {way: report.ratio(way) for way in report.runs if way != throughput_bench.OURS},
        "ratio_limit": throughput_bench.RATIO_LIMIT,
        "in_turns": report.in_turns,
        "same_tokens": report.same_tokens,
        "notes": report.notes,
        "headings": report.headings,
        "left_out": report.left_out,
        "under_load": report.under_load and report.under_load.to_dict(),
        **where.to_dict(),
    }
    if not as_json:
        _show(Console(highlight=False), record, report, where)
    print(json.dumps(record))


def _sizes(name: str, n: int, n_in: int, n_out: int, most: int, seed: int) -> list[Size]:
    from jaxlamina.bench.loads import Size, drawn

    if name == "random":
        return [Size(n_in, n_out)] * n
    return drawn(name, n, seed=seed, most_tokens=most)


def _limit(record: dict[str, Any], ratio: float) -> str:
    """Whether the limit is met, where this is the load that it is of."""
    from jaxlamina.bench.throughput_bench import ALONE, RATIO_LIMIT

    n_alone = record["results"][ALONE][0]["n_requests"]
    load = record["accelerator"], record["dataset_name"], record["num_prompts"], n_alone
    if load != ("cpu", "sharegpt-like", 32, 32):
        return ""
    return f"; limit {RATIO_LIMIT:g}: {'met' if ratio >= RATIO_LIMIT else 'missed'}"


def _show(out: Console, record: dict[str, Any], report: Any, where: Any) -> None:
    from jaxlamina.bench.throughput_bench import ALONE, OURS, PADDED, TRANSFORMERS

    print_where(out, where)
    n_in, n_out = record["mean_lengths"]
    out.print(
        f"{record['model']}, {record['n_layers']} layers, {record['dtype']}, {record['accelerator']}, "
        f"{record['job']}: {record['num_prompts']} requests ({record['dataset_name']}, on average {n_in:.0f} prompt and "
        f"{n_out:.0f} output tokens), {record['max_num_seqs']} at once at most, KV of {record['kv_slots']:,} "
        f"tokens ({record['kv_bytes'] / 2**20:.0f} MiB); compiled in {report.warm_up_s:.1f} s",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way", no_wrap=True)
    for name in (
        *("requests", "s", "requests/s", "output tok/s", "all tok/s"),
        *("batch", "preempted", "host waits"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for way, runs in report.runs.items():
        for run in runs:
            host = None if run.wait_s is None else f"{run.wait_s / run.seconds:.0%}"
            table.add_row(
                report.heading(way),
                f"{run.n_requests}",
                f"{run.seconds:.2f}",
                f"{run.requests_per_s:.3f}",
                f"{run.output_per_s:.1f}",
                f"{run.tokens_per_s:.1f}",
                "–" if run.batch is None else f"{run.batch:.1f}",
                "–" if run.n_preemptions is None else f"{run.n_preemptions}",
                host or "–",
            )
    print_table(out, table)
    out.print(
        "batch: sequences that got a token, mean over steps; host waits: for results, of the time. What the device waits is "
        "seen with --profile-s",
        style="dim",
        soft_wrap=True,
    )
    for line in report.under_load.lines() if report.under_load else ():
        out.print(line, soft_wrap=True, markup=False)
    for way in (ALONE, PADDED, TRANSFORMERS):
        if way in report.runs:
            ratio, low, high = report.ratio(way)
            limit = _limit(record, ratio) if way == ALONE else ""
            out.print(
                f"{OURS} is {ratio:.2f} × {report.heading(way)} in output tokens/s ({low:.2f}–{high:.2f}){limit}"
            )
    if report.same_tokens is not None:
        out.print(
            f"the same tokens as transformers: {report.same_tokens} of {record['num_prompts']} requests"
        )
    for way, note in report.notes.items():
        out.print(f"{way}: {note}", style="dim", soft_wrap=True)
    if not report.in_turns:
        out.print("transformers ran first and ours after it: memory is too little for both", style="yellow")
    for way, why in report.left_out.items():
        out.print(f"left out: {way}, {why}", style="yellow", markup=False, soft_wrap=True)
