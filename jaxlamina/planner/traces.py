"""Traces of requests: when each one arrived, and its tokens. Three come with the package (`NAMES`); others
are read from files.

Knows no model, server or clock. What a load is made of a trace is `jaxlamina.bench.loads`.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxlamina.errors import UserError

NAMES = ("azure-conversation", "azure-code", "kimi-conversation")
_MOST_TOKENS = 1 << 31
MOST_US = 1 << 62
_MOST_REQUESTS = 50_000_000
_CSV = "a trace is CSV with TIMESTAMP,ContextTokens,GeneratedTokens"
_LEAST_S, _MOST_S = 1e-6, MOST_US / 1e6
_RESULT = "a .json trace is what `jaxlamina bench serve --save-result` writes"
_JSONL = "a line of a .jsonl trace has timestamp (ms), input_length and output_length (tokens)"


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order in which they arrived; arrivals in microseconds after the first."""

    arrival_us: Int[np.ndarray, " R"]
    n_prompt: Int[np.ndarray, " R"]
    n_output: Int[np.ndarray, " R"]

    def __len__(self) -> int:
        return len(self.arrival_us)


@dataclass(frozen=True, eq=False)
class AnsweredTrace(Trace):
    """Requests that a server has answered (`jaxlamina bench serve`); arrivals after the load's first, whether
    or not that one was answered.

    ``ttft_s``, ``e2el_s``: to the first token and to the end of the last one. ``seconds``: of the whole load.
    ``n_left_out``: requests that failed, or have no output. ``host_ms``: what the server's host had to do for
    each program, where it said so."""

    ttft_s: Float[np.ndarray, " R"]
    e2el_s: Float[np.ndarray, " R"]
    seconds: float
    n_left_out: int
    host_ms: float | None

    @property
    def tpot_s(self) -> Float[np.ndarray, " M"]:
        return tpot_s(self.e2el_s - self.ttft_s, self.n_output)

    @property
    def output_per_s(self) -> float:
        return float(self.n_output.sum()) / self.seconds


def tpot_s(
    after_first_s: Float[np.ndarray, " R"], n_output: Int[np.ndarray, " R"]
) -> Float[np.ndarray, " M"]:
    """Seconds per token after the first, of requests with more than one."""
    several = n_output > 1
    return after_first_s[several] / (n_output[several] - 1)


def load(name: str) -> Trace:
    """One of `NAMES`, whole. ``UserError`` for another name."""
    if name not in NAMES:
        raise UserError(f"no trace {name!r} comes with the package: take one of {', '.join(NAMES)}")
    with (
        resources.files("jaxlamina.planner").joinpath(f"data/{name}.npz").open("rb") as file,
        np.load(file) as kept,
    ):
        gaps, prompts, outputs = (kept[key].astype(np.int64) for key in ("gap_us", "n_prompt", "n_output"))
    return Trace(np.cumsum(gaps), prompts, outputs)


