"""`jaxlamina plan`: which pools serve a model best for the money or with the devices at hand, and whether to
split at all.

Knows options and how plans look; `jaxlamina.planner` searches and says why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina.cli import model_options
from jaxlamina.errors import UserError
from jaxlamina.options import KV_RETURN_GB_S, NOTICE_S, START_S

if TYPE_CHECKING:
    from jaxlamina.planner.calibration import DeviceCalibration
    from jaxlamina.planner.question import Device, Question
    from jaxlamina.planner.reasons import Verdict
    from jaxlamina.planner.search import FoundPlans, PoolPlan

_MODEL, _TRACE = "llama-3-8b", "azure-conversation"


def plan(
    command: typer.Context,
    model: Annotated[
        str, typer.Option(help="A name in configs/models, or a .toml or config.json file.")
    ] = _MODEL,
    trace: model_options.TraceName = _TRACE,
    compute: Annotated[
        str | None, typer.Option(help="The device of model workers: a name in configs/hardware or a .toml.")
    ] = None,
    memory: model_options.MemoryDevice = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Dollars an hour at most; the best plan has most tokens for a dollar."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="What there is, such as h100=2,h20=4; of two kinds the one with more FLOP for a byte "
            "computes. The best plan has most tokens a second."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A file of `bench calibrate`: its device's terms, and those that others without one are "
            "scaled from."
        ),
    ] = None,
    slo: Annotated[str | None, typer.Option(help="tpot=MS: the 99th percentile of TPOT at most.")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=USD", help="Of one for an hour, in place of the file's; may be repeated."
        ),
    ] = None,
    link_gb_s: model_options.LinkGbS = None,
    link_us: model_options.LinkUs = None,
    context: Annotated[
        float | None, typer.Option(help="Mean tokens of a live request, in place of the trace's.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Requests at once, at most.")] = None,
    with_prefill: Annotated[
        bool, typer.Option("--with-prefill", help="Prompts take time, of model or prefill workers.")
    ] = False,
    as_run: model_options.AsRun = False,
    mtbf_hours: model_options.MtbfHours = None,
    notice_s: model_options.NoticeS = NOTICE_S,
    start_s: model_options.StartS = START_S,
    kv_return_gb_s: model_options.KvReturnGbS = KV_RETURN_GB_S,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Also run the trace's requests through the engine's scheduler on each plan that is shown; a "
            "minute for large batches.",
        ),
    ] = False,
    what_if: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--what-if",
            metavar="VARIABLE FILE",
            help="Draw the border: price, link, context, batch or ratio, into a .svg, .png or .pdf.",
        ),
    ] = None,
    pareto: Annotated[
        Path | None, typer.Option(help="Draw what each TPOT costs: a .svg, .png or .pdf.")
    ] = None,
    toml: Annotated[
        Path | None,
        typer.Option(
            help="Write the best split plan, or without any the best unsplit one, as a cluster file for "
            "launch --config."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout, no tables.")] = False,
) -> None:
    """Say whether to split, and how: pools, parallelism, partition, batch, and what they give beside unsplit
    devices. Without options it plans for this machine."""
    from jaxlamina.console.figures import check_figure
    from jaxlamina.console.outputs import check_apart, check_output
    from jaxlamina.models.config_files import model_config
    from jaxlamina.planner import inputs, sweeps
    from jaxlamina.planner.calibration import DeviceCalibration
    from jaxlamina.planner.failures import FailureRate
    from jaxlamina.planner.question import Question

    check_figure(pareto, "--pareto")
    if what_if is not None:
        if what_if[0] not in sweeps.VARIABLES:
            raise UserError(f"--what-if {what_if[0]!r} must be one of {', '.join(sweeps.VARIABLES)}")
        check_figure(what_if[1], "--what-if")
    check_output(toml, "--toml")
    check_apart({"--what-if": what_if and what_if[1], "--pareto": pareto, "--toml": toml})
    model_options.check_of_failures(command, mtbf_hours)
    if budget is not None and not 0 < budget <= 1e6:
        raise UserError(f"--budget {budget:g} must be dollars an hour, above 0 and up to 1,000,000")
    if memory is not None and compute is None:
        raise UserError("--memory needs --compute, the other pool's device")
    if devices is not None and compute is not None:
        raise UserError("--devices names both pools' devices: leave out --compute and --memory")
    if compute is not None and budget is None:
        raise UserError("say --budget, dollars an hour; or what there is, by --devices")
    if compute is None and budget is not None and devices is None:
        raise UserError("--budget needs --compute and --memory, what it is to be spent on")
    # What is wrong whatever there is to plan for is said before devices are looked at.
    name = inputs.model_name(model)
    config, work = model_config(name), inputs.workload(trace, context)
    slo_s = None if slo is None else inputs.slo_s(slo)
    given = inputs.prices(price or [])
    own = None if calibration is None else DeviceCalibration.load(calibration)
    inputs.check_link(link_gb_s, link_us)
    failures = None if mtbf_hours is None else FailureRate(mtbf_hours, notice_s, start_s, kv_return_gb_s)
    is_here = compute is None and devices is None
    if is_here:
        of_a_plan = {"--toml": toml, "--what-if": what_if, "--pareto": pareto, "--simulate": simulate or None}
        asked = [option for option, value in of_a_plan.items() if value is not None]
        devices = _of_this_machine(asked, as_json)
        if devices is None:
            return
    pools = _pools(compute, memory, devices, _Known(given, own))
    both = pools.compute, pools.memory or pools.compute
    same_host = is_here or (
        pools.counts is not None and inputs.in_one_host(*both, sum(pools.counts.values()))
    )
    linked = inputs.link_between(*both, link_gb_s, link_us, same_host)
    question = Question(
        config,
        work,
        pools.compute,
        pools.memory,
        linked.link,
        budget_usd_h=budget,
        counts=pools.counts,
        slo_s=slo_s,
        most_requests=batch,
        with_prefill=with_prefill,
        failures=failures,
        as_run=as_run,
    )
    notes = [inputs.terms_note(*both), linked.note]
    _answer(question, _Asked(name, what_if, pareto, toml, trace if simulate else None, as_json), notes)


@dataclass(frozen=True)
class _Pools:
    compute: Device
    memory: Device | None
    counts: dict[str, int] | None = None


@dataclass(frozen=True)
class _Asked:
    """What is to be made of the answer. ``simulated``: the trace that plans are simulated with, if any."""

    model: str
    what_if: tuple[str, Path] | None
    pareto: Path | None
    toml: Path | None
    simulated: str | None
    as_json: bool


@dataclass(frozen=True)
class _Known:
    """What a user knows of devices: prices by name, and a calibration."""

    usd_h: dict[str, float]
    calibration: DeviceCalibration | None

    def devices(self, names: Sequence[str]) -> list[Device]:
        from jaxlamina.planner import inputs

        if strange := sorted(self.usd_h.keys() - names):
            raise UserError(
                f"--price {strange[0]}: there is no such device in the question; has {', '.join(names)}"
            )
        found = [inputs.device(name, self.usd_h.get(name), self.calibration) for name in names]
        by_name: dict[str, Device] = {}
        for name, device in zip(names, found, strict=True):
            if by_name.setdefault(device.name, device) != device:
                raise UserError(f"{name} describes another {device.name!r}: give its file another name = …")
        return found


def _pools(compute: str | None, memory: str | None, devices: str | None, known: _Known) -> _Pools:
    from jaxlamina.planner import inputs

    if devices is None:
        assert compute is not None
        one, other = known.devices([inputs.known(name) for name in (compute, memory or compute)])
        return _Pools(one, other)
    counts = inputs.counts(devices)
    if len(counts) > 2:
        raise UserError(f"--devices {devices!r} has {len(counts)} kinds of device, and there are two pools")
    found = list(zip(known.devices(list(counts)), counts.values(), strict=True))
    found.sort(key=lambda pair: -pair[0].terms.hardware.rates().ridge)
    by_name = {device.name: n for device, n in found}
    if len(by_name) < len(found):  # by its name and by a file
        raise UserError(
            f"--devices {devices!r} names {found[0][0].name} twice: say how many there are in all"
        )
    alone = sum(by_name.values()) == 1
    return _Pools(found[0][0], None if alone else found[-1][0], by_name)


def _of_this_machine(asked: Sequence[str], as_json: bool) -> str | None:
    """As --devices would say it; None where there is nothing to search, which is said. ``asked``: options
    that are of a plan."""
    from jaxlamina.cli import examine
    from jaxlamina.planner import inputs

    found, trouble = examine.jax_devices()
    if found is None:
        raise UserError(f"JAX cannot start ({trouble}): say --devices, or run: jaxlamina doctor")
    kinds = [one["kind"] for one in found if one["platform"] != "cpu"]
    if not kinds:
        name_them = "say --compute, --memory and --budget, or --devices"
        if asked:
            raise UserError(
                f"{asked[0]} is of a plan, and this machine has no accelerator to plan for: {name_them}"
            )
        line = (
            "don't split (one device): this machine has no accelerator, and both pools would be the same "
            f"cores and the same memory; for other machines {name_them}"
        )
        print(json.dumps({"splits": False, "reason": "one device", "line": line}) if as_json else line)
        return None
    names: dict[str, int] = {}
    for kind in kinds:
        name = inputs.matching(kind)
        if name is None:
            raise UserError(
                f"this machine's {kind!r} is not in configs/hardware: write a .toml of it "
                f"(docs/reproduce.md), and give it as --devices FILE.toml={len(kinds)}"
            )
        names[name] = names.get(name, 0) + 1
    return ",".join(f"{name}={n}" for name, n in names.items())


def _beyond_the_model(question: Question) -> list[str]:
    longest, mean = question.config.max_position_embeddings, question.workload.context
    said = f"the model is made for {longest:,} tokens, and a live request has {mean:,.0f} in the mean"
    return [f"{said}: priced all the same"] if mean > longest else []


def _answer(question: Question, asked: _Asked, notes: list[str]) -> None:
    from jaxlamina.planner import figures, sweeps
    from jaxlamina.planner.reasons import verdict
    from jaxlamina.planner.search import search

    found = search(question)
    said, beyond = verdict(found), _beyond_the_model(question)
    notes = [*notes, *beyond]
    what = f"{asked.model}, {question.workload.name} ({question.workload.context:,.0f} tokens a live request)"
    wrote = []
    drawings = [] if asked.what_if is None else [(sweeps.sweep(question, asked.what_if[0]), asked.what_if[1])]
    drawings += [] if asked.pareto is None else [(sweeps.pareto(question), asked.pareto)]
    for drawn, path in drawings:
        figures.draw_sweep(drawn, what, _source(notes), path)
        wrote.append(path)
    if asked.toml is not None:
        _write_toml(asked.toml, found, asked.model, "; ".join([said.line, *beyond]))
        wrote.append(asked.toml)
    plans = [_numbers(question, plan) for plan in _shown(found)]
    if asked.simulated is not None:
        notes = [*notes, _simulate(found, plans, asked.simulated)]
    if asked.as_json:
        print(json.dumps(_as_dict(found, said, asked.model, notes, [drawn for drawn, _ in drawings], plans)))
    else:
        _show(said, what, notes, [drawn for drawn, _ in drawings], plans)
    from rich.console import Console

    for path in wrote:
        Console(stderr=True).print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def _source(notes: list[str]) -> str:
    return "Calculated: " + "; ".join(notes)


def _write_toml(path: Path, found: FoundPlans, model: str, line: str) -> None:
    from jaxlamina.planner.cluster_file import cluster_toml

    try:
        best, *_ = found.split or found.whole  # one of them is not empty: a search without plans has raised
        path.write_text(cluster_toml(best, model, line), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _shown(found: FoundPlans) -> list[PoolPlan]:
    """The three best split plans of different pools, and the two best unsplit ones of different devices."""
    split: dict[Any, PoolPlan] = {}
    for plan in found.split:
        split.setdefault((plan.setup.n_model, plan.setup.n_attention, plan.copies), plan)
    return [*list(split.values())[:3], *list(found.whole_by_device.values())[:2]]


def _simulate(found: FoundPlans, numbers: list[dict[str, Any]], trace: str) -> str:
    """Adds to each shown plan's ``numbers`` what the simulator gives; whether their order is another one
    then, in a line."""
    from jaxlamina.planner import traces
    from jaxlamina.simulator.plans import simulated

    question, scores = found.question, []
    for plan, its in zip(_shown(found), numbers, strict=True):
        context = question.workload.context
        run = simulated(plan, traces.named(trace), context, question.with_prefill, question.slo_s)
        if run is None:
            continue
        its["simulated"] = {
            "tokens_s": run.tokens_s,
            "tpot_p50_ms": 1e3 * run.tpot_p50_s,
            "tpot_p99_ms": 1e3 * run.tpot_p99_s,
            "mean_batch": run.mean_batch,
        }
        score = plan.score(question)
        scores.append((score, score * run.tokens_s / plan.tokens_s, its["plan"]))
    by_formula, by_run = (sorted(scores, key=lambda one: -one[i]) for i in (0, 1))
    if by_formula == by_run:
        return f"simulated: the order of these {len(scores)} plans stays as it is"
    return f"simulated: the order of these plans changes: {' > '.join(name for _, _, name in by_run)}"


def _as_dict(
    found: FoundPlans,
    said: Verdict,
    model: str,
    notes: list[str],
    drawn: list[Any],
    plans: list[dict[str, Any]],
) -> dict[str, Any]:
    question = found.question
    return {
        "model": model,
        "workload": question.workload.name,
        "context": question.workload.context,
        "splits": said.splits,
        "reason": said.reason,
        "line": said.line,
        "gain": found.gain if found.whole else None,
        "plans": plans,
        "notes": notes,
        "sweeps": [
            {"variable": one.variable, "unit": one.unit, "borders": one.borders, "points": one.points}
            for one in drawn
        ],
    }


def _numbers(question: Question, plan: PoolPlan) -> dict[str, Any]:
    from jaxlamina.planner.search import describe, least_link_bytes_s

    setup, is_split = plan.setup, plan.setup.is_split
    return {
        "plan": describe(plan),
        "split": is_split,
        "scaled_terms": [one.hardware.name for one in setup.terms if one.scaled_from is not None],
        "copies": plan.copies,
        "dop": [setup.n_model, setup.n_attention],
        "tensor_parallel": setup.tensor_parallel,
        "replicas": setup.n_replicas,
        "partition": setup.partition if is_split else None,
        "local_share": setup.local_share if is_split else None,
        "n_batches": setup.n_batches,
        "prefill_workers": plan.n_prefill,
        "requests": plan.n_rows,
        "kv_tokens": plan.n_slots,
        "step_ms": 1e3 * plan.cost.step_s,
        "model_ms": 1e3 * plan.cost.model_busy_s,
        "attention_ms": 1e3 * plan.cost.attention_busy_s,
        "exchange_ms": 1e3 * plan.cost.exchange_s,
        "model_idle": plan.model_idle,
        "attention_idle": plan.attention_idle if is_split else None,
        "tpot_p50_ms": 1e3 * plan.tpot_p50_s,
        "tpot_p99_ms": 1e3 * plan.tpot_p99_s,
        "available": None if question.failures is None else plan.available,
        "tokens_s": plan.tokens_s,
        "usd_h": plan.usd_h,
        "tokens_per_usd": plan.tokens_per_usd,
        "least_link_gb_s": least_link_bytes_s(question, plan) / 1e9 if is_split else None,
    }


# Key, its name in the table, and how a number is written.
_ROWS = (
    ("scaled_terms", "not measured, scaled", "{}"),
    ("copies", "copies", "{:,}"),
    ("tensor_parallel", "weights shared out over", "{:,}"),
    ("replicas", "copies of weights in one", "{:,}"),
    ("partition", "partition", "{}"),
    ("local_share", "attention kept on model workers", "{:.0%}"),
    ("n_batches", "staggered batches", "{:,}"),
    ("prefill_workers", "prefill workers", "{:,}"),
    ("requests", "requests at once, of one", "{:,}"),
    ("kv_tokens", "tokens of KV, of one", "{:,}"),
    ("step_ms", "a step, ms", "{:.1f}"),
    ("model_ms", "  model workers busy, ms", "{:.1f}"),
    ("attention_ms", "  attention workers busy, ms", "{:.1f}"),
    ("exchange_ms", "  exchanges, ms", "{:.1f}"),
    ("model_idle", "  model workers idle", "{:.0%}"),
    ("attention_idle", "  attention workers idle", "{:.0%}"),
    ("tpot_p50_ms", "TPOT, median, ms", "{:.1f}"),
    ("tpot_p99_ms", "TPOT, 99th percentile, ms", "{:.1f}"),
    ("available", "availability", "{:.2%}"),
    ("tokens_s", "tokens a second, of all", "{:,.0f}"),
    ("simulated tpot_p50_ms", "simulated: TPOT, median, ms", "{:.1f}"),
    ("simulated tpot_p99_ms", "simulated: TPOT, 99th percentile, ms", "{:.1f}"),
    ("simulated tokens_s", "simulated: tokens a second, of all", "{:,.0f}"),
    ("usd_h", "$ an hour, of all", "{:.2f}"),
    ("tokens_per_usd", "tokens for a $", "{:,.0f}"),
    ("least_link_gb_s", "least link for 95 % of it, GB/s", "{:.1f}"),
)


def _show(said: Verdict, what: str, notes: list[str], drawn: list[Any], plans: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from jaxlamina.console.tables import print_table

    out: Any = Console()
    has_failures = any(numbers["available"] is not None for numbers in plans)
    was_simulated = any("simulated" in numbers for numbers in plans)
    for numbers in plans:
        numbers["scaled_terms"] = ", ".join(numbers["scaled_terms"]) or None
        numbers |= {f"simulated {key}": value for key, value in numbers.get("simulated", {}).items()}
    table = Table(title=what, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for numbers in plans:
        table.add_column(numbers["plan"], justify="right")
    for key, name, form in _ROWS:
        if (key.startswith("simulated") and not was_simulated) or (key == "available" and not has_failures):
            continue
        values = [numbers.get(key) for numbers in plans]
        cells = ["–" if value is None else form.format(value) for value in values]
        table.add_row(name, *cells)
    print_table(out, table)
    for note in notes:
        out.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    for one in drawn:
        borders = ", ".join(f"{x:.3g}" for x in one.borders) or "none in this range"
        out.print(f"border by {one.variable}: {borders}", highlight=False, markup=False, soft_wrap=True)
    out.print(said.line, style="bold", highlight=False, markup=False, soft_wrap=True)
