"""What a load is made of: how long its requests are, and when they arrive. Pure: knows no model, server or
clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.planner import traces


class Size(NamedTuple):
    """Tokens of one request."""

    n_prompt: int
    n_output: int

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_output


# Medians of log-normal lengths (prompt, output) with `_SIGMA`, rounded and cut to `_CUT`, whose means after
# the cut are those of ShareGPT (161.31, 337.99) and Alpaca (19.31, 58.45) in the PagedAttention paper;
# FineInfer, section 4.1.
_MEDIANS = {"sharegpt-like": (107.94, 316.69), "alpaca-like": (10.247, 35.383)}
_SIGMA = 1.0
_CUT = (4, 1024)

DRAWN = (*_MEDIANS, *traces.NAMES)


def drawn(name: str, n: int, *, seed: int, most_tokens: int | None = None) -> list[Size]:
    """``n`` sizes of one of `DRAWN`, of which none has more than ``most_tokens`` together.

    Real requests of the traces that come with the package (`traces.NAMES`), drawn from all of them; for the
    other two only the means are published, and the shape is ours. ``UserError`` for another name, and where
    hardly any is short enough.
    """
    if name not in DRAWN:
        raise UserError(f"--dataset-name {name!r} must be one of {', '.join(DRAWN)}")
    rng = np.random.default_rng(seed)
    if name in _MEDIANS:
        return _short_enough(_MEDIANS[name], n, rng, most_tokens)
    known = [
        size for size in sizes_in(traces.load(name)) if most_tokens is None or size.n_tokens <= most_tokens
    ]
    if not known:
        raise _too_long(most_tokens)
    return [known[i] for i in rng.integers(len(known), size=n)]


def sizes_of(name: str, n: int, size: Size, *, seed: int, most_tokens: int | None = None) -> list[Size]:
    """As `drawn`; of "random" all are ``size``, whatever their length."""
    return [size] * n if name == "random" else drawn(name, n, seed=seed, most_tokens=most_tokens)


def sizes_in(trace: traces.Trace) -> list[Size]:
    """In the order in which they arrived."""
    return [Size(*pair) for pair in zip(trace.n_prompt.tolist(), trace.n_output.tolist(), strict=True)]


def _log_normal(medians: tuple[float, float], n: int, rng: np.random.Generator) -> list[Size]:
    found: list[list[int]] = []
    for median in medians:
        lengths: list[int] = []
        while len(lengths) < n:
            more = np.rint(rng.lognormal(math.log(median), _SIGMA, n)).astype(int)
            lengths += more[(more >= _CUT[0]) & (more <= _CUT[1])].tolist()
        found.append(lengths[:n])
    return [Size(*pair) for pair in zip(*found, strict=True)]


def _short_enough(
    medians: tuple[float, float], n: int, rng: np.random.Generator, most_tokens: int | None
) -> list[Size]:
    found: list[Size] = []
    for _ in range(1000):
        more = _log_normal(medians, max(n, 64), rng)
        found += [size for size in more if most_tokens is None or size.n_tokens <= most_tokens]
        if len(found) >= n:
            return found[:n]
    raise _too_long(most_tokens)


def _too_long(most_tokens: int | None) -> UserError:
    return UserError(
        f"hardly any of these requests has at most {most_tokens} tokens: take another data set or model"
    )


def read_trace(path: str | Path, speedup: float = 1.0) -> tuple[list[Size], list[float]]:
    """(sizes, seconds of arrival after the first, over ``speedup``) of a trace file, as `traces.read` knows
    them. Requests without a prompt or an output are left out. ``UserError`` that names the line that is
    wrong."""
    trace = traces.read(path)
    return sizes_in(trace), (trace.arrival_us / (1e6 * speedup)).tolist()


def arrivals(n: int, rate: float, burstiness: float = 1.0, *, seed: int = 0) -> list[float]:
    """Seconds at which ``n`` requests arrive, the first at 0; all of them at 0 where ``rate`` (a second) is
    infinite.

    Times between two are of a gamma distribution with mean 1 / rate and shape ``burstiness``: 1 is a Poisson
    process, less comes in bursts, more is more even. ``UserError`` unless both are above 0.
    """
    if not rate > 0 or not (burstiness > 0 and math.isfinite(burstiness)):
        raise UserError(f"request rate {rate:g} and burstiness {burstiness:g} must be above 0")
    if math.isinf(rate) or n == 0:
        return [0.0] * n
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), n - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def means(sizes: Sequence[Size]) -> tuple[float, float]:
    """Mean tokens of prompts and of outputs."""
    return sum(s.n_prompt for s in sizes) / len(sizes), sum(s.n_output for s in sizes) / len(sizes)
