"""What a cached prefix saves: time to the first token of two requests that share most of their prompt.

Knows `LLM` and its engine; nothing of how results are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlamina.bench.rounds import ratios, record_of
from jaxlamina.errors import UserError

# The second request's time to first token, over the first's, with all programs compiled.
RATIO_LIMIT = 0.1


@dataclass(frozen=True)
class PrefixTimes:
    """Times to the first token (prefill and sampling) of a first request, and of a second that shares its
    prefix."""

    model: str
    dtype: str
    split: bool
    n_shared_tokens: int
    n_own_tokens: int
    first_s: tuple[float, ...]  # a round each
    second_s: tuple[float, ...]
    n_computed_first: int  # prompt tokens that were run through the model
    n_computed_second: int
    same_tokens: bool  # the second's tokens are those it has with an empty cache
    n_cached_tokens: int  # of that prompt, where the cache was not empty

    @property
    def ratio(self) -> float:
        """Median of the rounds' second over first."""
        return statistics.median(ratios(self.second_s, self.first_s))

    def to_dict(self) -> dict[str, Any]:
        return record_of(self, "ratio") | {
            "first_median_s": statistics.median(self.first_s),
            "second_median_s": statistics.median(self.second_s),
            "ratio_limit": RATIO_LIMIT,
        }


def measure(
    model: str = "smollm2-135m-instruct",
    *,
    n_shared_tokens: int = 1000,
    n_own_tokens: int = 16,
    n_rounds: int = 5,
    dtype: str = "float32",
    split: bool = True,
    llm: Any | None = None,
) -> PrefixTimes:
    """Times ``n_rounds`` pairs of requests; a pair before them compiles. Prompts are random tokens, new each
    round.

    ``llm``: one to use instead of opening ``model``; its prefix cache is emptied. ``UserError`` if it has
    none.
    """
    from jaxlamina.llm import LLM

    if min(n_shared_tokens, n_own_tokens, n_rounds) < 1:
        raise UserError(f"{n_shared_tokens=}, {n_own_tokens=} and {n_rounds=} must be at least 1")
    n_tokens = n_shared_tokens + n_own_tokens
    if llm is None:
        length = n_tokens + 8
        llm = LLM(
            model, dtype=dtype, split=split, max_num_seqs=1, max_model_len=length, kv_slots=4 * length,
            use_tqdm_on_load=False,
        )  # fmt: skip
    if llm.engine.scheduler.prefix_cache is None:
        raise UserError("the model was opened with prefix_caching=False: there is nothing to measure")
    rng = np.random.default_rng(0)

    def prompts() -> tuple[list[int], list[int]]:
        shared = rng.integers(0, llm.config.vocab_size, n_shared_tokens).tolist()
        own = rng.integers(0, llm.config.vocab_size, (2, n_own_tokens))
        own[1, 0] = (own[0, 0] + 1) % llm.config.vocab_size
        return [*shared, *own[0].tolist()], [*shared, *own[1].tolist()]

    def ask(prompt: Sequence[int]) -> tuple[float, int]:
        before = llm.engine.stats.n_prompt_tokens_computed
        seconds = _first_token_s(llm, prompt)
        return seconds, llm.engine.stats.n_prompt_tokens_computed - before

    for prompt in prompts():
        ask(prompt)
    first: list[tuple[float, int]] = []
    second: list[tuple[float, int]] = []
    for _ in range(n_rounds):
        llm.reset_prefix_cache()
        a, b = prompts()
        first.append(ask(a))
        second.append(ask(b))
    return PrefixTimes(
        model,
        dtype,
        split,
        n_shared_tokens,
        n_own_tokens,
        tuple(seconds for seconds, _ in first),
        tuple(seconds for seconds, _ in second),
        first[-1][1],
        second[-1][1],
        *_same_tokens(llm, b),
    )


def _first_token_s(llm: Any, prompt: Sequence[int]) -> float:
    from jaxlamina.sampling.params import SamplingParams

    began = time.perf_counter()
    request_id = llm.engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    while not llm.engine.step():
        pass
    seconds = time.perf_counter() - began
    llm.engine.abort(request_id)
    return seconds


def _same_tokens(llm: Any, prompt: Sequence[int]) -> tuple[bool, int]:
    """Whether four greedy tokens after a cached prefix are those of the whole prompt computed, and how many
    tokens were cached."""
    from jaxlamina.sampling.params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    [cached] = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    llm.reset_prefix_cache()
    [computed] = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    return cached.token_ids == computed.token_ids, cached.n_cached_tokens
