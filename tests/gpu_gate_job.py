"""One process of one group of `gpu_gate`: runs cases, and leaves what each gave as a file in a folder.

    python gpu_gate_job.py '{"group": …, "cases": […], "scale": …, "platform": …, "folder": …, "n_gpus": …,
    "cluster": …}'

With a cluster it is one of the ranks: rank 0 runs the cases, the others serve. For each case, by its name: a
file of ``logprobs`` of given tokens and which of them were ``scored``, or of ``tokens`` that were written; or
one that says why there are none, and this process ends, since an error of a GPU spoils all that comes after
it. Without a group it makes the references of random models: the whole sequence at once, in float32.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

JOB: dict[str, Any] = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
if JOB.get("platform") == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share a GPU

import gpu_gate_cases as cases
import jax
import numpy as np
from gpu_gate_cases import Case, Size

from jaxlamina import LLM, SamplingParams, ranks
from jaxlamina.bench.perplexity import logprobs_of
from jaxlamina.engine.engine import Engine
from jaxlamina.job.cluster import Cluster
from jaxlamina.models import ModelConfig, apply, random_params
from jaxlamina.models.causal_lm import built
from jaxlamina.steps.buckets import Buckets
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.weights import open_checkpoint
from jaxlamina.weights.sources import InMemoryModel
from jaxlamina.workers import DecodeBatch, PrefillBatch
from launch.roles import place

DATA = Path(__file__).parent / "data" / "gpu_gate.npz"
FAILED = 5
_SHARP = (
    4.0  # random queries are so much larger: attention then falls on few tokens, and one wrong slot is seen
)


def random_model(name: str) -> InMemoryModel:
    config = ModelConfig.from_hf(cases.MODELS[name])
    params = {n: np.array(x) for n, x in random_params(config, seed=5).items()}
    return InMemoryModel(config, {n: _SHARP * x if "q_proj" in n else x for n, x in params.items()})


def demo_model() -> InMemoryModel:
    checkpoint = open_checkpoint(cases.DEMO)
    return InMemoryModel(checkpoint.config, {n: np.array(x) for n, x in checkpoint.load("float32").items()})


def reference_file(model: str, folder: Path) -> Path:
    return DATA if model == "demo" else folder / f"reference {model}.npz"


def make_reference(model: str, size: Size, path: Path) -> None:
    """As `gpu_gate_reference` makes one, by `apply` over whole sequences."""
    source = random_model(model)
    params = source.load("float32", jax.devices()[0])
    rng = np.random.default_rng(11)
    windows = rng.integers(3, source.config.vocab_size, (size.rows, size.tokens), dtype=np.int32)
    run = jax.jit(partial(apply, source.config))

    def logprobs(rows: np.ndarray) -> np.ndarray:
        at = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int32), rows.shape)
        return np.asarray(jax.nn.log_softmax(run(params, rows, at).astype(np.float32)))

    given = np.stack([logprobs(row[None])[0, np.arange(size.tokens - 1), row[1:]] for row in windows])
    prompts = rng.integers(3, source.config.vocab_size, (size.few, 9), dtype=np.int32)
    rows = np.concatenate([prompts, np.zeros((size.few, size.written), np.int32)], axis=1)
    margins = np.zeros((size.few, size.written), np.float32)
    for i in range(size.written):
        following = logprobs(rows)[:, prompts.shape[1] - 1 + i]
        second, best = np.sort(following)[:, -2:].T
        margins[:, i] = best - second
        rows[:, prompts.shape[1] + i] = following.argmax(-1)
    np.savez(path, windows=windows, logprobs=given, prompts=prompts, tokens=rows[:, prompts.shape[1] :], margins=margins)  # fmt: skip


class Forced:
    """Windows ``[B, T]`` whose tokens are given, run by an executor in slots at random over its pool.
    ``logprobs`` and ``scored`` ``[B, T - 1]``: of each token after a window's first, and whether it was asked
    about."""

    def __init__(self, executor: Any, windows: np.ndarray, chunk: int) -> None:
        self._executor, self._windows = executor, windows
        n_rows, n_tokens = windows.shape
        self._buckets = Buckets(batch=(n_rows,), prompt=(max(2, chunk),), context=(n_tokens,))
        self._chunk = chunk
        self._rng = np.random.default_rng(1)
        self._slots = self._deal(np.arange(executor.n_slots))
        self._stored = [0] * n_rows  # tokens of each row, from its first on
        self._found: list[tuple[Sequence[int], list[int], jax.Array]] = []

    def result(self) -> dict[str, np.ndarray]:
        n_rows, n_tokens = self._windows.shape
        logprobs = np.zeros((n_rows, n_tokens - 1), np.float32)
        scored = np.zeros((n_rows, n_tokens - 1), bool)
        for (rows, at, _), values in zip(
            self._found, jax.device_get([x for *_, x in self._found]), strict=True
        ):
            logprobs[rows, at], scored[rows, at] = values[: len(rows)], True
        return {"logprobs": logprobs, "scored": scored}

    def decode(self) -> None:
        """Every token that is left, rows side by side."""
        while rows := self._unfinished():
            self._score(rows, self._executor.decode(self._batch(rows)))

    def decode_some(self, n_steps: int) -> None:
        for _ in range(n_steps):
            rows = self._unfinished()
            self._score(rows, self._executor.decode(self._batch(rows)))

    def prompts(self, n_tokens: int, beside_decodes: bool) -> None:
        """The first tokens of each row, in chunks; with ``beside_decodes``, each in a decode step of the rows
        before it."""
        for row in range(len(self._windows)):
            for start in range(0, n_tokens, self._chunk):
                earlier = [r for r in self._unfinished() if r < row] if beside_decodes else []
                chunk = self._prompt(row, start, min(n_tokens, start + self._chunk))
                if earlier:
                    logits, [of_chunk] = self._executor.run(Step(self._batch(earlier), (PromptPart(chunk),)))
                    self._score(earlier, logits)
                else:
                    of_chunk = self._executor.prefill(chunk)
                self._stored[row] = min(n_tokens, start + self._chunk) - 1
                self._score([row], of_chunk)

    def prompts_together(self, n_tokens: int) -> None:
        """The first tokens of all rows, a chunk of each in one call, after different numbers of earlier ones;
        and a row of padding."""
        n_slots, ends = self._executor.n_slots, [0] * len(self._windows)
        while min(ends) < n_tokens:
            rows = [row for row, end in enumerate(ends) if end < n_tokens]
            starts = [ends[row] for row in rows]
            stops = [
                min(n_tokens, s + self._chunk - (row if s == 0 else 0))
                for row, s in zip(rows, starts, strict=True)
            ]
            spans = list(zip(rows, starts, stops, strict=True))
            batch = PrefillBatch.build(
                [*(self._windows[row, start:stop] for row, start, stop in spans), [0]],
                [*(self._slots[row, start:stop] for row, start, stop in spans), [n_slots]],
                self._buckets,
                n_slots,
                [*(self._slots[row, :start] for row, start, _ in spans), []],
            )
            logits = self._executor.prefill(batch)
            for row, _, stop in spans:
                self._stored[row], ends[row] = stop - 1, stop
            self._score(rows, logits)

    def move(self) -> None:
        """All that is stored goes to the host and comes back into other slots, the first row's from a copy of
        it."""
        executor, n_rows = self._executor, len(self._windows)
        held = [self._slots[row, : self._stored[row]].copy() for row in range(n_rows)]
        used = np.concatenate(held)
        copy = self._rng.permutation(np.setdiff1d(np.arange(executor.n_slots), used))[: len(held[0])]
        executor.copy_slots(held[0], copy)
        executor.release(held[0])
        held[0] = copy
        used = np.concatenate(held)
        host = self._rng.permutation(len(used))
        executor.move_out(used, host)
        executor.release(used)
        self._slots = self._deal(np.arange(executor.n_slots))
        back = np.concatenate([self._slots[row, : self._stored[row]] for row in range(n_rows)])
        executor.move_in(host, back)

    def _deal(self, free: np.ndarray) -> np.ndarray:
        return self._rng.permutation(free)[: self._windows.size].reshape(self._windows.shape).astype(np.int32)

    def _unfinished(self) -> list[int]:
        last = self._windows.shape[1] - 1
        return [row for row, n in enumerate(self._stored) if n < last]

    def _batch(self, rows: Sequence[int]) -> DecodeBatch:
        tokens = [self._windows[row, self._stored[row]] for row in rows]
        slots = [self._slots[row, : self._stored[row] + 1] for row in rows]
        return DecodeBatch.build(tokens, slots, self._buckets, self._executor.n_slots)

    def _prompt(self, row: int, start: int, stop: int) -> PrefillBatch:
        slots = self._slots[row]
        earlier = [slots[:start]] if start else ()
        tokens = self._windows[row, start:stop]
        return PrefillBatch.build(
            [tokens], [slots[start:stop]], self._buckets, self._executor.n_slots, earlier
        )

    def _score(self, rows: Sequence[int], logits: jax.Array) -> None:
        """Logits after each of these rows' next token, which is stored now; rows past them are padding."""
        at = [self._stored[row] for row in rows]
        targets = np.zeros(len(logits), np.int32)
        targets[: len(rows)] = [self._windows[row, n + 1] for row, n in zip(rows, at, strict=True)]
        self._found.append((list(rows), at, logprobs_of(logits, targets)))
        for row in rows:
            self._stored[row] += 1


