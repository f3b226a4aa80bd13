"""The planner's plans under a trace: what `jaxlamina plan` says of the steady state, beside what the engine's
scheduler makes of requests as they arrive.

Pure. A whole batch of requests is there at the start. Others arrive as the trace has them, so much denser or
less dense that they ask for as many tokens a second as the formula gives; and the time in which the batch
settles, and empties, is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.planner import traces
from jaxlamina.planner.search import PoolPlan
from jaxlamina.planner.traces import Trace
from jaxlamina.planner.workload import Workload
from jaxlamina.simulator.results import SimulatedRun
from jaxlamina.simulator.simulation import ServingPolicy, simulate

_LIVES = 5  # requests, for each of the batch: so often all have gone and others come
_TOKENS = 250_000  # of the answers of a run: many of the trace's bursts, and simulated in seconds
_REQUESTS = 400, 10_000  # for these tokens, at least and at most
_SETTLED = 0.3  # of the time in which requests arrive
_NO_TPOT = "none of the simulated answers has two tokens: there is no time per token"


class SimulatedPlan(NamedTuple):
    """``tokens_s``: of all copies; seconds per token at two percentiles of requests; the mean batch of one
    instance, over time."""

    tokens_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    mean_batch: float


def simulated(
    plan: PoolPlan, trace: Trace, context: float, with_prefill: bool, slo_s: float | None = None
) -> SimulatedPlan | None:
    """``context``: mean tokens of a live request, to which the trace's lengths are stretched.
    ``with_prefill``: prompts take time of model workers; ``slo_s``: for which their chunks are chosen. None
    for a plan with prefill workers, which the simulator does not know. Of failures only the share of time is
    counted in which the plan writes."""
    if plan.n_prefill:
        return None
    asked = _as_asked(trace, context, plan)
    if asked.n_output.max() < 2:  # before minutes go by
        raise UserError(_NO_TPOT)
    policy = ServingPolicy(
        max_num_seqs=plan.n_rows,
        max_num_batched_tokens="auto" if with_prefill else None,  # what takes no time comes at once
        kv_slots=plan.n_slots,
        with_prefill=with_prefill,
        kept_kv=False,
        tpot_slo_ms=None if slo_s is None or not with_prefill else 1e3 * slo_s,
    )
    run = simulate(plan.setup, asked, policy)
    end_s = float(run.arrival_s[-1])
    begin_s = _SETTLED * end_s
    there = (run.end_s > begin_s) & (run.first_s < end_s)
    of_window = run.tpot_s[there[run.n_output > 1]]
    if not len(of_window):
        raise UserError(_NO_TPOT)
    p50, p99 = (float(x) for x in np.percentile(of_window, (50, 99)))
    tokens = plan.available * plan.copies * _tokens_within(run, begin_s, end_s) / (end_s - begin_s)
    return SimulatedPlan(tokens, p50, p99, run.over_time.mean("batch", end_s, begin_s))


def _as_asked(trace: Trace, context: float, plan: PoolPlan) -> Trace:
    """The trace's first requests of those that fit, or these again and again, at the rate that the plan is
    said to serve; evenly where they all come at once. They are stretched so that their mean context is that
    of all that fit."""
    fitting = _fitting(trace, context / Workload.of_trace("", trace).context, plan.n_slots)
    wanted = int(np.clip(_TOKENS / fitting.n_output.mean(), *_REQUESTS))
    n, first = max(wanted, _LIVES * plan.n_rows), plan.n_rows
    sent = traces.first(fitting, n)
    of_all, of_sent = (Workload.of_trace("", one).context for one in (fitting, sent))
    asked = traces.first(_fitting(sent, of_all / of_sent, plan.n_slots), n)
    later = np.maximum(0.0, (asked.arrival_us - asked.arrival_us[first]).astype(float))
    if not later[-1]:
        later = np.maximum(0.0, np.arange(len(asked)) - first)
    seconds = float(asked.n_output[first:].sum()) / (plan.tokens_s / plan.available / plan.copies)
    return Trace((later * (1e6 * seconds / later[-1])).astype(int), asked.n_prompt, asked.n_output)


def _fitting(trace: Trace, scale: float, n_slots: int) -> Trace:
    """The requests that fit, with so many times their tokens."""
    prompts, outputs = (
        np.maximum(1, np.rint(x * scale)).astype(int) for x in (trace.n_prompt, trace.n_output)
    )
    fits = prompts + outputs <= n_slots
    if not fits.any():
        raise UserError(f"no request of the trace fits in the plan's {n_slots:,} KV slots")
    arrivals = trace.arrival_us[fits]
    return Trace(arrivals - arrivals[0], prompts[fits], outputs[fits])


def _tokens_within(run: SimulatedRun, begin_s: float, end_s: float) -> float:
    """Tokens after each request's first one are spread evenly over its time."""
    lasts = np.maximum(run.end_s - run.first_s, 1e-12)
    within = np.minimum(run.end_s, end_s) - np.maximum(run.first_s, begin_s)
    found = (run.n_output - 1) * np.clip(within / lasts, 0.0, 1.0)
    firsts = (run.first_s >= begin_s) & (run.first_s < end_s)
    return float(found.sum() + firsts.sum())
