"""`jaxlamina bench throughput`: its options, and how its results look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina import model_files
from jaxlamina.bench.flags import AsJson, Layers, Rounds, Seed, option, shape_of
from jaxlamina.bench.report import Columns, Part, dim, left_out, progress, table, tell, verdict, warning
from jaxlamina.bench.serve_cli import DRAWN
from jaxlamina.cli import model_options
from jaxlamina.errors import UserError
from jaxlamina.options import DEFAULT_SEQS, MODEL_HELP

if TYPE_CHECKING:
    from jaxlamina.bench.throughput_bench import ThroughputReport

DEFAULT_MODEL = "smollm2-135m-instruct"
# Of a way's heading and one of its runs.
COLUMNS: Columns = (
    ("way", lambda row: row[0], "<"),
    ("requests", lambda row: row[1].n_requests, ""),
    ("s", lambda row: row[1].seconds, ".2f"),
    ("requests/s", lambda row: row[1].requests_per_s, ".3f"),
    ("output tok/s", lambda row: row[1].output_per_s, ".1f"),
    ("all tok/s", lambda row: row[1].tokens_per_s, ".1f"),
    ("batch", lambda row: row[1].batch, ".1f"),
    ("most", lambda row: row[1].most_at_once, ""),
    ("TBT p50, ms", lambda row: row[1].tbt_ms and row[1].tbt_ms[0], ".1f"),
    ("p99", lambda row: row[1].tbt_ms and row[1].tbt_ms[1], ".1f"),
    ("preempted", lambda row: row[1].n_preemptions, ""),
    ("host waits", lambda row: None if row[1].wait_s is None else row[1].wait_s / row[1].seconds, ".0%"),
)


def throughput_command(
    context: typer.Context,
    model: Annotated[str | None, option(f"{MODEL_HELP} Default: {DEFAULT_MODEL}.")] = None,
    config: Annotated[
        str | None, option("Instead: a shape of configs/models, or a config.json, with random weights.")
    ] = None,
    layers: Layers = None,
    dtype: Annotated[str, option("Weights and KV: float32 or bfloat16.")] = "float32",
    num_prompts: Annotated[int, option("Requests.", min=1, max=model_options.MOST_REQUESTS)] = 32,
    dataset_name: Annotated[
        str, option(f"Lengths: {', '.join(DRAWN)} or random (all the same).")
    ] = "sharegpt-like",
    input_len: model_options.InputLen = 256,
    output_len: model_options.OutputLen = 128,
    max_num_seqs: model_options.MaxNumSeqs = None,
    max_num_batched_tokens: Annotated[
        int, option("Prompt tokens computed in one step, of ours and of peers.", min=1)
    ] = 2048,
    max_model_len: Annotated[
        int | None, option("Draw no longer requests. Default: the model's length.", min=2)
    ] = None,
    kv_slots: model_options.KvSlots = None,
    padded: Annotated[
        bool, option("Also with a padded KV cache of as many bytes, as --kv-manager padded.", "--padded")
    ] = False,
    kv_headroom: model_options.KvHeadroom = None,
    split: model_options.Split = True,
    tensor_parallel: model_options.TensorParallel = 1,
    kv_present: Annotated[
        bool,
        option(
            "Prompts are not computed: their KV is taken to be there, as in the Lamina papers. Tokens mean "
            "nothing then.",
            "--kv-present",
        ),
    ] = False,
    steady: Annotated[
        bool,
        option("Measure until no request waits any more, and end the rest: full batches alone.", "--steady"),
    ] = False,
    part: Annotated[
        str, option("Of the requests I/N alone: the I-th, counted from 0, of N equal shares, as 0/2.")
    ] = "0/1",
    one_at_a_time: Annotated[int, option("Also serve so many of the requests one after another.", min=0)] = 0,
    compare: Annotated[
        str | None, option("transformers: its continuous batching, on the same requests.")
    ] = None,
    rounds: Rounds = 1,
    profile_s: Annotated[
        float, option("Record so many seconds of one more run: what each rank's device does. 0: none.", min=0)
    ] = 0.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Serve a full queue of requests in this process, greedily: requests and tokens a second. Over ranks,
    too: `jaxlamina launch --dop 1,1 -- bench throughput`."""
    if dataset_name != "random":
        model_options.refuse_given(
            context, "is of --dataset-name random: add that, or leave it out", "input_len", "output_len"
        )
    asked = config or model or DEFAULT_MODEL
    model, opened = _model(model, config, layers)
    from jaxlamina import ranks
    from jaxlamina.bench import machine, step_bench, throughput_bench
    from jaxlamina.bench.loads import Size, means, sizes_of

    step_bench.dtype_of(dtype)
    source, encode = opened()
    if compare not in (None, "transformers"):
        raise UserError(f"--compare {compare!r} must be transformers")
    if steady and (compare or padded or one_at_a_time):
        raise UserError(
            "--steady ends requests early, so nothing else can be compared on them: leave one out"
        )
    if one_at_a_time > num_prompts:
        raise UserError(f"--one-at-a-time {one_at_a_time} must be at most --num-prompts {num_prompts}")
    group = ranks.current()
    if padded and group is not None:
        raise UserError("--padded is for one process: run it without launch")
    if compare is not None and source.model.config is None:
        raise UserError("--compare transformers is for models that transformers has: leave it out")
    most = min(max_model_len or source.model.max_len, source.model.max_len)
    sizes = sizes_of(dataset_name, num_prompts, Size(input_len, output_len), seed=seed, most_tokens=most)
    index, n_parts = _part_of(part, num_prompts)
    sizes = sizes[index::n_parts]
    where = machine.describe(["torch", "transformers"] if compare else [])
    options = throughput_bench.ThroughputOptions(
        model, source, dtype, max_num_seqs or DEFAULT_SEQS, max_num_batched_tokens,
        split, rounds, one_at_a_time, compare is not None, kv_slots, padded, kv_headroom, profile_s,
        kv_present, tensor_parallel, steady,
    )  # fmt: skip
    with progress() as on_progress:
        found = throughput_bench.measure(options, sizes, encode=encode, group=group, on_progress=on_progress)
    job = "one process" if group is None else str(group.cluster.pools)
    record: dict[str, Any] = {
        "model": asked,
        "job": job,
        "dataset_name": dataset_name,
        "seed": seed,
    }
    record |= options.to_dict() | found.to_dict()
    record |= {"num_prompts": len(sizes), "part": part, "mean_lengths": means(sizes)}
    record |= {"kv_bytes": found.kv_slots * options.kv_token_bytes}
    tell("throughput", record, where, _parts(record, found), as_json=as_json)


