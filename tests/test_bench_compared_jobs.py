"""Jobs that a bench compares: what is kept of those that end, however late another one is, and which GPUs
there are for them."""

from __future__ import annotations

from jaxlamina.bench.compared_jobs import ComparedJob, run_at_once


def test_a_late_job_costs_no_other_one_its_results() -> None:
    """What is written is more than a pipe holds, so that a writer whose turn has not come would stand
    still."""
    late = ComparedJob(("bench", "predict", "--json"))  # 12 s
    chatty = ComparedJob(("--version",), {"PYTHONVERBOSE": "1"})
    first, second = run_at_once([late, chatty], within_s=6)
    assert first.code is None and first.out == ""
    assert second.code == 0 and second.out.startswith("jaxlamina ") and len(second.err) > 2**17
