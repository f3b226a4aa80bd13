"""`bench lamina`: what is compared, what jobs come to, and a run of real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benches import bench, refused
from hypothesis import given
from hypothesis import strategies as st
from test_models import MODELS
from typer.testing import CliRunner

from jaxlamina import LLM, SamplingParams
from jaxlamina.bench import lamina_bench, lamina_cli, machine
from jaxlamina.bench.cli import app
from jaxlamina.bench.compared_jobs import EndedJob
from jaxlamina.bench.kv_present import KvPresent
from jaxlamina.bench.lamina_bench import ComparedJob, ComparedWay, LaminaReport, combined, measure, ways
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.weights.sources import InMemoryModel


def test_what_is_compared_on_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = {way.name: way.jobs for way in ways(4, [(1, 3), (2, 2)], ["0", "auto"], on_gpus=True)}
    gpus = {name: [job.environment["CUDA_VISIBLE_DEVICES"] for job in jobs] for name, jobs in found.items()}
    assert gpus == {
        "unsplit, 4 copies": ["4", "5", "6", "7"],
        "unsplit, tensor parallel over 2, 2 copies": ["4,5", "6,7"],
        "unsplit, DOP (2, 0), 2 copies": ["4,5", "6,7"],
        "unsplit, tensor parallel over 4": ["4,5,6,7"],
        "unsplit, DOP (4, 0)": ["4,5,6,7"],
        "DOP (1, 3), Lamina": ["4,5,6,7"],
        "DOP (1, 3), local attention auto": ["4,5,6,7"],
        "DOP (2, 2), Lamina": ["4,5,6,7"],
        "DOP (2, 2), local attention auto": ["4,5,6,7"],
    }
    assert found["unsplit, tensor parallel over 2, 2 copies"][1].words == (
        "bench", "throughput", "--no-split", "--part", "1/2", "--tensor-parallel", "2",
    )  # fmt: skip
    over_ranks = found["unsplit, DOP (2, 0), 2 copies"][1].words
    assert {"2,0", "tensor_parallel=2"} <= {*over_ranks} and "--no-split" not in over_ranks
    assert over_ranks[-5:] == ("--", "bench", "throughput", "--part", "1/2")
    [shared] = found["DOP (2, 2), Lamina"]
    assert "tensor_parallel=2" in shared.words and shared.words[-3:] == ("--", "bench", "throughput")
    [sharing] = found["DOP (2, 2), local attention auto"]  # by heads there is a share on shards
    assert {"tensor_parallel=2", 'partition="heads"'} <= {*sharing.words}
    assert 'partition="heads"' not in shared.words


@given(st.integers(2, 12), st.booleans())
def test_each_way_has_all_devices_once(n: int, on_gpus: bool) -> None:
    for way in ways(n, [(1, n - 1)], ["0"], on_gpus=on_gpus):
        if on_gpus:
            used = [gpu for job in way.jobs for gpu in job.environment["CUDA_VISIBLE_DEVICES"].split(",")]
            n_idle = int(way.name.split(", ")[-1].split()[0]) if way.name.endswith("idle") else 0
            assert len(used) == len(set(used)) == n - n_idle and n_idle < n / 2
        parts = [job.words[job.words.index("--part") + 1] for job in way.jobs if "--part" in job.words]
        assert parts in ([], [f"{i}/{len(way.jobs)}" for i in range(len(way.jobs))])


def test_three_gpus_are_compared_with_two_that_share_the_weights() -> None:
    names = [way.name for way in ways(3, [], [], on_gpus=True)]
    of_two = "unsplit, tensor parallel over 2, 1 idle"
    of_three = "unsplit, tensor parallel over 3", "unsplit, DOP (3, 0)"
    assert names == ["unsplit, 3 copies", of_two, "unsplit, DOP (2, 0), 1 idle", *of_three]


def record(rate: float, tbt: tuple[float, float]) -> dict:
    run = {"output_per_s": rate, "batch": 3.0, "most_at_once": 4, "tbt_ms": tbt}
    slower = run | {"output_per_s": rate / 2}
    return {
        "results": {"ours": [slower, run, run]},
        "kv_slots": 100,
        "warm_up_s": rate,
        "under_load": None,
    }


def test_copies_come_to_their_sum_and_the_slowest_ones_times() -> None:
    found = combined("unsplit, 2 copies", [record(10.0, (5.0, 9.0)), record(30.0, (4.0, 12.0))])
    assert (found.output_per_s, found.batch, found.most_at_once, found.kv_slots) == (40.0, 6.0, 8, 200)
    assert found.tbt_ms == (5.0, 12.0) and found.warm_up_s == 30.0
    report = LaminaReport([found, combined("DOP (1, 1), Lamina", [record(20.0, (1.0, 1.0))])])
    assert [report.ratio(m) for m in report.measured] == [1.0, 0.5]
    assert LaminaReport(report.measured[1:]).ratio(found) is None


def test_a_job_that_fails_or_is_late_is_left_out_with_its_reason() -> None:
    wrong = ComparedWay("wrong", (ComparedJob(("bench", "throughput", "--part", "3/2")),))
    found = measure([wrong], ["--num-prompts", "4"], way_s=120)
    assert "--part '3/2' must be I/N" in found.left_out["wrong"] and not found.measured
    late = measure(
        [ComparedWay("late", (ComparedJob(("bench", "throughput")),))], ["--num-prompts", "4"], way_s=0.1
    )
    assert late.left_out == {"late": "not done within 0.1 s"}


def test_copies_share_out_what_is_at_once_and_an_interrupted_run_tells_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[dict[str, str]]] = []

    def ended(jobs, within_s):
        options = [job.words[job.words.index("--max-num-seqs") :] for job in jobs]
        asked.append([dict(zip(of[::2], of[1::2], strict=False)) for of in options])
        if len(asked) == 3:
            raise KeyboardInterrupt
        yield from (EndedJob(0, json.dumps(record(10.0, (5.0, 9.0))), "") for _ in jobs)

    monkeypatch.setattr(lamina_bench, "run_at_once", ended)
    known = ways(4, [(1, 3)], ["0"], on_gpus=False)
    chosen = [known[0], known[1], known[2], known[-1]]
    found = measure(
        chosen,
        ["--rounds", "1"],
        way_s=9,
        caps={"--max-num-seqs": 1023, "--kv-slots": 4000},
        not_chosen=[way.name for way in known if way not in chosen],
    )
    assert [len(of) for of in asked] == [4, 2, 2], "jobs of a way"
    assert all((of["--max-num-seqs"], of["--kv-slots"]) == ("255", "1000") for of in asked[0])
    assert all((of["--max-num-seqs"], of["--kv-slots"]) == ("511", "2000") for of in asked[1])
    assert [m.way for m in found.measured] == [way.name for way in known[:2]]
    assert found.left_out == {way.name: "interrupted" for way in chosen[2:]}
    assert found.unsplit_not_measured == [way.name for way in known[3:5]] + [known[2].name]
    shown = [str(part) for part in lamina_cli._parts(found, "t")]
    assert f"another unsplit way may be better: not measured are {known[3].name}; " in "\n".join(shown)


def test_the_machine_is_looked_at_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nothing could be measured that is no success."""
    done: list[str] = []
    describe = machine.describe
    monkeypatch.setattr(machine, "describe", lambda *of: done.append("machine") or describe(*of))
    monkeypatch.setattr(lamina_bench, "measure", lambda *of, **how: done.append("measured") or LaminaReport())
    ended = CliRunner().invoke(app, ["lamina", "--gpus", "2"])
    assert done == ["machine", "measured"] and ended.exit_code == 1
    assert '"bench": "lamina"' in ended.stdout


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--dop", "2"], "must be model workers, attention workers"),
        (["--gpus", "2", "--dop", "1,2"], "takes 3 devices, and there are 2"),
        (["--dataset-name", "sonnet"], "must be one of"),
        (
            ["--gpus", "2", "--ways", "DOP (1, 2); copy"],
            "'DOP (1, 2); copy' is in none of the names: unsplit, 2 copies; unsplit, tensor",
        ),
        (["--gpus", "2", "--ways", "copies;typo"], "--ways: 'typo' is in none of the names"),
        (["--gpus", "2", "--ways", ""], "--ways: '' is in none of the names"),
        (["--gpus", "2", "--dtype", "float31"], "dtype='float31' must be one of"),
        (["--gpus", "2", "--local-attention", "nope,0.5"], "--local-attention 'nope,0.5' must be shares"),
        (["--gpus", "4", "--max-num-seqs", "3"], "--max-num-seqs 3: 4 copies share it out"),
    ],
)
def test_what_cannot_be_compared_is_one_line(options: list[str], what: str) -> None:
    assert what in refused("lamina", *options)