def repeated(trace: Trace, seconds: float) -> Trace:
    """``seconds`` of a trace: its first part, or itself again and again, each time one mean gap after the
    last arrival of the time before."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise UserError(f"{seconds:g} seconds of a trace must be above 0")
    n_times = math.ceil(1e6 * seconds / _period_us(trace))
    if n_times * len(trace) > _MOST_REQUESTS:
        raise UserError(f"{seconds:g} seconds of the trace are more than {_MOST_REQUESTS:,} requests")
    found = _times(trace, n_times)
    n = int(np.searchsorted(found.arrival_us, 1e6 * seconds))
    return Trace(found.arrival_us[:n], found.n_prompt[:n], found.n_output[:n])


def first(trace: Trace, n: int) -> Trace:
    """``n`` requests: a trace's first ones, or itself again and again as of `repeated`."""
    found = _times(trace, -(-n // len(trace)))
    return Trace(found.arrival_us[:n], found.n_prompt[:n], found.n_output[:n])


def _period_us(trace: Trace) -> int:
    last_us = int(trace.arrival_us[-1])
    return last_us + max(1, last_us // max(1, len(trace) - 1))


def _times(trace: Trace, n_times: int) -> Trace:
    period_us = _period_us(trace)
    if n_times * period_us >= 1 << 63:
        raise UserError(f"{n_times:,} times {period_us / 1e6:.2g} seconds of a trace are too long")
    arrivals = (trace.arrival_us + period_us * np.arange(n_times)[:, None]).reshape(-1)
    prompts, outputs = (np.tile(tokens, n_times) for tokens in (trace.n_prompt, trace.n_output))
    return Trace(arrivals, prompts, outputs)


def named(name: str) -> Trace:
    """As `load`; a file's, where that is what its name ends like (`read`)."""
    return read(name) if Path(name).suffix in (".csv", ".jsonl", ".json") else load(name)


def save(trace: Trace, path: Path) -> None:
    """In the form that `load` reads: compressed, an arrival as its distance from the one before."""
    gaps = np.diff(trace.arrival_us, prepend=0).astype(np.uint64)
    prompts, outputs = (tokens.astype(np.uint32) for tokens in (trace.n_prompt, trace.n_output))
    np.savez_compressed(path, gap_us=gaps, n_prompt=prompts, n_output=outputs)


def read(path: str | Path) -> Trace:
    """A trace from a file, in order of time: CSV as of the Azure LLM inference traces, ``.jsonl`` as of the
    Mooncake (Kimi) traces, or ``.json`` as `answered` reads it.

    Requests without a prompt or an output are left out. ``UserError`` that names the line that is wrong.
    """
    if Path(path).suffix == ".json":
        return answered(path)
    is_lines = Path(path).suffix == ".jsonl"
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(_of_lines(path, file) if is_lines else _of_csv(path, csv.DictReader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read the trace {path}: {error}") from None
    rows = [row for row in rows if row[1] > 0 and row[2] > 0]
    if not rows:
        raise UserError(f"{path} has no request")
    rows.sort(key=lambda row: row[0])
    if rows[-1][0] - rows[0][0] > MOST_US:
        raise UserError(f"{path}: its requests come over more than {_MOST_S:.1e} seconds")
    arrivals, prompts, outputs = np.array(rows, np.int64).T
    return Trace(arrivals - arrivals[0], prompts, outputs)


def _of_csv(path: str | Path, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """(microseconds since year 1, prompt, output) of each row."""
    for number, row in enumerate(rows, start=2):
        try:
            # of seven digits of a second Python reads six
            time = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", row["TIMESTAMP"]))
            if time.tzinfo is not None:
                time = time.astimezone(UTC).replace(tzinfo=None)
            sizes = _sizes(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{path}, line {number}: {error!r}; {_CSV}") from None
        yield (time - datetime.min) // timedelta(microseconds=1), *sizes


def _of_lines(path: str | Path, lines: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            arrival_us = round(1000 * row["timestamp"])
            sizes = _sizes(row["input_length"], row["output_length"])
            if abs(arrival_us) > MOST_US:
                raise ValueError(f"timestamp {row['timestamp']:g} is out of range")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: {error!r}; {_JSONL}") from None
        yield arrival_us, *sizes


def _sizes(n_prompt: int, n_output: int) -> tuple[int, int]:
    """``ValueError`` unless all are whole numbers of a size that a request can have."""
    sizes = n_prompt, n_output
    if not all(type(n) is int and abs(n) <= _MOST_TOKENS for n in sizes):
        raise ValueError(f"{sizes} must be whole numbers up to {_MOST_TOKENS:,}")
    return sizes


def answered(path: str | Path) -> AnsweredTrace:
    """A load that `jaxlamina bench serve` has saved, in order of time, without requests that failed.

    ``UserError`` for another file, and for a load whose requests did not arrive when it says, since the
    client held them back (--max-concurrency)."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            result = json.load(file)
        found = _of_result(result)
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {error}; {_RESULT}") from None
    most = result.get("max_concurrency")
    if most is not None and not (isinstance(most, int) and most >= len(result["arrivals"])):
        raise UserError(
            f"{path}: requests did not arrive when it says, since --max-concurrency held them back in the "
            "client: measure without it"
        )
    return found


def _of_result(result: Any) -> AnsweredTrace:
    bench = result.get("bench") if isinstance(result, dict) else None
    if bench != "serve":
        raise ValueError(f"it is of bench {bench!r:.40}" if bench else "it is no bench's result")
    _check_s("duration", result.get("duration"), least=_LEAST_S)
    host_ms = result.get("host_ms")
    if host_ms is not None:
        _check_s("host_ms", host_ms, unit="milliseconds")
    requests = _requests(result)
    rows: list[tuple[int, int, int, float, float]] = []
    for i, (arrival_s, n_prompt, n_output, ttft_s, e2el_s) in enumerate(requests):
        try:
            _check_s("arrival", arrival_s)
            if ttft_s is None and e2el_s is None:  # it failed
                continue
            _check_s("ttft", ttft_s)
            _check_s("e2el", e2el_s, least=ttft_s)
            sizes = _sizes(n_prompt, n_output)
        except ValueError as error:
            raise ValueError(f"request {i}: {error}") from None
        if min(sizes) > 0:
            rows.append((round(1e6 * arrival_s), *sizes, ttft_s, e2el_s))
    if not rows:
        raise ValueError("no request was answered")
    rows.sort(key=lambda row: row[0])
    arrivals, prompts, outputs = np.array([row[:3] for row in rows], np.int64).T
    ttfts, e2els = np.array([row[3:] for row in rows], float).T
    arrivals -= round(1e6 * min(arrival_s for arrival_s, *_ in requests))
    n_left_out = len(requests) - len(rows)
    seconds = float(result["duration"])
    return AnsweredTrace(arrivals, prompts, outputs, ttfts, e2els, seconds, n_left_out, host_ms)


def _requests(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(arrival, prompt, output, TTFT, E2EL) of each."""
    names = ("arrivals", "input_lens", "output_lens", "ttfts", "e2els")
    columns = {name: result[name] for name in names if isinstance(result.get(name), list)}
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(f"it has no list of {', '.join(missing)}")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lists differ in length: {lengths}")
    return list(zip(*columns.values(), strict=True))


def _check_s(name: str, value: Any, least: float = 0.0, unit: str = "seconds") -> None:
    """``ValueError`` unless it is a time that can be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and least <= value <= _MOST_S):
        raise ValueError(f"{name} {value!r:.40} must be {unit} from {least:g} to {_MOST_S:g}")
