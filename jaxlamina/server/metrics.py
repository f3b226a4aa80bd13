"""What `/metrics` says, under vLLM's names; what vLLM has no name for is under `jaxlamina:`.

Counts that the engine keeps are read when asked for; times of requests are noted as they happen. Knows
`Engine`'s statistics; nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxlamina.engine.engine import Engine
from jaxlamina.engine.outputs import RequestOutput
from jaxlamina.process.start_clock import CLOCK
from jaxlamina.server.pool_times import PoolTimes
from jaxlamina.server.predicted import StepPredictor

_SHORT_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

# (name, what it is, which number of `snapshot`)
_GAUGES = (
    ("vllm:num_requests_running", "Sequences in the running batch.", "n_running"),
    ("vllm:num_requests_waiting", "Requests that wait to be admitted.", "n_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV slots that requests hold, 0 to 1.", "kv_usage"),
    ("jaxlamina:paused", "1 while the engine is paused.", "paused"),
    ("jaxlamina:kv_slots", "KV slots there are, one token each.", "kv_slots"),
    ("jaxlamina:kv_slots_used", "KV slots that requests hold.", "kv_slots_used"),
    ("jaxlamina:kv_slots_shared", "KV slots that several sequences hold.", "kv_slots_shared"),
    ("jaxlamina:kv_slots_cached", "KV slots that the prefix cache alone holds.", "kv_slots_cached"),
    (
        "jaxlamina:staggered_batches",
        "Batches that the latest decode step over ranks ran as; 1 where none are staggered.",
        "n_batches",
    ),
    (
        "jaxlamina:local_attention_share",
        "Of the tokens that the latest decode step attended to, the share on model workers.",
        "local_share",
    ),
    (
        "jaxlamina:local_attention_wanted_share",
        "That share at which a step is predicted to be shortest.",
        "wanted_share",
    ),
    (
        "jaxlamina:prompt_chunk_tokens",
        "Prompt tokens that the latest step with any could compute; 0 where prompts are computed whole.",
        "prompt_chunk_tokens",
    ),
    ("jaxlamina:host_kv_slots", "KV slots in host memory there are.", "host_kv_slots"),
    ("jaxlamina:host_kv_slots_used", "KV slots in host memory in use.", "host_kv_slots_used"),
    ("jaxlamina:kept_kv_slots", "Tokens whose KV can be kept by content.", "kept_kv_slots"),
    ("jaxlamina:kept_kv_slots_used", "Tokens whose KV is kept by content.", "kept_kv_slots_used"),
    ("jaxlamina:kept_kv_behind", "Tokens whose KV is on its way to where it is kept.", "kept_kv_behind"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", "n_prompt_tokens"),
    (
        "jaxlamina:own_pace_prompt_tokens",
        "Prompt tokens that prefill workers computed at their own pace.",
        "n_prompt_tokens_own_pace",
    ),
    ("vllm:generation_tokens", "Tokens written.", "n_generated_tokens"),
    ("vllm:num_preemptions", "Requests that had to give their KV slots back.", "n_preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "n_prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "n_prefix_hit_tokens"),
    ("jaxlamina:kept_kv_tokens", "Tokens whose KV was to be copied to where it is kept.", "n_kept_tokens"),
    (
        "jaxlamina:kept_kv_lost_tokens",
        "Of those, tokens that there was no memory for: they are not kept.",
        "n_kept_lost_tokens",
    ),
    ("jaxlamina:kept_kv_hits", "Tokens whose KV came from there.", "n_kept_hit_tokens"),
    ("jaxlamina:kept_kv_brought_bytes", "Their KV, in all layers.", "kept_kv_brought_bytes"),
    ("jaxlamina:kept_kv_brought_seconds", "How long hosts were at it.", "kept_kv_brought_s"),
    ("jaxlamina:weight_updates", "Times that the weights were replaced.", "n_weight_updates"),
    ("jaxlamina:engine_steps", "Steps of the engine.", "n_steps"),
    ("jaxlamina:prompt_calls", "Prompts and chunks, computed apart from decode steps.", "n_prefill_steps"),
    ("jaxlamina:launches", "Programs launched: a step's rows, and each call of prompts.", "n_launches"),
    ("jaxlamina:busy_seconds", "In which there was something to do, for the host or a device.", "busy_s"),
    ("jaxlamina:launch_seconds", "Of the host, launching programs, a device at work or not.", "launch_s"),
    (
        "jaxlamina:wait_seconds",
        "Of the host, waiting for results: next to none where it is the host that is late.",
        "wait_s",
    ),
)


# The same, of what is not always known.
_PREDICTED = (
    (
        "jaxlamina:predicted_step_seconds",
        "What a decode step of the rows that run now takes by the planner's cost model.",
        "predicted_step_s",
    ),
    (
        "jaxlamina:measured_over_predicted_step",
        "Of the decode steps since the time before that this was asked for, their mean over that.",
        "measured_over_predicted",
    ),
    (
        "jaxlamina:predicted_prompt_step_seconds",
        "What the latest step of rows and prompt tokens was predicted to take, where chunks are auto.",
        "predicted_prompt_step_s",
    ),
    (
        "jaxlamina:measured_over_predicted_prompt_step",
        "What that step took over that.",
        "measured_over_predicted_prompt",
    ),
)


# What is asked for by `Metrics.latencies`.
_LATENCIES = {
    "vllm:time_to_first_token_seconds_sum": "first_s",
    "vllm:time_to_first_token_seconds_count": "n_first",
    "vllm:inter_token_latency_seconds_sum": "next_s",
    "vllm:inter_token_latency_seconds_count": "n_next",
}


def snapshot(engine: Engine) -> dict[str, float]:
    """The engine's numbers now. For the thread that owns it."""
    found: dict[str, float] = {**asdict(engine.stats), **engine.kv_stats()}
    found["n_running"], found["busy_s"] = len(engine.scheduler.running), engine.stats.busy_s
    found["n_batches"] = engine.executor.latest_n_batches
    local = engine.executor.local_attention() or {}
    found["local_share"], found["wanted_share"] = local.get("share") or 0.0, local.get("wanted") or 0.0
    found["n_waiting"] = len(engine.scheduler.waiting) + len(engine.scheduler.held or ())
    found["paused"], found["n_weight_updates"] = engine.is_paused, engine.n_weight_updates
    found["prompt_chunk_tokens"] = engine.scheduler.prefill_chunk or 0
    if engine.chunk_size is not None and (latest := engine.chunk_size.latest) is not None:
        found["predicted_prompt_step_s"] = latest.predicted_s
        found["measured_over_predicted_prompt"] = latest.measured_s / latest.predicted_s
    found["kv_usage"] = found["kv_slots_used"] / found["kv_slots"]
    return found