@pytest.mark.parametrize("seconds", ["inf", "1e9", "nan"])
def test_seconds_of_a_way_have_a_bound(seconds: str) -> None:
    ended = CliRunner().invoke(app, ["lamina", "--gpus", "2", "--way-s", seconds])
    assert ended.exit_code == 2 and "Invalid value for '--way-s'" in ended.output


@pytest.mark.parametrize("split", [True, False])
def test_prompts_take_their_slots_and_no_time(split: bool) -> None:
    """Rows decode over as many stored tokens as they would, through the engine's own scheduling."""
    config = ModelConfig.from_hf(MODELS["llama"])
    llm = LLM(
        InMemoryModel(config, random_params(config, seed=1)),
        split=split,
        max_num_seqs=2,
        max_model_len=64,
        max_num_batched_tokens=128,
        mixed_steps=False,
        prefix_caching=False,
    )
    ran: list[tuple[int, list[int]]] = []
    inner = llm.engine.executor
    llm.engine.executor = wrapped = KvPresent(inner, config.vocab_size)
    run = inner.run

    def noting(step):  # type: ignore[no-untyped-def]
        assert not step.prompts
        ran.append((len(step.decodes.tokens), sorted(np.asarray(step.decodes.lengths).tolist())))
        return run(step)

    inner.run = noting  # type: ignore[method-assign]
    asked = [{"prompt_token_ids": [1] * n} for n in (30, 11, 20)]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (5, 9, 3)]
    found = llm.generate(asked, params, use_tqdm=False)
    assert [len(output.token_ids) for output in found] == [5, 9, 3] and wrapped.inner is inner
    assert ran[0] == (2, [11, 30]) and max(max(lengths) for _, lengths in ran) == 33


