"""Whole-step programs over real ranks on this machine: the tokens of the unsplit model, for each transport
and partition.

A job is started for each of them, by mpirun or as plain processes, and runs several scenarios (`rank_job`).
How ranks fail is in `test_launch_ranks`, how tensors travel in `test_transports`.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import DEADLINE_S, ROOT, TRANSPORTS, check_greedy, mpi, run_job, started

SMOLLM2 = "smollm2-135m-instruct"
SHAPES = [(1, "heads"), (2, "heads"), (2, "requests"), (2, "tokens"), (3, "requests"), (3, "tokens")]
USUAL = [(2, "heads")]  # the others are slow tests, but for some over one transport


def slow(transport: str, *values: object) -> object:
    marks = [pytest.mark.slow, *([pytest.mark.mpi] if transport == "mpi" else [])]
    return pytest.param(transport, *values, marks=marks)


@pytest.mark.parametrize(
    ("transport", "n_workers", "partition"),
    [
        *(("xla", *shape) if shape in USUAL else slow("xla", *shape) for shape in SHAPES),
        *(
            # One worker over MPI: test_prefill_workers; by requests: test_launch_ranks.
            mpi(*shape) if shape in USUAL else slow("mpi", *shape)
            for shape in SHAPES
        ),
    ],
)
def test_ranks_give_the_unsplit_models_tokens(transport: str, n_workers: int, partition: str) -> None:
    scenarios = [("greedy", {"model": "llama"})]
    if (
        transport == "xla"
    ):  # what differs between transports is in every step; the rest is seen over one of them
        scenarios += [("moves", {"model": "llama"})]
    if transport == "xla" and n_workers == 2:
        scenarios += [
            ("branches", {"model": "llama"}),
            ("greedy", {"model": "llama", "max_num_batched_tokens": 8}),
            ("greedy", {"model": "mistral-window", "n_tokens": 24}),
        ]
    in_one_call = n_workers == 2 and partition == "heads"
    if in_one_call:
        scenarios += [("short_prompts", {"model": "llama"})]
    found = run_job(transport, n_workers, scenarios, partition=partition)
    check_greedy(found[0])
    if in_one_call:
        assert any(name.startswith("chunk, batch 4, tokens 32") for name in found[-1]["programs"]), found[-1]
    for more in found[1:]:
        assert more["same"], more


@pytest.mark.parametrize(
    ("transport", "dop", "n_heads", "more"),
    [
        ("xla", (1, 2), 3, {}),
        slow("mpi", (1, 2), 3, {"n_batches": 2}),  # test_local_attention has heads shared so over MPI
        slow("xla", (1, 3), 5, {"n_batches": 2, "q_first": False}),
        slow("xla", (2, 2), 3, {"n_batches": 3}),
        slow("xla", (2, 3), 8, {"tensor_parallel": 2}),
        slow("xla", (2, 2), 3, {"pipeline_parallel": 2}),
        slow("xla", (1, 2), 3, {"prefill_workers": 1, "prefill_chunk": 8}),
        slow("mpi", (1, 3), 4, {"mini_batches": 2}),
        # Beside a model rank's: test_layouts.
        slow("xla", (1, 2), 4, {"local_attention": 0.25}),
        slow("mpi", (1, 2), 5, {"local_attention": 0.4, "n_batches": 2}),
        slow("xla", (2, 3), 6, {"tensor_parallel": 2, "local_attention": 0.3}),
        slow("mpi", (2, 3), 6, {"tensor_parallel": 2, "local_attention": 0.3, "n_batches": 2}),
    ],
)
def test_workers_share_heads_that_they_do_not_divide(
    transport: str, dop: tuple[int, int], n_heads: int, more: dict[str, Any]
) -> None:
    changes = {"num_attention_heads": 2 * n_heads, "num_key_value_heads": n_heads, "head_dim": 8}
    model = ["llama", changes]
    scenarios: list[tuple[str, dict[str, Any]]] = [("greedy", {"model": model})]
    if transport == "xla" and dop == (1, 2):
        few_slots = {"kv_slots": 150, "host_kv_slots": 64, "kv_headroom": 0.0}
        scenarios = [("greedy", {"model": model, "kv_dtype": "int8-channel"} | few_slots)]
    found = run_job(transport, dop, scenarios, partition="heads", **more)
    for one in found:
        assert one["same"], one
        assert one["n_preemptions"] or len(scenarios[0][1]) == 1, one


@pytest.mark.parametrize("transport", [mpi(), slow("xla")])
def test_q_with_k_and_v_gives_the_same_tokens(transport: str, tmp_path: Path) -> None:
    scenarios: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {"model": "llama"}),
        ("keeps", {"model": "llama"}),
    ]
    *found, kept = run_job(transport, 2, scenarios, q_first=False, frozen=tmp_path)
    for of_model in kept["found"]:
        assert of_model["least"] == 0 <= of_model["most"] <= 24 < of_model["kept"], kept
    for rank in ("1", "2"):  # nor are their steps held up by collections of what was compiled
        # A started rank leaves out its imports, too.
        assert int((tmp_path / rank).read_text()) > (10_000 if transport == "mpi" else 1000)
    check_greedy(found[0])
    assert all("q with k and v" in x for x in found[0]["programs"] if x.startswith(("decode", "chunk")))


@pytest.mark.parametrize(
    ("transport", "partition"),
    [mpi("heads"), slow("mpi", "requests"), slow("xla", "heads"), slow("xla", "tokens")],
)
def test_a_rank_whose_memory_for_kept_kv_is_full_goes_on(transport: str, partition: str) -> None:
    """And all agree on what is kept."""
    [found] = run_job(transport, 2, [("full", {"model": "llama"})], partition=partition)
    assert found["same"] and found["lost"] > 0 < found["hits"], found


@pytest.mark.parametrize(
    ("transport", "dop", "more"),
    [
        ("xla", 2, {}),
        slow("xla", (2, 1), {"tensor_parallel": 2}),
        slow("xla", (2, 1), {"pipeline_parallel": 2}),
        slow("xla", (2, 1), {"n_batches": 3}),
        slow("mpi", (2, 1), {"tensor_parallel": 2}),
    ],
)
def test_a_step_is_launched_before_the_one_before_it_is_run(transport: str, dop: Any, more: Any) -> None:
    """Attention ranks run each decode step only once they have been told of the next one, which rank 0 must
    so have planned without this one's tokens. Steps 1 to 4 are prompts."""
    [found] = run_job(transport, dop, [("greedy", {"model": "llama"})], behind=(5, 60), **more)
    check_greedy(found)
    assert found["ahead"]


