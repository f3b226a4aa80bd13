"""Perplexity by teacher-forced decode: every token goes through both workers, one step at a time.

Knows token windows and an executor; no scheduler, no sampler. Slower than a prefill would be, and that is the
point: it measures the path that serves, every read of KV in the form that it is stored in. As a program it
compares such forms: ``python -m jaxlamina.bench.perplexity TEXT_FILE --kv-dtype auto int8 int8-channel``.
With ``--calibration-headroom`` and ``--calibration-file`` those that are calibrated are calibrated in other
ways.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.kv import OutOfSlots, SlotAllocator
from jaxlamina.llm import LLM
from jaxlamina.run.executor import Executor
from jaxlamina.steps.batch import DecodeBatch
from jaxlamina.steps.buckets import Buckets
from jaxlamina.workers.spec import CALIBRATED_KV_DTYPES, KV_DTYPES


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp of the mean negative log-probability of ``n_scored_tokens`` tokens."""

    value: float
    n_scored_tokens: int


def windows_of(tokens: Sequence[int], n_windows: int, window_tokens: int) -> np.ndarray:
    """The first windows of a text ``[n_windows, window_tokens]`` int32, one after the other, nothing left
    out."""
    needed = n_windows * window_tokens
    if len(tokens) < needed:
        raise UserError(
            f"{n_windows} windows of {window_tokens} tokens need {needed} tokens, the text has {len(tokens)}"
        )
    return np.asarray(tokens[:needed], np.int32).reshape(n_windows, window_tokens)


def perplexity(
    executor: Executor,
    windows: np.ndarray,
    *,
    buckets: Buckets | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity over ``windows`` ``[B, T]`` int32, all as one batch, each from an empty context.

    The first token of a window is not scored. ``executor`` must have no request running: its slots are used
    from 0 on. ``on_step(done, total)`` reports progress. ``UserError`` if B × (T-1) slots do not fit.
    """
    n_rows, n_tokens = windows.shape
    if n_tokens < 2:
        raise UserError(f"a window of {n_tokens} tokens has none to score: give windows of 2 or more")
    buckets = buckets or Buckets.default(n_rows, n_tokens)
    try:
        dealt = SlotAllocator(executor.n_slots).allocate(n_rows * (n_tokens - 1))
    except OutOfSlots as error:
        raise UserError(f"{n_rows} windows of {n_tokens} tokens: {error}: give more kv_slots") from None
    slots = np.asarray(dealt, np.int32).reshape(n_tokens - 1, n_rows).T  # a step's new slots side by side
    scores = []
    for t in range(n_tokens - 1):
        batch = DecodeBatch.build(windows[:, t], list(slots[:, : t + 1]), buckets, executor.n_slots)
        scores.append(logprobs_of(executor.decode(batch)[:n_rows], windows[:, t + 1]))
        if on_step is not None:
            on_step(t + 1, n_tokens - 1)
    total = float(np.sum(np.asarray(jax.device_get(scores), np.float64)))
    n_scored = n_rows * (n_tokens - 1)
    return Perplexity(math.exp(-total / n_scored), n_scored)


@jax.jit
def logprobs_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probability of ``targets`` ``[B]`` under ``logits`` ``[B, V]`` float32."""
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def by_kv_dtype(
    model: Any,
    text: str,
    kv_dtypes: Sequence[str],
    n_windows: int,
    window_tokens: int,
    on_step: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Iterator[tuple[str, Perplexity]]:
    """A model's perplexity over the first windows of ``text``, no BOS, with each way to store KV.

    ``options`` are ``LLM``'s, those of calibration for the forms that are calibrated. ``UserError`` for a
    model without a tokenizer and for a text that is too short.
    """
    for kv_dtype in kv_dtypes:
        calibrated = kv_dtype in CALIBRATED_KV_DTYPES
        llm = LLM(
            model,
            kv_dtype=kv_dtype,
            max_num_seqs=n_windows,
            max_model_len=window_tokens,
            kv_slots=n_windows * (window_tokens - 1),
            **{name: x for name, x in options.items() if calibrated or not name.startswith("calibration_")},
        )
        if llm.tokenizer is None:
            raise UserError("the model has no tokenizer, and perplexity is measured on text")
        tokens = llm.tokenizer.encode(text, add_special_tokens=False)
        windows = windows_of(tokens, n_windows, window_tokens)
        yield kv_dtype, perplexity(llm.executor, windows, buckets=llm.buckets, on_step=on_step)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the perplexity with each ``--kv-dtype`` and its distance from the first, then a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxlamina.bench.perplexity", description="Perplexity by teacher-forced decode."
    )
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="of weights, and of KV where that is auto")
    parser.add_argument("--kv-dtype", nargs="+", default=list(KV_DTYPES), choices=KV_DTYPES)
    parser.add_argument("--windows", type=int, default=20, help="non-overlapping, from the text's start")
    parser.add_argument("--window-tokens", type=int, default=1024)
    parser.add_argument(
        "--calibration-file", type=Path, help="a text for int8-channel…; default: random tokens"
    )
    parser.add_argument("--calibration-headroom", type=float, help="of int8-channel…; default: LLM's")
    args = parser.parse_args(arguments)
    for path in (args.text, args.calibration_file):
        if path is not None and not path.is_file():
            raise UserError(f"there is no text file {path}")
    options = {"dtype": args.dtype, "calibration_headroom": args.calibration_headroom}
    if args.calibration_file is not None:
        options["calibration_tokens"] = args.calibration_file.read_text(encoding="utf-8")
    size = args.windows, args.window_tokens
    print(f"{args.model}, {size[0]} windows of {size[1]} tokens of {args.text.name}, {args.dtype}")
    found: dict[str, Perplexity] = {}
    text = args.text.read_text(encoding="utf-8")
    for kv_dtype, result in by_kv_dtype(args.model, text, args.kv_dtype, *size, **options):
        found[kv_dtype] = result
        first = found[args.kv_dtype[0]].value
        change = 100 * (result.value / first - 1)
        print(f"KV {kv_dtype:<24} {result.value:10.4f}  {change:+.3f} %", flush=True)
    values = {kv_dtype: result.value for kv_dtype, result in found.items()}
    print(
        json.dumps({"model": args.model, "windows": size[0], "window_tokens": size[1], "perplexity": values})
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
