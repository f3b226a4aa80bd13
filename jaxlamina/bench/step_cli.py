"""`jaxlamina bench step`: its options, and how its results look."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from jaxlamina.bench.flags import AsJson, Case, Config, DType, Layers, Rounds, Staggered, option, shape_of
from jaxlamina.bench.report import Columns, Part, progress, table, tell, warning
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.step_bench import StepResult

PREFILL: Columns = (
    ("case", lambda r: r.case, "<"),
    ("way", lambda r: r.way, "<"),
    ("stored before", lambda r: r.n_stored_tokens, ""),
    ("ms", lambda r: r.ms, ".2f"),
    ("/ decode step", lambda r: r.ratio_to_decode, ".3f"),
    ("prompt tokens/s", lambda r: r.prompt_tokens_per_s, ".0f"),
    ("one by one, ms", lambda r: r.blocked_ms, ".2f"),
    ("difference", lambda r: r.max_difference, ".1e"),
)

OWN_PACE: Columns = (
    ("case", lambda r: r.case, "<"),
    ("way", lambda r: r.way, "<"),
    ("stored before", lambda r: r.n_stored_tokens, ""),
    ("decode step alone, ms", lambda r: median(r.decode_ms), ".2f"),
    ("beside, ms", lambda r: r.ms, ".2f"),
    ("/ alone", lambda r: r.ratio_to_decode, ".3f"),
    ("with an intake, ms", lambda r: median(r.own_pace.with_intake_ms), ".2f"),
    ("steps a chunk", lambda r: median(r.own_pace.steps_per_chunk), ".1f"),
    ("prompt tokens/s", lambda r: r.prompt_tokens_per_s, ".0f"),
    ("workers alone, tokens/s", lambda r: median(r.own_pace.alone_tokens_per_s), ".0f"),
)


def step_command(
    config: Config = "llama-3-8b",
    case: Case = "16x2048,64x4096,160x4096",
    dtype: DType = "bfloat16",
    layers: Layers = None,
    rounds: Rounds = 5,
    unsplit: Annotated[
        bool, option("Also one program on one device, to compare with.", "--unsplit/--no-unsplit")
    ] = True,
    local: Annotated[
        bool, option("Also slice by slice from Python, on the same one device.", "--local")
    ] = False,
    staggered: Staggered = "",
    mini_batches: Annotated[
        str, option("Also with each layer's messages in so many parts: numbers, separated by commas.")
    ] = "",
    prefill: Annotated[
        int | None,
        option(
            "Also with so many tokens of another prompt, in the decode step, in a step after it, or on a "
            "prefill worker meanwhile where the job has one: in step with the rows, and at its own pace.",
            min=2,
        ),
    ] = None,
    devices: Annotated[
        int,
        option(
            "Also unsplit over so many devices of this process, by requests and by weights; without ranks.",
            min=1,
        ),
    ] = 1,
    shares: Annotated[
        str,
        option(
            "Shares of the KV on the model rank, each of which is measured, such as 0,0.25,0.5,1,auto. auto: "
            "what the balance comes to. Executors come one after another then. Only ways of one executor "
            "take turns: staggered batches, and shares above 0 by requests or by tokens."
        ),
    ] = "",
    partitions: Annotated[str, option("With --shares: heads, requests or tokens, separated by commas.")] = "",
    as_json: AsJson = False,
) -> None:
    """Time a decode step, unsplit and split over ranks: `jaxlamina launch --dop 1,1 -- bench step`."""
    shape = shape_of(config, layers)
    import jax

    from jaxlamina import ranks
    from jaxlamina.bench import machine, step_bench, step_ways

    if partitions and not shares:
        raise UserError(f"--partitions {partitions} goes with --shares: add --shares 0")
    weights = step_bench.dtype_of(dtype)
    options = step_ways.StepOptions(
        step_ways.cases_of(case), weights, rounds, unsplit, local, step_ways.numbers_of(staggered),
        step_ways.numbers_of(mini_batches, "--mini-batches"), prefill or 0, devices,
        step_ways.shares_of(shares), step_ways.partitions_of(partitions),
    )  # fmt: skip
    group = ranks.current()
    of_split = {"--shares": shares, "--mini-batches": mini_batches, "--staggered": staggered}
    step_ways.check_unsplit(None if group is None else group.cluster, of_split)
    if group is None and not (unsplit or local or devices > 1):
        raise UserError("nothing is left to be timed: start ranks with `jaxlamina launch … -- bench step`")
    if devices > 1 and (group is not None or devices > len(jax.local_devices())):
        raise UserError(
            f"--devices {devices} is of one process with so many devices ({len(jax.local_devices())} here), "
            "without ranks"
        )
    where = machine.describe(["mpi4jax", "mpi4py"])
    failed: list[str] = []
    with progress() as on_progress:
        source = step_bench.source_of(shape)
        results, limit = step_bench.measure(
            source, options, group=group, on_progress=on_progress, on_failure=failed.append
        )
    record = step_bench.job_of(config, source.model, dtype, group)
    record |= {"read_bytes_per_s": limit, "results": [r.to_dict() for r in results], "failed": failed}
    decodes = [r for r in results if not r.n_prompt_tokens]
    with_prompts = [r for r in results if r.n_prompt_tokens and r.own_pace is None]
    at_own_pace = [r for r in results if r.own_pace is not None]
    title = "{model}, {n_layers} layers, {dtype}; {job}; {accelerator}".format(**record)
    parts: list[Part] = [
        f"{title}; read at {limit / 1e12:.3f} TB/s",
        table(decodes, _columns(decodes, record["n_layers"])),
        *([table(with_prompts, PREFILL)] if prefill is not None else []),
        *([table(at_own_pace, OWN_PACE)] if at_own_pace else []),
        *(warning(f"failed, and left out: {line}") for line in failed),
    ]
    tell("step", record, where, parts, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _columns(results: list[StepResult], n_layers: int) -> Columns:
    """``results``: the first of each case is what its others are compared with."""
    firsts = {r.case: r for r in reversed(results)}
    return (
        ("case", lambda r: r.case, "<"),
        ("way", lambda r: r.way, "<"),
        ("ms", lambda r: r.ms, ".2f"),
        ("of floor", lambda r: r.floor_ms / r.ms, ".0%"),
        ("/ first", lambda r: r.ratio_to(firsts[r.case].ahead_ms), ".3f"),
        ("/ pools' floor", lambda r: r.pools_floor_ms and r.ms / r.pools_floor_ms, ".2f"),
        ("µs a layer more", lambda r: (r.ms - firsts[r.case].ms) / n_layers * 1e3, ".0f"),
        ("one by one, ms", lambda r: r.blocked_ms, ".2f"),
        ("compiled in s", lambda r: r.prepare_s, ".1f"),
        ("difference", lambda r: r.max_difference, ".1e"),
    )