def forced(case: Case, executor: Any, windows: np.ndarray, size: Size) -> dict[str, np.ndarray]:
    if case.how not in ("decode", "long"):
        windows = windows[: size.few]
    run = Forced(executor, windows, size.chunk)
    if case.how in ("chunks", "mixed", "moves"):
        run.prompts(size.prompt, case.how == "mixed")
    if case.how == "together":
        run.prompts_together(size.prompt)
    if case.how == "moves":
        run.decode_some((size.tokens - size.prompt) // 2)
        run.move()
    run.decode()
    return run.result()


def written(case: Case, llm: LLM, reference: Any, size: Size) -> dict[str, np.ndarray]:
    """Greedy tokens by the engine, of which it may have to put some aside meanwhile."""
    prompts = [[int(t) for t in row if t >= 0] for row in reference["prompts"]]
    longest = max(map(len, prompts)) + size.written
    buckets = Buckets(batch=(len(prompts),), prompt=(8,), context=(longest,))
    host = case.llm.get("host_kv_slots", 0)
    engine = Engine(
        llm.executor, vocab_size=llm.model.vocab_size, buckets=buckets, max_num_seqs=len(prompts),
        max_model_len=longest, max_num_batched_tokens=8, host_kv_slots=host, headroom=0.0, **case.engine,
    )  # fmt: skip
    params = SamplingParams(max_tokens=size.written, ignore_eos=True, temperature=0.0)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    found: dict[str, Any] = {}
    while len(found) < len(ids):
        found |= {event.request_id: event.output for event in engine.step() if event.output is not None}
    engine.check_integrity()
    moved = engine.kv_stats()["n_moved_in_tokens"]
    return {"tokens": np.array([found[i].outputs[0].token_ids for i in ids]), "n_moved": np.array(moved)}


class Held:
    """The model and the executor of the latest case, kept for the next one that wants the same."""

    def __init__(self, group: Any, scale: str, folder: Path) -> None:
        self._group, self._scale, self._folder = group, scale, folder
        self._sources: dict[str, Any] = {}
        self._key: Any = None
        self._llm: LLM | None = None
        self._usual: dict[str, Any] = {}

    def reference(self, model: str) -> Any:
        return np.load(reference_file(model, self._folder))

    def windows(self, case: Case) -> np.ndarray:
        if case.how == "long":
            text = (DATA.parent / "wiki.test.raw.head").read_text(encoding="utf-8")
            tokens = open_checkpoint(cases.DEMO).tokenizer().encode(text, add_special_tokens=False)
            rows, width = cases.LONG[self._scale]
            return np.asarray(tokens[: rows * width], np.int32).reshape(rows, width)
        size = case.size(self._scale)
        return self.reference(case.model)["windows"][: size.rows, : size.tokens].astype(np.int32)

    def llm(self, case: Case) -> LLM:
        key = case.model, case.own, case.dtype, case.kv_dtype, sorted(case.llm.items())
        if key != self._key:
            self._key = self._llm = None  # what it holds goes first
            self._llm = self._make(case)
            self._usual, self._key = {}, key
        assert self._llm is not None
        executor: Any = self._llm.executor
        for name, value in self._usual.items():
            setattr(executor, name, value)
        self._usual = {name: getattr(executor, name) for name in case.at}
        for name, value in case.at.items():
            setattr(executor, name, value)
        return self._llm

    def _make(self, case: Case) -> LLM:
        size = case.size(self._scale)
        source = f"plain_llama:demo_{case.dtype}" if case.own else case.model
        if source not in self._sources:
            made = partial(built, source) if case.own else demo_model if source == "demo" else None
            self._sources[source] = made() if made is not None else random_model(source)
        n_slots = max(size.rows * size.tokens, 2 * size.few * size.tokens) + 7
        longest = size.tokens
        if case.model == "demo":
            rows, width = cases.LONG[self._scale]
            n_slots, longest = max(n_slots, rows * width + 7), max(longest, width)
        options: dict[str, Any] = {
            "kv_slots": n_slots, "host_kv_slots": size.few * size.tokens, "max_model_len": longest,
            "max_num_seqs": size.rows, "dtype": case.dtype, "kv_dtype": case.kv_dtype, "group": self._group,
        }  # fmt: skip
        return LLM(self._sources[source], **options | dict(case.llm))


def run_cases(job: dict[str, Any], group: Any) -> int:
    """What each case gave goes into a file; the exit code."""
    folder, scale = Path(job["folder"]), job["scale"]
    held = Held(group, scale, folder)
    for case in (Case(**of) for of in job["cases"]):
        began = time.perf_counter()
        to = folder / f"{job['group']} - {case.name}"
        print(f"case {case.name}", flush=True)
        try:
            llm, size = held.llm(case), case.size(scale)
            if case.how == "tokens":
                found = written(case, llm, held.reference(case.model), size)
            else:
                found = forced(case, llm.executor, held.windows(case), size)
            check_ran_so(case, llm.executor)
        except Exception as error:  # noqa: BLE001 (whatever a case dies of is its result)
            traceback.print_exc()
            to.with_suffix(".error").write_text(f"{type(error).__name__}: {str(error).strip()[:600]}")
            return FAILED
        begun = to.with_suffix(".part.npz")
        np.savez(begun, **found, seconds=np.array(time.perf_counter() - began))
        begun.replace(to.with_suffix(".npz"))  # whole, or not there
    return 0


def check_ran_so(case: Case, executor: Any) -> None:
    """Ranks' steps were what the case is named after, and not what another setting made of them."""
    wanted = {name: n for name, n in case.at.items() if name in ("n_batches", "mini_batches")}
    if wanted and not any(
        all(getattr(shape, name) == n for name, n in wanted.items()) for shape in executor.matched.shapes
    ):
        raise AssertionError(f"no step ran with {wanted}: {[*map(str, executor.matched.shapes)]}")


def main(job: dict[str, Any]) -> int:
    if "references" in job:
        for model, size in job["references"].items():
            make_reference(model, Size(**size), reference_file(model, Path(job["folder"])))
        return 0
    if job["cluster"] is None:
        code = run_cases(job, None)
    else:
        at = place(os.environ)
        if job["platform"] != "cpu":
            os.environ["JAXLAMINA_DEVICE"] = str((at.local_rank or 0) % job["n_gpus"])
        cluster = Cluster.load(None, job["cluster"])
        if at.rank > 0:
            return ranks.serve(cluster, at.rank)
        group = ranks.join(cluster, 0)
        code = run_cases(job, group)
        if code:
            os._exit(code)  # a program may wait for ever for one that failed
        group.close()
    return code


if __name__ == "__main__":
    sys.exit(main(JOB))
