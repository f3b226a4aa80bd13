"""`jaxlamina bench lamina`: its options, and how its results look."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from jaxlamina.bench.flags import AsJson, Config, DType, Layers, RoundsOfEach, Seed, WayS, option, shape_of
from jaxlamina.bench.report import Columns, Part, dim, left_out, progress, table, tell, warning
from jaxlamina.bench.serve_cli import DRAWN
from jaxlamina.cli import model_options
from jaxlamina.errors import UserError
from jaxlamina.process.gpus import n_gpus

if TYPE_CHECKING:
    from jaxlamina.bench.lamina_bench import ComparedWay, LaminaReport


DEFAULT_AT_ONCE = 2048  # memory is to be the limit


def lamina_command(
    config: Config = "llama-3-8b",
    layers: Layers = None,
    dtype: DType = "bfloat16",
    gpus: Annotated[
        int | None, option("Devices in all, for every way. Default: all GPUs; on a CPU 2 processes.", min=2)
    ] = None,
    dop: Annotated[
        list[str] | None,
        option("Model workers and attention workers, as 1,2; may be repeated. Default: 1 and all others."),
    ] = None,
    local_attention: Annotated[
        str, option("Shares of the attention that stay on model workers, separated by commas.")
    ] = "0,auto",
    dataset_name: Annotated[str, option(f"Lengths: {', '.join(DRAWN)}.")] = "azure-conversation",
    num_prompts: Annotated[
        int, option("Requests, which all ways share out or have.", min=1, max=model_options.MOST_REQUESTS)
    ] = 2 * DEFAULT_AT_ONCE,
    max_num_seqs: Annotated[
        int, option("Requests of a way at once, at most, which its copies share out.", min=1)
    ] = DEFAULT_AT_ONCE,
    max_model_len: Annotated[
        int | None, option("Draw no longer requests. Default: the model's length.", min=2)
    ] = None,
    kv_slots: Annotated[
        int | None,
        option(
            "Tokens of KV of a way, which its copies share out. Default: what memory has room for.", min=1
        ),
    ] = None,
    with_prefill: Annotated[
        bool, option("Compute prompts, too. Default: their KV is taken to be there.", "--with-prefill")
    ] = False,
    steady: Annotated[
        bool,
        option("Measure until no request waits any more, or until all are done.", "--steady/--to-the-end"),
    ] = True,
    rounds: RoundsOfEach = 2,
    profile_s: Annotated[
        float, option("Record so many seconds of one more run: pools' bubbles. 0: none.", min=0)
    ] = 0.0,
    ways: Annotated[
        str | None,
        option(
            "Only ways whose names have one of these in them, separated by semicolons: 'copies;DOP (2, 2)'."
        ),
    ] = None,
    way_s: WayS = 900.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """The papers' comparison (Lamina 2025, Figures 10 and 11): a model over two pools, beside the same model
    unsplit on as many devices: copies, and tensor parallelism. Random weights, requests of a trace."""
    shape_of(config, layers)
    from jaxlamina.bench import lamina_bench, machine
    from jaxlamina.bench.step_bench import dtype_of
    from jaxlamina.bench.step_ways import shares_of

    dtype_of(dtype)
    n_there = n_gpus(os.environ)
    on_gpus = n_there > 0
    n = gpus or n_there or 2
    if on_gpus and n > n_there:
        raise UserError(f"--gpus {n}: there are {n_there}")
    if n < 2:
        raise UserError("a split takes two devices, and there is one")
    dops = [_dop(text, n) for text in dop or [f"1,{n - 1}"]]
    if dataset_name not in DRAWN:
        raise UserError(f"--dataset-name {dataset_name!r} must be one of {', '.join(DRAWN)}")
    shares = [
        f"{x}" if isinstance(x, str) else f"{x:g}" for x in shares_of(local_attention, "--local-attention")
    ]
    caps = {"--max-num-seqs": max_num_seqs} | ({} if kv_slots is None else {"--kv-slots": kv_slots})
    for name, cap in caps.items():
        if cap < n:
            raise UserError(f"{name} {cap}: {n} copies share it out, so it must be at least {n}")
    words = ["--config", config, "--dtype", dtype, "--dataset-name", dataset_name]
    words += ["--num-prompts", str(num_prompts), "--rounds", str(rounds), "--seed", str(seed)]
    words += ["--profile-s", str(profile_s)]
    for name, value in (("layers", layers), ("max-model-len", max_model_len)):
        words += [] if value is None else [f"--{name}", str(value)]
    words += [] if with_prefill else ["--kv-present"]
    words += ["--steady"] if steady else []
    known = lamina_bench.ways(n, dops, shares, on_gpus=on_gpus)
    compared = _chosen(known, ways)
    not_chosen = [way.name for way in known if way not in compared]
    where = machine.describe()
    with progress() as on_progress:
        found = lamina_bench.measure(
            compared, words, way_s=way_s, caps=caps, not_chosen=not_chosen, on_progress=on_progress
        )
    record = {
        "model": config,
        "n_layers": layers,
        "dtype": dtype,
        "n_devices": n,
        "on_gpus": on_gpus,
        "dataset_name": dataset_name,
        "num_prompts": num_prompts,
        "max_num_seqs": max_num_seqs,
        "with_prefill": with_prefill,
        "steady": steady,
        "seed": seed,
    }
    parts = _parts(found, f"{config}, {dtype}, {num_prompts} requests of {dataset_name}, {n} devices")
    tell("lamina", record | found.to_dict(), where, parts, as_json=as_json)
    if not found.measured:
        raise typer.Exit(1)


def _chosen(compared: list[ComparedWay], ways: str | None) -> list[ComparedWay]:
    if ways is None:
        return compared
    words = [word.strip() for word in ways.split(";") if word.strip()]
    names = [way.name for way in compared]
    wrong = [word for word in words if not any(word in name for name in names)]
    if wrong or not words:
        what = "; ".join(wrong) or ways
        raise UserError(f"--ways: {what!r} is in none of the names: {'; '.join(names)}")
    return [way for way in compared if any(word in way.name for word in words)]


def _dop(text: str, n_devices: int) -> tuple[int, int]:
    a, b = model_options.parsed_dop(text)
    if a + b > n_devices:
        raise UserError(f"--dop {text} takes {a + b} devices, and there are {n_devices}")
    return a, b


def _parts(found: LaminaReport, title: str) -> Iterator[Part]:
    lacking = found.unsplit_not_measured
    columns: Columns = (
        ("way", lambda m: m.way, "<"),
        ("output tok/s", lambda m: m.output_per_s, ",.1f"),
        ("/ best unsplit measured" if lacking else "/ best unsplit", found.ratio, ".3f"),
        ("batch", lambda m: m.batch, ".1f"),
        ("most", lambda m: m.most_at_once, ""),
        ("KV slots", lambda m: m.kv_slots, ","),
        ("TBT p50, ms", lambda m: m.tbt_ms[0], ".1f"),
        ("p99", lambda m: m.tbt_ms[1], ".1f"),
        ("compiled in, s", lambda m: m.warm_up_s, ".0f"),
    )
    yield table(found.measured, columns, title=title)
    devices = [(m.way, *device) for m in found.measured for device in m.devices]
    if devices:
        of_devices: Columns = (
            ("way", lambda row: row[0], "<"),
            ("device", lambda row: row[1], "<"),
            *((what, lambda row, what=what: row[2][what], ".1%") for what in ("compute", "exchange", "idle")),
        )
        yield table(devices, of_devices, section=lambda row: row[0])
    yield dim(
        "batch: sequences that got a token, mean over steps; most: that ran at once; copies: sums, and the "
        "slowest one's times"
    )
    if lacking:
        yield warning(f"another unsplit way may be better: not measured are {'; '.join(lacking)}")
    yield from left_out(found.left_out)