def _model(model: str | None, config: str | None, layers: int | None) -> tuple[str | None, Callable[[], Any]]:
    """The checkpoint's name, None for random weights and functions; and what opens the model once JAX may be
    imported: the model, and its tokenizer's function, if it has one."""
    if model is not None and config is not None:
        raise UserError("--model and --config are two ways to say which model: give one")
    if config is None and layers is not None:
        raise UserError("--layers is for --config: a model of trained weights has all of its layers")
    if config is not None:
        shape: Any = shape_of(config, layers)
        name = None
    else:
        shape = model_options.find(model or DEFAULT_MODEL)
        name = None if model_files.is_code(str(shape)) else model or DEFAULT_MODEL

    def opened() -> Any:
        from jaxlamina.bench.prompts import encoder_of
        from jaxlamina.bench.step_bench import source_of
        from jaxlamina.weights import open_checkpoint

        source = source_of(shape) if name is None else open_checkpoint(shape)
        return source, encoder_of(source)

    return name, opened


def _part_of(text: str, n_requests: int) -> tuple[int, int]:
    """(which, of how many) of ``I/N``."""
    index, slash, n = text.partition("/")
    if not (slash and index.isdecimal() and n.isdecimal() and int(index) < int(n) <= n_requests):
        raise UserError(f"--part {text!r} must be I/N, with 0 <= I < N <= --num-prompts {n_requests}")
    return int(index), int(n)


def _limit(record: dict[str, Any], ratio: float) -> str:
    """Whether the limit is met, where this is the load that it is of."""
    from jaxlamina.bench.throughput_bench import ALONE, RATIO_LIMIT

    n_alone = record["results"][ALONE][0]["n_requests"]
    load = record["accelerator"], record["dataset_name"], record["num_prompts"], n_alone
    if load != ("cpu", "sharegpt-like", 32, 32):
        return ""
    return f"; limit {RATIO_LIMIT:g}: {verdict(ratio >= RATIO_LIMIT)}"


def _parts(record: dict[str, Any], found: ThroughputReport) -> Iterator[Part]:
    from jaxlamina.bench.throughput_bench import ALONE, OURS

    n_in, n_out = record["mean_lengths"]
    yield (
        f"{record['model']}, {record['n_layers']} layers, {record['dtype']}, {record['accelerator']}, "
        f"{record['job']}: {record['num_prompts']} requests ({record['dataset_name']}, on average {n_in:.0f} "
        f"prompt and {n_out:.0f} output tokens), {record['max_num_seqs']} at once at most, KV of "
        f"{record['kv_slots']:,} tokens ({record['kv_bytes'] / 2**20:.0f} MiB); compiled in "
        f"{found.warm_up_s:.1f} s"
    )
    yield table([(found.heading(way), run) for way, runs in found.runs.items() for run in runs], COLUMNS)
    yield dim(
        "batch: sequences that got a token, mean over steps; host waits: for results, of the time. What the "
        "device waits is seen with --profile-s"
    )
    if local := found.runs[OURS][-1].local_attention:
        share, wanted = (local[key] for key in ("share", "wanted"))
        if share is not None and wanted is not None:
            yield (
                f"attention of the last step's tokens: {share:.0%} on model workers, {wanted:.0%} wanted "
                f"(by {local['partition']})"
            )
    yield from found.under_load.lines() if found.under_load else ()
    for way, (ratio, low, high) in found.ratios().items():
        limit = _limit(record, ratio) if way == ALONE else ""
        yield f"{OURS} is {ratio:.2f} × {found.heading(way)} in output tokens/s ({low:.2f}–{high:.2f}){limit}"
    if found.same_tokens is not None:
        yield f"the same tokens as transformers: {found.same_tokens} of {record['num_prompts']} requests"
    yield from (dim(f"{way}: {note}") for way, note in found.notes.items())
    if not found.in_turns:
        yield warning("transformers ran first and ours after it: memory is too little for both")
    yield from left_out(found.left_out)
