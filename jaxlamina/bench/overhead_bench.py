"""What each layer adds to a request: forward passes, engine, text, server, command line; and latency by
request rate.

The same batch of requests goes in turns through the engine in this process, through a server in another, and
through the command line that talks to it. Knows `LLM`, a server's address and clocks; nothing of how results
are shown.

Source: FineInfer's report, section 4 (figures 3 to 9).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxlamina.bench import serve_bench, serve_client
from jaxlamina.bench.lists import listed, pair
from jaxlamina.bench.loads import Size, arrivals
from jaxlamina.bench.prompts import prompts as passages
from jaxlamina.bench.rounds import seconds_of
from jaxlamina.bench.serve_metrics import summary
from jaxlamina.bench.server_numbers import Numbers
from jaxlamina.errors import UserError
from jaxlamina.llm import LLM
from jaxlamina.run.executor import Executor, StepLogits, WrappedExecutor
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.server.client import Client
from jaxlamina.steps.step import Step
from jaxlamina.text.generated import GeneratedText

_COMMAND_S = 3600.0  # no batch here takes longer


@dataclass(frozen=True)
class OverheadCase:
    """A batch of ``copies`` equal requests."""

    size: Size
    copies: int

    def __str__(self) -> str:
        return f"{self.copies} × ({self.size.n_prompt}, {self.size.n_output})"


def cases_of(text: str, copies: int) -> list[OverheadCase]:
    """From "256x128,1024x1024", as ``--case`` has it; ``UserError`` for other text."""
    what = "like 256x128,1024x1024: prompt x output tokens"
    return [OverheadCase(Size(*found), copies) for found in listed("--case", text, pair, what)]


@dataclass
class CaseTimes:
    """Seconds of a batch, an attempt each: all of it through the engine, the server, the command line; and
    parts of it.

    ``forward``: all forward passes, each waited for, in a run of its own. ``tokenise``, ``detokenise``: of
    the same texts, by themselves. ``outside``: between a client and the server's engine thread, mean of the
    requests. ``start``: of a command that does nothing.
    """

    case: OverheadCase
    engine: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    command: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    tokenise: list[float] = field(default_factory=list)
    detokenise: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)

    def layers(self) -> dict[str, float]:
        """Seconds by layer; together they are the command's median time but for the difference between
        medians and sums.

        What is told by a difference may come out below 0 where it is smaller than the attempts' scatter.
        """
        text = [a + b for a, b in zip(self.tokenise, self.detokenise, strict=True)]
        return {
            "forward passes": statistics.median(self.forward),
            "engine: scheduling, batches, sampling": _less(self.engine, self.forward, text),
            "engine: tokenise": statistics.median(self.tokenise),
            "engine: detokenise": statistics.median(self.detokenise),
            "server: HTTP, JSON, threads": statistics.median(self.outside),
            "server: its engine, less this process's": _less(self.server, self.engine, self.outside),
            "command line: start": statistics.median(self.start),
            "command line: imports, files, looking": _less(self.command, self.server, self.start),
        }

    def to_dict(self) -> dict[str, Any]:
        components = {
            name: dict(zip(("q1_s", "median_s", "q3_s"), quartiles(getattr(self, name)), strict=True))
            for name in ("forward", "engine", "server", "command")
        }
        return {
            "case": str(self.case),
            "n_prompt": self.case.size.n_prompt,
            "n_output": self.case.size.n_output,
            "copies": self.case.copies,
            "n_attempts": len(self.engine),
            "components": components,
            "layers_s": self.layers(),
        }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _less(whole: Sequence[float], *parts: Sequence[float]) -> float:
    """Median of what is left of each attempt's whole."""
    return statistics.median(x - sum(y) for x, *y in zip(whole, *parts, strict=True))


@dataclass(frozen=True)
class LoadTimes:
    """A server under Poisson arrivals. ``normalised_s``: end-to-end latency over output tokens, mean of
    requests. ``batch``: sequences that got a token, mean over the engine's steps."""

    rate: float
    n_requests: int
    n_failed: int
    normalised_s: float | None
    client_s: float | None  # mean latency as clients see it
    engine_s: float | None  # mean latency as the server's engine thread sees it
    batch: float | None


