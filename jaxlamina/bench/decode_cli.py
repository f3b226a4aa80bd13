"""`jaxlamina bench decode`: its options, and how its results look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from jaxlamina.bench.flags import AsJson, option
from jaxlamina.bench.lists import whole_numbers
from jaxlamina.bench.report import Columns, Part, counted_progress, dim, left_out, table, tell
from jaxlamina.cli.model_options import AsyncScheduling, find
from jaxlamina.errors import UserError
from jaxlamina.options import MODEL_HELP

if TYPE_CHECKING:
    from jaxlamina.bench.decode_bench import DecodeReport

COLUMNS: Columns = (
    ("batch", lambda r: r.batch, ""),
    ("peer", lambda r: r.title, "<"),
    ("tokens/s", lambda r: r.tokens_per_s, ".1f"),
    ("range", lambda r: f"{min(r.rounds_tokens_per_s):.1f}–{max(r.rounds_tokens_per_s):.1f}", ""),
    ("ms/step", lambda r: r.ms_per_step, ".2f"),
    ("% roof", lambda r: r.of_roofline, ".0%"),
    ("same", lambda r: None if r.same_tokens is None else f"{r.same_tokens}/{r.batch}", ""),
    ("prefill", lambda r: f"{r.prefill_s:.2f} s", ""),
)


def decode_command(
    model: Annotated[str, option(MODEL_HELP)] = "smollm2-135m-instruct",
    batch: Annotated[str, option("Batch sizes, separated by commas.")] = "1,8,32",
    prompt: Annotated[int, option("Tokens of each prompt.", min=1)] = 224,
    tokens: Annotated[int, option("Decode steps after the prompts' own pass.", min=1)] = 64,
    rounds: Annotated[int, option("Timed rounds; one more warms up.", min=1)] = 5,
    peers: Annotated[
        str, option("auto (all that are installed), or some of split,unsplit,transformers,llama.cpp.")
    ] = "auto",
    async_scheduling: AsyncScheduling = True,
    quantized: Annotated[
        bool,
        option("Keep a GGUF's matrices as they are stored, for those peers that can.", "--quantized"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time greedy float32 decoding: this project split and unsplit, beside transformers and llama.cpp.

    Only decode steps are timed; the prompts' own pass and turning tokens into text are not. Peers take turns
    in one run, each in a process of its own.
    """
    path = find(model)
    from jaxlamina.bench import decode_bench, machine
    from jaxlamina.bench import peers as peers_
    from jaxlamina.bench.peers import opened
    from jaxlamina.bench.prompts import encoder_of

    batches = whole_numbers("--batch", batch)
    names, missing = peers_.chosen(peers)
    where = machine.describe(peers_.PACKAGES)
    checkpoint = opened(path)
    if quantized and not getattr(checkpoint, "forms", None):
        raise UserError(f"--quantized: {model} has no matrices of Q4_0, Q4_1 or Q8_0, as a .gguf may")
    shape = checkpoint.in_blocks().model if quantized else checkpoint.model
    with counted_progress("starting") as on_progress:
        found = decode_bench.measure(
            model, shape, names, batches=batches, n_prompt=prompt, n_steps=tokens,
            n_rounds=rounds, encode=encoder_of(checkpoint), left_out=missing,
            async_scheduling=async_scheduling, quantized=quantized, on_progress=on_progress,
        )  # fmt: skip
    tell(
        "decode",
        {"dtype": "float32", "quantized": quantized, **found.to_dict()},
        where,
        _parts(found),
        as_json=as_json,
    )


def _parts(found: DecodeReport) -> Iterator[Part]:
    from jaxlamina.bench.peers import title

    yield table(
        found.results,
        COLUMNS,
        f"{found.model}, float32, greedy: prompt {found.n_prompt_tokens} ({found.prompt_kind}), "
        f"{found.n_steps} decode steps, median of {found.n_rounds} interleaved rounds",
        section=lambda r: r.batch,
    )
    yield dim(
        "% roof: of the roofline below; same: rows with the first peer's tokens exactly; prefill: the "
        "prompts' own pass, not in tokens/s"
    )
    yield (
        f"measured here: memory reads {found.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s, float32 matrix "
        f"products {found.matmul_flop_per_s / 1e9:.0f} GFLOP/s"
    )
    for batch, n_bytes in found.step_bytes.items():
        yield (
            f"roofline at batch {batch}: {found.roofline(batch):.1f} tokens/s, the lower of "
            f"{n_bytes / 1e6:,.0f} MB a step to read ({found.read_limit(batch):.1f}) and "
            f"{found.step_flop[batch] / 1e9:.2f} GFLOP ({found.matmul_limit(batch):.1f})"
        )
    for x in found.ratios:
        yield (
            f"batch {x.batch}: {title(x.ours)} is {x.ratio:.2f} × {title(x.peer)} "
            f"({x.lowest:.2f}–{x.highest:.2f} over the rounds)"
        )
    yield from (dim(f"{title(peer)}: {note}") for peer, note in found.notes.items())
    yield from left_out({title(peer): why for peer, why in found.left_out.items()})