class Metrics:
    """An `Observer`. ``model_name`` is the label of everything; ``pools``: what they did in a step, where
    that is recorded; ``predictor``: what steps take by the planner, where it has a say."""

    def __init__(
        self, model_name: str, pools: PoolTimes | None = None, predictor: StepPredictor | None = None
    ) -> None:
        self._pools, self._predictor = pools, predictor
        self._registry = CollectorRegistry()
        for of_python in (ProcessCollector, PlatformCollector, GCCollector):
            of_python(registry=self._registry)
        self._labels = {"model_name": model_name}
        self._numbers: dict[str, float] = {}
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token.", _LONG_S)
        self._next = [
            self._histogram(name, "Between two tokens of a sequence.", _SHORT_S)
            for name in (
                "inter_token_latency_seconds",
                "time_per_output_token_seconds",
            )  # vLLM's new and old name
        ]
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Of a finished request: the mean after its first token.",
            _SHORT_S,
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Until a request was finished.", _LONG_S)
        self._prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS
        )
        self._written = self._histogram("request_generation_tokens", "Tokens that one wrote.", _TOKENS)
        self._ended = Counter(
            "vllm:request_success_total",
            "Requests that ended, by why: stop, length or abort.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort"):
            self._ended.labels(**self._labels, finished_reason=reason)
        self._registry.register(self)  # type: ignore[arg-type]

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Any:
        made = Histogram(f"vllm:{name}", what, [*self._labels], buckets=buckets, registry=self._registry)
        return made.labels(**self._labels)

    def first_token(self, after_s: float) -> None:
        self._first.observe(after_s)

    def next_token(self, after_s: float) -> None:
        for histogram in self._next:
            histogram.observe(after_s)

    def finished(self, output: RequestOutput, after_s: float, first_after_s: float) -> None:
        self._whole.observe(after_s)
        self._prompt.observe(len(output.prompt_token_ids))
        self._written.observe(sum(len(completion.token_ids) for completion in output.outputs))
        longest = max(len(completion.token_ids) for completion in output.outputs)
        if longest > 1:
            self._per_token.observe((after_s - first_after_s) / (longest - 1))
        self._ended.labels(**self._labels, finished_reason=output.finish_reason).inc()

    def aborted(self) -> None:
        self._ended.labels(**self._labels, finished_reason="abort").inc()

    def latencies(self) -> dict[str, float]:
        """Sums and counts so far: ``first_s`` and ``n_first`` of times to a first token, ``next_s`` and
        ``n_next`` between two tokens of a sequence."""
        families = self._registry.restricted_registry(_LATENCIES).collect()
        return {_LATENCIES[sample.name]: sample.value for family in families for sample in family.samples}

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers, for the registry."""
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, what, key in rows:
                family = kind(name, what, labels=[*self._labels])
                family.add_metric([*self._labels.values()], self._numbers.get(key, 0.0))
                yield family
        for name, what, key in _PREDICTED:
            if key in self._numbers:
                gauge = GaugeMetricFamily(name, what, labels=[*self._labels])
                gauge.add_metric([*self._labels.values()], self._numbers[key])
                yield gauge
        what = "How long this process's start was at each phase, once it was ready."
        start = GaugeMetricFamily("jaxlamina:start_seconds", what, labels=[*self._labels, "phase"])
        for phase, seconds in CLOCK.seconds.items():
            start.add_metric([*self._labels.values(), phase], seconds)
        yield start
        if self._pools is not None:
            yield from self._of_pools(self._pools)

    def snapshot(self, engine: Engine) -> dict[str, float]:
        """`snapshot`, and what is predicted. For the thread that owns the engine."""
        return snapshot(engine) | (self._predictor.numbers(engine) if self._predictor is not None else {})

    def _of_pools(self, pools: PoolTimes) -> Iterator[Metric]:
        own = [*self._labels.values()]
        what = "Of a decode step's time, what a pool's ranks spent so, their mean, in the last step recorded."
        seconds = GaugeMetricFamily(
            "jaxlamina:pool_step_seconds", what, labels=[*self._labels, "pool", "part"]
        )
        for (pool, kind), value in pools.seconds.items():
            seconds.add_metric([*own, pool, kind], value)
        what = "Of that step, the share in which a pool's ranks did nothing."
        shares = GaugeMetricFamily("jaxlamina:pool_bubble_share", what, labels=[*self._labels, "pool"])
        for pool, value in pools.bubble_shares.items():
            shares.add_metric([*own, pool], value)
        count = CounterMetricFamily(
            "jaxlamina:pool_recordings", "Decode steps that were recorded.", labels=[*self._labels]
        )
        count.add_metric(own, pools.n_recorded)
        yield from (seconds, shares, count)

    def text(self, numbers: dict[str, float] | None) -> bytes:
        """All of it in Prometheus' text form; ``numbers`` as of `snapshot`, None: the last ones."""
        self._numbers = self._numbers if numbers is None else numbers
        return generate_latest(self._registry)