class Timed(WrappedExecutor):
    """An executor whose every pass is waited for; ``seconds`` of all of them."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.seconds = 0.0

    def run(self, step: Step) -> StepLogits:
        began_s = time.perf_counter()
        logits = jax.block_until_ready(super().run(step))
        self.seconds += time.perf_counter() - began_s
        return logits


class Layers:
    """One model three times: ``llm`` here, the server at ``url``, and the command line against it."""

    def __init__(self, llm: LLM, url: str, model: str) -> None:
        if llm.tokenizer is None:
            raise UserError(f"{model} has no tokenizer: there is no text to measure")
        self._llm, self._url, self._client = llm, url, Client(url)
        self._tokenizer: Any = llm.tokenizer
        self._target = serve_client.Target(url, "completions", model, ignore_eos=True)

    def measure_case(
        self, case: OverheadCase, n_attempts: int, on_progress: Callable[[str], object] = lambda what: None
    ) -> CaseTimes:
        """``n_attempts`` of each way in turns, after one that is thrown away."""
        [ids] = passages(1, case.size.n_prompt, vocab_size=0, encode=self._encode)
        text = self._tokenizer.decode(ids)
        times, thrown_away = CaseTimes(case), CaseTimes(case)
        for i in range(n_attempts + 1):
            on_progress(f"{case}: attempt {i} of {n_attempts}")
            self._attempt(text, thrown_away if i == 0 else times)
        return times

    def _attempt(self, text: str, times: CaseTimes) -> None:
        seconds, tokens = self._generate(text, times.case)
        times.engine.append(seconds)
        times.tokenise.append(times.case.copies * seconds_of(lambda: self._encode(text)))
        times.detokenise.append(seconds_of(lambda: self._detokenise(tokens)))
        timed = self._llm.engine.executor = Timed(self._llm.engine.executor)
        try:
            self._generate(text, times.case)
        finally:
            self._llm.engine.executor = self._llm.executor
        times.forward.append(timed.seconds)
        self._serve(text, times)
        self._command(text, times)

    def _generate(self, text: str, case: OverheadCase) -> tuple[float, list[Sequence[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=case.size.n_output, ignore_eos=True)
        began_s = time.perf_counter()
        outputs = self._llm.generate([text] * case.copies, params, use_tqdm=False)
        return time.perf_counter() - began_s, [output.token_ids for output in outputs]

    def _serve(self, text: str, times: CaseTimes) -> None:
        n = times.case.copies
        load = serve_bench.Load([times.case.size] * n, [text] * n, [0.0] * n)
        before = Numbers.of(self._client)
        measured = asyncio.run(serve_bench.run(self._target, load))
        failed = next((a.error for a in measured.answers if a.error is not None), None)
        if failed is not None:
            raise UserError(f"a request to the server failed: {failed}")
        times.server.append(measured.duration_s)
        in_engine_s = Numbers.of(self._client).engine_latency_s(before)
        assert in_engine_s is not None
        times.outside.append(statistics.fmean(a.e2el_s for a in measured.answers) - in_engine_s)

    def _command(self, text: str, times: CaseTimes) -> None:
        body = {
            "prompt": text,
            "max_tokens": times.case.size.n_output,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        with tempfile.TemporaryDirectory(prefix="jaxlamina-") as folder:
            file = Path(folder, "requests.jsonl")
            file.write_text((json.dumps(body) + "\n") * times.case.copies)
            times.start.append(seconds_of(lambda: _jaxlamina("--version")))
            asked = ("batch", "--url", self._url, "--restart", str(file))
            times.command.append(seconds_of(lambda: _jaxlamina(*asked)))

    def _encode(self, text: str) -> Sequence[int]:
        found: Sequence[int] = self._tokenizer.encode(text)
        return found

    def _detokenise(self, rows: Sequence[Sequence[int]]) -> None:
        for tokens in rows:
            text = GeneratedText(self._tokenizer.detokenizer())
            for token in tokens:
                text.add(token)
                text.release(finished=False)
            text.finish()

    def measure_load(self, rate: float, sizes: Sequence[Size], *, seed: int) -> LoadTimes:
        """The server under requests of ``sizes`` that arrive at ``rate`` a second."""
        ids = asyncio.run(serve_client.look(self._url, None, None)).token_ids
        prompts = serve_client.prompts(sizes, ids, seed=seed)
        load = serve_bench.Load(sizes, prompts, arrivals(len(sizes), rate, seed=seed))
        before = Numbers.of(self._client)
        measured = asyncio.run(serve_bench.run(self._target, load))
        after = Numbers.of(self._client)
        found = summary(measured.answers, measured.duration_s)
        normalised_ms, client_ms = found["mean_normalized_latency_ms"], found["mean_e2el_ms"]
        return LoadTimes(
            rate,
            len(sizes),
            found["failed"],
            None if normalised_ms is None else normalised_ms / 1e3,
            None if client_ms is None else client_ms / 1e3,
            after.engine_latency_s(before),
            after.batch(before),
        )


def _jaxlamina(*arguments: str) -> None:
    """One command, as a user starts it. ``UserError`` with its last line if it fails."""
    found = subprocess.run(
        [sys.executable, "-m", "jaxlamina", *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
    )
    if found.returncode:
        last = (found.stderr or found.stdout).strip().splitlines()[-1:]
        raise UserError(f"jaxlamina {arguments[0]} failed: {''.join(last)}")
