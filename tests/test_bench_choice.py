"""`bench choice`: which plans are measured and by which jobs, what is said of them, and a run of real jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benches import bench, refused
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.bench import choice_bench, choice_cli, machine, step_ways
from jaxlamina.bench.choice_bench import Candidate, ChoiceCase, InstanceJob, case_of, jobs_of, waves
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.models.config_files import model_config
from jaxlamina.planner import inputs
from jaxlamina.planner.question import Question

H200 = inputs.device("h200")


def question(model: str = "llama-3-8b", n: int = 4, trace: str = "azure-conversation", **more) -> Question:
    link = inputs.link_between(H200, H200, same_host=True).link
    load = inputs.workload(trace)
    return Question(model_config(model), load, H200, H200, link, counts={H200.name: n}, as_run=True, **more)


def test_all_unsplit_plans_and_the_best_split_ones_are_candidates() -> None:
    case = case_of("8B", question(), n_split=2)
    whole = [one.setup for one in case.candidates if not one.setup.is_split]
    assert sorted(setup.tensor_parallel for setup in whole) == [1, 2, 4]
    split = [one.setup for one in case.candidates if one.setup.is_split]
    assert len({(s.n_model, s.n_attention, s.tensor_parallel) for s in split}) == len(split) == 2
    tokens = [one.predicted_tokens_s for one in case.candidates]
    assert tokens == sorted(tokens, reverse=True) and case.chosen is case.candidates[0]
    assert all(one.step.batch % one.setup.n_batches == 0 for one in case.candidates)
    near = case_of("8B", question(), n_split=2, within=0.0)
    assert near.candidates == case.candidates[:2], "the first choice has something to be compared with"


def test_sums_cost_what_they_do_as_it_is_run() -> None:
    of_xla = case_of("8B", question(), 0).candidates
    at_best = case_of("8B", replace(question(), as_run=False), 0).candidates
    slower = {one.setup.tensor_parallel: one.predicted_ms / one.step.batch for one in of_xla}
    for one in at_best:
        n = one.setup.tensor_parallel
        assert (n == 1) == (slower[n] == one.predicted_ms / one.step.batch)


def test_a_candidate_is_the_way_that_its_job_measures() -> None:
    """By the names that `bench step` gives its ways."""
    seen = set()
    for model, trace in (
        ("llama-3-8b", "azure-code"),
        ("llama-33b", "kimi-conversation"),
        ("llama-3-70b", "azure-code"),
    ):
        for one in case_of(model, question(model, trace=trace), n_split=4).candidates:
            jobs, setup, n = jobs_of(one.setup, on_gpus=True), one.setup, one.setup.tensor_parallel
            if not setup.is_split:
                assert all(job.n_devices == n for job in jobs.values())
                in_process, *over_ranks = jobs
                assert not jobs[in_process].launch and len(over_ranks) == (n > 1)
                for name in over_ranks:
                    assert jobs[name].launch[:3] == ("launch", "--dop", f"{n},0")
                    asked = step_ways.StepOptions([], None, 1, unsplit=False)
                    cluster = Cluster(dop=(n, 0), tensor_parallel=n)
                    assert [name] == [way for way, _ in step_ways.layouts(asked, cluster, [8])]
                seen.add("whole")
                continue
            [(name_of_way, job)] = jobs.items()
            options = dict(zip(job.options[::2], job.options[1::2], strict=False))
            assert job.n_devices == setup.n_model + setup.n_attention
            assert job.launch[:3] == ("launch", "--dop", f"{setup.n_model},{setup.n_attention}")
            assert (f"tensor_parallel={setup.tensor_parallel}" in job.launch) == (setup.tensor_parallel > 1)
            asked = step_ways.StepOptions(
                [], None, 1, local_attention=step_ways.shares_of(str(setup.local_share)),
                partitions=[setup.partition], staggered=[setup.n_batches] if setup.n_batches > 1 else [],
            )  # fmt: skip
            assert "--no-unsplit" in job.options and f"{setup.local_share}" in job.options, options
            cluster = Cluster(dop=(setup.n_model, setup.n_attention), tensor_parallel=setup.tensor_parallel)
            heads = [setup.config.num_key_value_heads]
            names = [
                way.name
                for name, _ in step_ways.layouts(asked, cluster, heads)
                for way in step_ways.ways_of(name, asked)
            ]
            assert name_of_way in names
            seen.add(setup.partition)
    assert seen == {"whole", "heads", "tokens"}


def made(name: str, copies: int, n_rows: int, predicted: float, measured: float | None) -> Candidate:
    setup = case_of("8B", question(), 0).candidates[0].setup
    ways = {} if measured is None else {"slower": 2 * measured, "faster": measured}
    return Candidate(name, setup, copies, step_ways.StepCase(n_rows, 100), predicted, ways)


def test_what_is_said_of_a_choice() -> None:
    chosen, other = made("a", 4, 10, 10.0, 12.5), made("b", 1, 40, 11.0, 10.0)
    case = ChoiceCase("x", None, [chosen, other, made("c", 1, 1, 99.0, None)])
    assert case.best is other and case.loss == pytest.approx(0.2) and not case.agrees
    assert chosen.error == pytest.approx(-0.2) and chosen.measured_tokens_s == pytest.approx(3200)
    close = ChoiceCase("y", None, [made("a", 4, 10, 10.0, 10.2), other])
    assert close.agrees and close.loss == pytest.approx(1 - 10 / 10.2)
    for measured in ((None, 10.0), (10.0, None)):
        pair = [made("a", 4, 10, 10.0, measured[0]), made("b", 1, 40, 11.0, measured[1])]
        lacking = ChoiceCase("z", None, pair)
        assert lacking.loss is None and not lacking.agrees and not lacking.is_counted, "nothing was compared"


def test_a_plan_above_the_limit_is_no_best_one_and_agrees_with_nothing() -> None:
    late, slow = made("late", 1, 400, 11.8, 16.0), made("slow", 4, 64, 9.4, 9.5)
    case = ChoiceCase("x", 0.012, [late, slow])
    assert case.best is slow and case.loss is None and case.is_counted and not case.agrees
    case = ChoiceCase("y", 0.012, [slow, late])
    assert case.best is slow and case.loss == 0 and case.agrees, "more tokens, too late"
    none = ChoiceCase("z", 0.009, [slow, late])
    assert none.best is None and none.is_counted and not none.agrees


def test_what_is_not_counted_says_why() -> None:
    chosen, alone = made("a", 4, 10, 10.0, None), made("a", 4, 10, 10.0, 12.0)
    others = [made("b", 1, 40, 11.0, 10.0)], [made("b", 1, 40, 11.0, None)]
    late = made("c", 4, 10, 10.0, 50.0)
    cases = [
        ChoiceCase("x", None, [chosen, *others[0]]),
        ChoiceCase("y", None, [alone, *others[1]]),
        ChoiceCase("late", 0.012, [late, *others[0]]),
        ChoiceCase("all", 0.001, [late, *others[0]]),
    ]
    said = [str(part) for part in choice_cli._parts(choice_bench.ChoiceReport(cases), "t")]
    assert "late: the first choice, c, is above the limit, and b is not" in said
    assert "all: the first choice, c, is above the limit, as all are" in said
    assert "cases that are not counted: 1, of which their first choice was not measured" in said
    assert "cases that are not counted: 1, of which no other plan was measured" in said
    assert any("in 0 of 2 cases" in line for line in said)


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 4))
def test_every_job_runs_once_and_none_waits_for_devices_that_are_free(sizes: list[int], n: int) -> None:
    jobs = [InstanceJob(size, (), (str(i),)) for i, size in enumerate(sizes)]
    found = list(waves(jobs, n))
    assert sorted(job for wave in found for job in wave) == sorted(jobs)
    for i, wave in enumerate(found):
        used = sum(job.n_devices for job in wave)
        assert used <= n or len(wave) == 1
        later = [job.n_devices for after in found[i + 1 :] for job in after]
        assert not later or used + min(later) > n


def test_a_job_that_is_late_has_told_of_steps_on_the_way() -> None:
    """In the words in which `bench step` tells of them."""
    tell = f"{step_ways.StepCase(64, 2130)}, unsplit, 4 devices by weights: {50.1666:.2f} ms"
    said = f"weights\n{tell}\nB 7, 9 tokens: compiling unsplit, 4 devices by weights\n"
    [found] = choice_bench._so_far(said)
    assert found == {"case": "B 64, 2130 tokens", "way": "unsplit, 4 devices by weights", "ms": 50.17}
    assert found["case"] == str(step_ways.StepCase(64, 2130)), "by which candidates are looked for"


@pytest.mark.slow  # 15 s
def test_what_a_late_job_has_not_come_to_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    record, _ = bench(
        "choice", "--devices", "h200=2", "--config", "smollm2-135m", "--layers", "1", "--dtype", "float32",
        "--traces", "azure-code", "--batch", "4", "--way-s", "3", "--split-plans", "0",
        exit_code=1,
    )  # fmt: skip
    assert {why.partition(";")[0] for why in record["left_out"].values()} == {"not done within 3 s"}
    assert all(one["measured_ms"] is None for one in record["cases"][0]["candidates"])


def test_what_cannot_be_asked_is_refused_in_a_line() -> None:
    assert "of one kind" in refused("choice", "--devices", "h200=2,h20=2")
    assert "nothing to choose" in refused("choice", "--devices", "h200=1")
    said = refused("choice", "--devices", "h200=2", "--slos", "none,fast")
    assert "--slos none,fast: 'fast' must be a number of milliseconds above 0" in said
    layers = refused("choice", "--devices", "h200=2", "--layers", "40")
    assert "--layers 40: llama-3-8b has 32; say that or fewer" in layers


def test_of_tensor_parallelism_both_ways_are_shown_and_the_faster_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(cases, words, **how):
        for one in cases[0].candidates:
            for i, way in enumerate(choice_bench.jobs_of(one.setup, on_gpus=False)):
                one.ways_ms[way] = 20.0 - 5 * i
        return choice_bench.ChoiceReport(list(cases))

    monkeypatch.setattr(choice_bench, "measure", measured)
    record, shown = bench("choice", "--devices", "h200=2", "--config", "llama-3-8b", "--split-plans", "0")
    alone, shared = sorted(record["cases"][0]["candidates"], key=lambda one: len(one["ways_ms"]))
    assert alone["ways_ms"] == {"unsplit": 20.0} and alone["measured_ms"] == 20.0
    assert shared["ways_ms"] == {"unsplit, 2 devices by weights": 20.0, "unsplit over 2 ranks": 15.0}
    assert shared["measured_ms"] == 15.0 and "unsplit over 2 ranks" in shown


def test_a_case_of_one_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    describe = machine.describe
    monkeypatch.setattr(machine, "describe", lambda *of: done.append("machine") or describe(*of))

    def nothing(cases, words, **how):
        assert done == ["machine"], "its load average is that before the run"
        return choice_bench.ChoiceReport(list(cases), dict(how["left_out"]))

    monkeypatch.setattr(choice_bench, "measure", nothing)
    words = ["--devices", "h200=2", "--config", "llama-3-70b", "--split-plans", "0"]
    record, shown = bench("choice", *words, exit_code=1)
    assert record["cases"] == [] and "there is one plan" in record["left_out"]["azure-code"]
    assert "nothing to choose from" in record["left_out"]["azure-code"]
    assert "in 0 of 0 cases" in shown


@pytest.mark.parametrize(("n_split", "there"), [(0, "no unsplit plan"), (1, "one plan, 2 × NVIDIA H200 + 2")])
def test_that_split_plans_were_cut_off_is_said(n_split: int, there: str) -> None:
    """No unsplit plan meets the limit."""
    with pytest.raises(UserError, match=f"{there.replace('+', '.')}.*; --split-plans {n_split} leaves out"):
        case_of("33B", question("llama-33b", slo_s=0.012), n_split)


@pytest.mark.slow  # two jobs, 30 s
def test_real_jobs_fill_all_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one KV head, which nothing shares out: XLA's sums over a CPU's devices wait for each other for
    ever where several steps are ahead on two cores."""
    shape = {
        "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    record, shown = bench(
        "choice", "--devices", "h200=2", "--config", str(tmp_path / "config.json"), "--dtype", "float32",
        "--traces", "azure-conversation", "--slos", "none,30", "--batch", "4", "--rounds", "1", "--within", "1",
    )  # fmt: skip
    assert record["left_out"] == {}
    for case in record["cases"]:
        plans = [one["plan"] for one in case["candidates"]]
        assert len(plans) >= 3 and any("split" in p and "unsplit" not in p for p in plans)
        assert all(np.isfinite(one["measured_ms"]) and one["measured_ms"] > 0 for one in case["candidates"])
        best = max(case["candidates"], key=lambda one: one["measured_tokens_s"])
        assert case["best"] == best["plan"] and 0 <= case["loss"] < 1
    assert "of 2 cases" in shown