@pytest.mark.slow
def test_pools_beside_copies_and_tensor_parallelism(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["llama"] | {"max_position_embeddings": 512, "vocab_size": 64}))
    options = ["--config", str(path), "--dtype", "float32", "--gpus", "2", "--num-prompts", "8"]
    options += ["--max-num-seqs", "4", "--max-model-len", "500", "--rounds", "1", "--profile-s", "0.2"]
    options += ["--to-the-end"]
    found, shown = bench("lamina", *options, "--local-attention", "0,0.5")
    assert not found["left_out"]
    assert [row["way"] for row in found["results"]] == [
        "unsplit, 2 copies",
        "unsplit, tensor parallel over 2",
        "unsplit, DOP (2, 0)",
        "DOP (1, 1), Lamina",
        "DOP (1, 1), local attention 0.5",
    ]
    n_requests = [[job["num_prompts"] for job in jobs] for jobs in found["jobs"].values()]
    assert n_requests == [[4, 4], [8], [8], [8], [8]]
    n_output = {sum(job["results"]["ours"][0]["n_output"] for job in jobs) for jobs in found["jobs"].values()}
    assert len(n_output) == 1  # the same requests in each way
    at_once = [[job["max_num_seqs"] for job in jobs] for jobs in found["jobs"].values()]
    assert at_once == [[2, 2], [4], [4], [4], [4]]
    for row in found["results"]:
        assert row["output_per_s"] > 0 and 0 < row["tbt_ms"][0] <= row["tbt_ms"][1] and row["devices"]
    assert max(row["ratio_to_unsplit"] for row in found["results"][:3]) == 1 and "exchange" in shown
    chosen, _ = bench("lamina", *options, "--ways", "tensor parallel; (2, 0)")
    assert [row["way"] for row in chosen["results"]] == [
        "unsplit, tensor parallel over 2",
        "unsplit, DOP (2, 0)",
    ]
