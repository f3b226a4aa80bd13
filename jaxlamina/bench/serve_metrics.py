"""From the times of streamed answers to what is said of a server: latencies, throughput, goodput. Pure.

Names are vLLM's, of options and of results.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jaxlamina.bench.lists import listed, named, number
from jaxlamina.errors import UserError

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token, the first left out",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
IN_GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class TimedAnswer:
    """One request as its client saw it. Seconds of one clock.

    ``token_s``: when each piece with a token came; empty where only the end of the answer was told.
    ``usage``: whether the server said how many tokens there were; otherwise pieces were counted. ``error``:
    why there is no (whole) answer.
    """

    n_prompt: int
    n_output: int
    sent_s: float
    token_s: tuple[float, ...] = ()
    end_s: float = 0.0
    usage: bool = True
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """To the first token, which was there by the answer's end if nothing told of it."""
        return (self.token_s[0] if self.token_s else self.end_s) - self.sent_s

    @property
    def e2el_s(self) -> float:
        """To the end of the last token."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first; None where there is no other, or nothing told when the first
        one came."""
        if not self.token_s or self.n_output <= 1:
            return None
        return (self.e2el_s - self.ttft_s) / (self.n_output - 1)

    @property
    def itl_s(self) -> list[float]:
        """Between pieces: one token each, of most servers."""
        return [b - a for a, b in pairwise(self.token_s)]

    @property
    def normalised_s(self) -> float:
        """End-to-end latency over output tokens (FineInfer, section 4.1)."""
        return self.e2el_s / max(1, self.n_output)


def samples_ms(answers: Sequence[TimedAnswer], name: str) -> list[float]:
    """All values of one metric (a key of `TITLES`) over answers without an error."""
    good = [answer for answer in answers if answer.error is None]
    if name == "itl":
        return [1e3 * s for answer in good for s in answer.itl_s]
    found = [getattr(answer, f"{name}_s") for answer in good]
    return [1e3 * s for s in found if s is not None]


def summary(
    answers: Sequence[TimedAnswer],
    duration_s: float,
    *,
    names: Sequence[str] = tuple(TITLES),
    percentiles: Sequence[float] = (50, 90, 99),
    limits_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """vLLM's results: of ``names``' metrics mean, median, deviation and percentiles (None where there is no
    sample), and rates over ``duration_s``. ``limits_ms``: what a request must keep to count for goodput."""
    good = [answer for answer in answers if answer.error is None]
    n_in, n_out = (sum(getattr(a, key) for a in good) for key in ("n_prompt", "n_output"))
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "request_throughput": len(good) / duration_s,
        "output_throughput": n_out / duration_s,
        "total_token_throughput": (n_in + n_out) / duration_s,
        "max_concurrent_requests": most_at_once(good),
        "mean_normalized_latency_ms": 1e3 * statistics.fmean(a.normalised_s for a in good) if good else None,
    }
    if limits_ms:
        found["request_goodput"] = sum(keeps(answer, limits_ms) for answer in good) / duration_s
    for name in names:
        values = samples_ms(answers, name)
        found[f"mean_{name}_ms"] = statistics.fmean(values) if values else None
        found[f"median_{name}_ms"] = statistics.median(values) if values else None
        found[f"std_{name}_ms"] = statistics.pstdev(values) if values else None
        for p in percentiles:
            found[f"p{p:g}_{name}_ms"] = float(np.percentile(values, p)) if values else None
    return found


def keeps(answer: TimedAnswer, limits_ms: Mapping[str, float]) -> bool:
    """Whether an answer without an error is within every limit. One of a single token has no TPOT to exceed;
    one of several whose TPOT is not known does not keep it."""
    values = ((getattr(answer, f"{name}_s"), limit) for name, limit in limits_ms.items())
    return all(answer.n_output <= 1 if value is None else 1e3 * value <= limit for value, limit in values)


def most_at_once(answers: Sequence[TimedAnswer]) -> int:
    """The most requests that were being answered at one time."""
    changes = sorted([(a.end_s, -1) for a in answers] + [(a.sent_s, 1) for a in answers])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def errors(answers: Sequence[TimedAnswer]) -> list[tuple[str, int]]:
    """Each error and how often it was met, the most frequent first."""
    return Counter(answer.error for answer in answers if answer.error is not None).most_common()


@dataclass(frozen=True)
class Wanted:
    """What is asked for: metrics (keys of `TITLES`), their percentiles, and the limits in ms of goodput."""

    names: Sequence[str]
    percentiles: Sequence[float]
    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, names: str, percentiles: str, goodput: Sequence[str]) -> Wanted:
        """From the options of these names."""
        found = named("--percentile-metrics", names, TITLES), parse_percentiles(percentiles)
        return cls(*found, parse_goodput(goodput))

    def of(self, answers: Sequence[TimedAnswer], duration_s: float) -> dict[str, Any]:
        """The `summary`, with the limits and with how often each error was met."""
        found = summary(answers, duration_s, **vars(self))
        return found | {"goodput_limits_ms": self.limits_ms or None, "errors": dict(errors(answers))}


def parse_percentiles(text: str) -> list[float]:
    """From "50,99.9"; ``UserError`` for what is not above 0 and at most 100."""
    what = "numbers above 0, at most 100, such as 50,90,99"
    return listed("--metric-percentiles", text, number(float, lambda p: 0 < p <= 100), what)


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric, from ["ttft:200", "tpot:50"]; ``UserError`` for other words."""
    found: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in IN_GOODPUT or not limit > 0:
            raise UserError(
                f"--goodput: {word!r} must be {', '.join(IN_GOODPUT)} and milliseconds, such as ttft:200"
            )
        found[name] = limit
    return found