@pytest.mark.parametrize("local_attention", [0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_launching_a_step_waits_for_nothing(local_attention: float) -> None:
    """The attention rank takes its time for every step, and rank 0 waits for tokens, not while it launches."""
    more = {"local_attention": local_attention, "partition": "tokens"}
    [found] = run_job("xla", 1, [("ahead", {"model": "llama"})], slow=(1, 999, 0.1), **more)
    assert found["wait_s"] > 0.05 * found["n_steps"]
    assert found["launch_s"] < 0.5 * found["wait_s"], found


@pytest.mark.parametrize(
    ("transport", "partition"),
    [
        slow("xla", "requests"),
        slow("xla", "tokens"),
        ("xla", "heads"),
        slow("mpi", "tokens"),
        slow("mpi", "heads"),
    ],
)
def test_warm_programs_and_scored_prompts(transport: str, partition: str) -> None:
    """Steps of padding alone run, what is run once needs nothing more, and prompts are as likely as
    unsplit."""
    found, scored = run_job(
        transport, 2, [("warmed", {"model": "llama"}), ("scored", {"model": "llama"})], partition=partition
    )
    assert found["same"] and found["n_done"] == found["more_of_sampler"] == 0, found
    assert len(found["more"]) <= (1 if partition == "tokens" else 0), (
        found
    )  # where tokens fall to workers by chance
    assert found["ahead"] == (found["n_todo"] if partition == "heads" else 0) and found["all_by_others"], (
        found
    )
    assert scored["same"] and scored["n"] == 39, scored


@pytest.mark.parametrize("transport", ["xla", slow("mpi")])
def test_what_is_compiled_behind_rests_between_two_parts(transport: str) -> None:
    """Each of them may keep Python from requests for a second."""
    cases = [
        ("lower", 3, True),
        ("lower", 1, True),
        ("compile", 1, True),
        ("compile", 1, False),
        ("read", 1, True),
    ]
    scenarios = []
    for i, (at, n, kept) in enumerate(cases):
        # Of each size once: what is in JAX's cache cannot be kept by name.
        model = ["llama", {"intermediate_size": 80 + 8 * i}]
        scenarios.append(("rests", {"model": model, "at": at, "n_at_once": n, "kept": kept}))
    for case, found in zip(cases, run_job(transport, 1, scenarios), strict=True):
        assert found["same"] and not found["ended"] and not found["since"] and found["more"], (case, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "more"),
    [("xla", {"tensor_parallel": 2}), ("xla", {"pipeline_parallel": 2}), mpi({"n_batches": 3})],
    ids=str,
)
def test_scored_prompts_over_several_model_workers(transport: str, more: dict) -> None:
    [found] = run_job(transport, (2, 1), [("scored", {"model": "llama"})], **more)
    assert found["same"] and found["n"] == 39, found


def test_three_workers_cannot_share_two_heads() -> None:
    found = run_job("xla", 3, [("refused", {"model": "llama"})], partition="heads")
    assert "2 KV heads for 3 attention workers, each of which needs one" in found[0]["line"]
    assert "partition='tokens' or partition='requests'" in found[0]["line"]


def test_attention_ranks_start_without_flax() -> None:
    """It is half of what a model rank imports, and models alone need it."""
    command = (
        "from jaxlamina import ranks; import sys; assert 'jax' in sys.modules and 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True, timeout=DEADLINE_S)


# --- programs that do not fit ---


def check_mismatch(line: str, transport: str, n_workers: int, rank_0: str, rank_1: str) -> None:
    """Both ranks, and what each would do at the first exchange that differs."""
    if transport == "xla" and n_workers > 1:
        does_0, does_1 = f"a collective of {rank_0}", f"a collective of {rank_1}"
    else:
        does_0 = rf"sends {rank_0} to rank 1 \(attention worker 0\)"
        does_1 = rf"receives {rank_1} from rank 0 \(model worker 0\)"
    wanted = (
        r"the ranks' programs of prefill, batch 1, tokens \d+.* do not match, so none is run: "
        rf"rank 0 \(model worker 0\), exchange \d+ of \d+: {does_0}, but "
        rf"rank 1 \(attention worker 0\), exchange \d+ of \d+: {does_1}"
    )
    assert re.fullmatch(wanted, line), line


@pytest.mark.parametrize(("transport", "n_workers"), [mpi(2), slow("xla", 1), slow("xla", 2)])
def test_programs_that_do_not_fit_are_not_run(transport: str, n_workers: int) -> None:
    """Nobody hangs, and the same ranks then serve a model whose programs fit."""
    cases = [("mismatch", {"model": "llama", "what": what}) for what in ("more", "heads")]
    then = ("greedy", {"model": "llama", "n_tokens": 8})
    *found, last = run_job(transport, n_workers, [*cases, then], partition="requests")
    for case in found:
        assert case["n_runs"] == case["n_steps"] == 0
        # Not even told of a step.
        once = dict.fromkeys(("Setup", "Allocate", "Prepare"), n_workers)
        assert case["told"] == once
        assert case["s"] < 60
    n = 32 // n_workers  # the bucket's new tokens, a worker's share of them

    def message(*shape: int) -> str:
        """Collectives carry a message in one dimension: XLA may lay out another array as it likes."""
        sizes = (math.prod(shape),) if transport == "xla" else shape
        return rf"float32\[{', '.join(map(str, sizes))}\]"

    check_mismatch(found[0]["line"], transport, n_workers, message(1, 4, 8), message(n, 4, 8))
    check_mismatch(found[1]["line"], transport, n_workers, message(n, 4, 8), message(n, 8, 8))
    check_greedy(last, n_tokens=8)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_job_whose_programs_do_not_fit_ends_by_itself(transport: str) -> None:
    scenario = ("mismatch", {"model": "llama", "what": "more", "caught": False})
    with started(transport, 1, [scenario]) as processes:
        out, err = processes[0].communicate(timeout=DEADLINE_S)
        codes = [process.wait(timeout=20) for process in processes]
    assert codes[0] != 0 and "{" not in out, (codes, err[-3000:])
    assert re.search(
        r"UserError: the ranks' programs of prefill, .* do not match, so none is run: rank 0", err
    ), err


# --- a step past its deadline ---


@pytest.mark.parametrize(("transport", "how"), [mpi("stop"), ("xla", "sleep")])
def test_a_step_past_its_deadline_ends_rank_0_with_its_name(transport: str, how: str, tmp_path: Path) -> None:
    """Its peer stands still (no heartbeat misses it in that time), or lives on and never runs its program."""
    note, deadline_s = tmp_path / "held", 5
    hold = {"step": 12, "how": how, "note": str(note)}
    late = {"step_deadline_s": float(deadline_s), "heartbeat_s": 60.0 if how == "stop" else 5.0}
    scenario = ("greedy", {"model": "llama", "n_tokens": 24})
    with started(transport, 1, [scenario], hold=hold, **late) as processes:
        _, err = processes[0].communicate(timeout=DEADLINE_S)
        ended = time.monotonic()
        pid, held = note.read_text().split()
        codes = [process.wait(timeout=20) for process in processes]
    took = ended - float(held)
    assert deadline_s - 1 < took < deadline_s + 10, (took, err[-3000:])
    assert codes[0] != 0 and not Path(f"/proc/{pid}/exe").exists()
    # It is told of a step while it runs the one before: who stands still has done neither.
    line = (
        r"error: rank 0 \(model worker 0\): step 1[12] \(decode, batch \d+, context \d+[^)]*\) with "
        rf"rank 1 \(attention worker 0\) was not done within {deadline_s} s"
    )
    assert re.search(rf"^{line}", err, re.MULTILINE), err


@pytest.mark.parametrize("transport", ["xla", slow("mpi")])
def test_slow_steps_that_wait_for_each_other_are_not_late(transport: str) -> None:
    """Three in a row each take two thirds of what one may."""
    scenario = ("greedy", {"model": "llama", "n_tokens": 8})
    [found] = run_job(transport, 1, [scenario], slow=(8, 10, 2.0), step_deadline_s=3.0)
    check_greedy(found, n_tokens=8)


@pytest.mark.parametrize("transport", ["xla", slow("mpi")])
def test_a_job_does_not_end_before_a_step_that_nobody_wants(transport: str, tmp_path: Path) -> None:
    """One that never ends is said to be late, as any other is."""
    hold = {"step": 2, "how": "sleep", "note": str(tmp_path / "held")}
    scenario = ("ended", {"model": "llama"})
    with started(transport, 1, [scenario], hold=hold, step_deadline_s=4.0) as processes:
        out, err = processes[0].communicate(timeout=DEADLINE_S)
        codes = [process.wait(timeout=20) for process in processes]
    assert '"n_tokens": 1' in out and codes[0] != 0, (out, codes)
    assert re.search(r"^error: rank 0 .*: step 2 \(decode, .* was not done within 4 s$", err, re.MULTILINE), (
        err
    )


@pytest.mark.parametrize(
    "kv_dtype",
    [
        "int8-channel-asymmetric",
        pytest.param("int8", marks=pytest.mark.slow),
        pytest.param("int8-channel", marks=pytest.mark.slow),
    ],
)
def test_int8_kv_on_other_ranks(kv_dtype: str) -> None:
    """Rounded by the same rule wherever it is kept: the unsplit model's tokens, whose KV is int8 too."""
    scenarios = [("greedy", {"model": "llama", "n_tokens": 24, "kv_dtype": kv_dtype})]
    check_greedy(run_job("xla", 2, scenarios)[0], n_tokens=24)


@pytest.mark.slow  # README's commands run the model over ranks, too
@pytest.mark.mpi
def test_smollm2_knows_a_capital_over_ranks() -> None:
    [found] = run_job("mpi", 1, [("answer", {"model": SMOLLM2, "prompt": "The capital of France is"})])
    assert found["text"].startswith(" Paris"), found


@pytest.mark.parametrize(("transport", "n_workers"), [slow("mpi", 1), slow("xla", 3)])
def test_smollm2_over_ranks(transport: str, n_workers: int) -> None:
    found = run_job(transport, n_workers, [("greedy", {"model": SMOLLM2})])
    check_greedy(found[0])
    print(found[0])
