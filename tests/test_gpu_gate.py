"""The GPU gate itself: that its table covers what it should, that its judge lets nothing wrong pass, and a
rehearsal on CPUs.

The whole gate is `make test-gpu`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import gpu_gate as gate
import gpu_gate_cases as cases
import numpy as np
import pytest
from gpu_gate_cases import Case, Group

CASE = Case("a", "decode", "h64k3g3")


def found(difference: Any = 0.0, n: int = 400) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a case gave, so far off; and the reference."""
    reference = np.random.default_rng(0).normal(-3, 1, (4, n // 4))
    scored = np.ones(reference.shape, bool)
    return {"logprobs": reference + difference, "scored": scored, "seconds": 1.0}, {"logprobs": reference}


def test_every_way_is_covered_and_every_case_has_its_own_place():
    covered = {word for group in cases.GROUPS for case in group.cases for word in case.covers}
    assert covered == set(cases.WANTED)
    for group in cases.GROUPS:
        names = [case.name for case in group.cases]
        assert len(set(names)) == len(names) and not any(set("./") & set(name) for name in names)
    # Float and int8 KV, both dtypes, on every kind of path.
    for way in ("unsplit", "local", "ranks by memory", "ranks by nccl", "ranks by mpi"):
        of_way = [case for group in cases.GROUPS for case in group.cases if way in case.covers]
        assert {(c.dtype, c.kv_dtype) for c in of_way} >= {
            ("float32", "auto"),
            ("bfloat16", "auto"),
            ("bfloat16", "int8"),
            ("bfloat16", "int8-channel"),
        }, way
    assert [g.name for g in gate.chosen("", 1)] == [g.name for g in cases.GROUPS if g.n_gpus == 1]


@pytest.mark.parametrize(
    ("difference", "passes"),
    [
        (0.0, True),
        (np.random.default_rng(1).normal(0, 0.01, (4, 100)), True),
        (0.02, False),  # a small shift of all
        (np.where(np.arange(100) == 60, -3.0, 0.0), False),  # one token of each row
        (np.where(np.arange(100) == 60, math.nan, 0.0), False),
        (math.nan, False),
        (math.inf, False),
    ],
)
def test_the_judge(difference: Any, passes: bool):
    assert gate.judged("g", CASE, *found(difference), None).passed == passes


def test_what_was_not_scored_or_has_no_limit_does_not_pass():
    got, reference = found()
    nothing = got | {"scored": np.zeros((4, 100), bool)}
    assert not gate.judged("g", CASE, nothing, reference, None).passed
    assert not gate.Result("g", CASE).passed
    assert not gate.Result("g", CASE, error="died").passed
    off, _ = found(1e-3, 400)
    same = gate.judged("g", dataclasses.replace(CASE, dtype="float32"), off, reference, got)
    assert same.figures["unsplit"] == pytest.approx(-1e-3, rel=0.01) and not same.passed


def test_tokens_may_part_only_where_two_were_about_as_likely():
    reference = {"tokens": np.arange(12).reshape(2, 6), "margins": np.full((2, 6), 1.0)}
    reference["margins"][1, 3] = 1e-3
    case = dataclasses.replace(CASE, how="tokens", dtype="float32")
    for at, passes in (((1, 3), True), ((1, 2), False), ((0, 5), False)):
        tokens = reference["tokens"].copy()
        tokens[at[0], at[1] :] += 50
        result = gate.judged("g", case, {"tokens": tokens, "seconds": 1.0}, reference, None)
        assert result.passed == passes, at
    assert gate.judged("g", case, {"tokens": reference["tokens"], "seconds": 1.0}, reference, None).passed


def test_the_demo_models_reference_is_that_of_the_perplexity_test():
    reference = np.load(gate.DATA)
    assert reference["logprobs"].shape == (20, 255) and np.isfinite(reference["logprobs"]).all()
    assert math.exp(-reference["logprobs"].astype(np.float64).mean()) == pytest.approx(42.909, abs=1e-3)
    # In float32 tokens must be equal: no margin is below the limit.
    assert reference["margins"].min() > cases.margin_of(Case("a", "tokens", dtype="float32"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> gate.Run:
    """A gate of small random models on CPUs, whose programs are not worth optimising."""
    run = gate.Run("cpu", "small", 1, tmp_path_factory.mktemp("gate"), time.monotonic() + 500, 240.0)
    run.environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    return run


TINY = "h16k6g2"


def small(name: str, how: str, **more: Any) -> Case:
    return Case(name, how, TINY, "float32", **more)


def test_a_rehearsal_in_one_process_and_over_ranks(run: gate.Run, tmp_path: Path):
    alone = Group(
        "alone",
        (small("unsplit", "moves", llm={"split": False}), small("tokens", "tokens", llm={"split": False})),
    )
    ranks = Group(
        "ranks",
        (small("mixed", "mixed", at={"q_first": True}), small("int8", "moves", kv_dtype="int8")),
        {"transport": "xla"},
    )
    results = gate.run(run, [alone, ranks], 1)
    assert [r.passed for r in results] == [True] * 4, results
    by_name = {r.case.name: r for r in results}
    assert abs(by_name["mixed"].figures["unsplit"]) <= by_name["mixed"].limits["unsplit"] < 1e-3
    assert by_name["tokens"].figures["same"] == by_name["tokens"].figures["n_tokens"] == 18
    text = gate.as_markdown(results, {"device": "CPU"}, "here", 1.0)
    assert "**4 of 4 cases passed**" in text and "| ranks | mixed |" in text
    assert json.loads(json.dumps(gate.as_json(results, {}, "here", 1.0)))["n_passed"] == 4


def test_a_wrong_slot_is_seen_and_what_dies_costs_only_itself(run: gate.Run):
    """The last token's slot is taken for the one before it, from some step on: figures beyond the limits. A
    case that ends its process is one failure, and the next case runs."""
    run.make_references([Group("x", (small("x", "decode"),))])
    broken = Path(run.folder, "broken")
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\ndef wrong():\n    from jaxlamina.run import unsplit\n"
        "    decode = unsplit.UnsplitExecutor.decode\n    def altered(self, batch):\n"
        "        if self.at_fault == 'die': os._exit(11)\n"
        "        if self.at_fault == 'slot' and batch.lengths[0] > 2:\n"
        "            table = batch.slot_table.copy(); table[0, 1] = table[0, 0]\n"
        "            batch = batch._replace(slot_table=table)\n        return decode(self, batch)\n"
        "    unsplit.UnsplitExecutor.at_fault = ''\n    unsplit.UnsplitExecutor.decode = altered\n"
        "if 'group' in str(sys.orig_argv): wrong()\n"
    )
    environment = run.environment | {"PYTHONPATH": f"{broken}:{gate.ROOT}:{gate.ROOT / 'tests'}"}
    faulty = dataclasses.replace(run, environment=environment)
    whole = {"llm": {"split": False}}
    group = Group(
        "faulty",
        tuple(small(n or "none", "decode", at={"at_fault": n}, **whole) for n in ("die", "slot", "")),
    )
    died, slot, right = faulty.do(group)
    assert "ended with [11]" in died.error and not died.passed
    assert not slot.error and not slot.passed and slot.figures["token"] > slot.limits["token"]
    assert right.passed, right


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_all_on_the_gpus_that_are_there():
    assert gate.main([]) == 0
