"""transformers' continuous batching (`generate_batch`'s manager) as `jaxlamina bench throughput` compares
with it.

Made and run in a process of its own (`processes`). Knows torch and transformers; nothing of rounds or
results.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxlamina.bench.loads import Size
from jaxlamina.bench.machine import n_cores
from jaxlamina.bench.peers import flash_attention, transformers_model
from jaxlamina.bench.shapes import kv_token_bytes
from jaxlamina.models import ModelConfig
from jaxlamina.models.causal_lm import decoder

_PAGE_TOKENS = 256  # transformers' own default
_OF_FREE_MEMORY = 0.8  # for KV, where all of it does not fit: what it takes itself
_SILENCE_S = 600.0


@dataclass(frozen=True)
class BatchingJob:
    """``model``: a checkpoint, or None for random weights of ``config``. The other limits as of `LLM`."""

    model: str | None
    config: ModelConfig | None
    dtype: str
    sizes: Sequence[Size]
    max_num_seqs: int
    max_num_batched_tokens: int


class ContinuousBatching:
    """As many sequences at once and prompt tokens a step as ours, KV for as many as can be there at once,
    greedy, no end-of-sequence token, no shared prefixes, no text."""

    def __init__(self, job: BatchingJob) -> None:
        import jax
        import torch
        import transformers
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # Weights are read by JAX: it must not take the GPU's memory.
        jax.config.update("jax_platforms", "cpu")
        from jaxlamina.weights import open_checkpoint

        assert job.config is not None, "only a model of ours is compared"
        on_gpu = torch.cuda.is_available() and os.environ.get("JAX_PLATFORMS") != "cpu"
        self.platform = "gpu" if on_gpu else "cpu"
        torch.set_num_threads(n_cores())
        weights = None if job.model is None else open_checkpoint(job.model).load()
        self._torch = torch
        self._model = transformers_model(
            job.config,
            getattr(torch, job.dtype),
            "cuda" if on_gpu else "cpu",
            weights,
            flash_attention() if on_gpu and job.dtype != "float32" else None,
        )
        n_blocks = needed_blocks(job.sizes, job.max_num_seqs)
        if on_gpu:
            block_bytes = _PAGE_TOKENS * kv_token_bytes(decoder(job.config), self._model.dtype.itemsize)
            n_blocks = min(n_blocks, int(_OF_FREE_MEMORY * self.free_bytes() / block_bytes))
        self._manager_options: dict[str, Any] = {
            "generation_config": transformers.GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
            ),
            "continuous_batching_config": ContinuousBatchingConfig(
                **_page_option(ContinuousBatchingConfig),
                num_blocks=n_blocks,
                max_batch_tokens=max(job.max_num_batched_tokens, job.max_num_seqs),
                max_requests_per_batch=job.max_num_seqs,
                allow_block_sharing=False,
            ),
        }
        shortest = min(job.sizes)
        self.run([[1] * shortest.n_prompt] * min(2, job.max_num_seqs), [2] * min(2, job.max_num_seqs))
        self._attention: str = self._model.config._attn_implementation
        self.note = (
            f"torch {'CUDA' if on_gpu else 'CPU'}, continuous batching, {self._attention} attention, "
            f"KV of {n_blocks * _PAGE_TOKENS:,} tokens, {job.max_num_batched_tokens} tokens a step at most"
        )

    def where(self) -> tuple[str, int]:
        """("cpu" or "gpu", bytes that are free on the GPU, 0 for none)."""
        return self.platform, self.free_bytes() if self.platform == "gpu" else 0

    def heading(self) -> str:
        """What a table's heading must say of it: whether this is its way at best."""
        return heading(self._attention, self.platform)

    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info()[0])

    def run(
        self, prompts: Sequence[Sequence[int]], n_outputs: Sequence[int]
    ) -> tuple[float, list[list[int]]]:
        """Seconds from the first request to the last token, and each request's tokens."""
        manager = self._model.init_continuous_batching(**self._manager_options)
        manager.start()
        try:
            began_s = time.perf_counter()
            for i, (prompt, n) in enumerate(zip(prompts, n_outputs, strict=True)):
                manager.add_request(list(prompt), request_id=str(i), max_new_tokens=n)
            found: dict[int, list[int]] = {}
            until_s = began_s + _SILENCE_S
            while len(found) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    found[int(result.request_id)] = list(result.generated_tokens)
                    until_s = time.perf_counter() + _SILENCE_S
                elif not manager.is_running() or time.perf_counter() > until_s:
                    raise RuntimeError("its continuous batching stopped before all requests were done")
            seconds = time.perf_counter() - began_s
        finally:
            manager.stop(block=True, timeout=_SILENCE_S, keep_for_next_session=True)
        return seconds, [found[i] for i in range(len(prompts))]


def heading(attention: str, platform: str) -> str:
    """On GPUs continuous batching is made for flash attention; any other builds a mask of all tokens of a
    step by all that are stored."""
    if platform == "gpu" and "flash" not in attention:
        return f"{attention}, its slow way"
    return attention


def needed_blocks(sizes: Sequence[Size], max_num_seqs: int) -> int:
    """Pages of KV that hold any ``max_num_seqs`` of these requests at once."""
    pages = sorted((-(-size.n_tokens // _PAGE_TOKENS) for size in sizes), reverse=True)
    return sum(pages[:max_num_seqs]) + 1


def _page_option(config: type) -> dict[str, Any]:
    """A page's tokens under the name that this transformers has for them: newer ones have another."""
    known = inspect.signature(config).parameters
    return {"page_size" if "page_size" in known else "block_size": _PAGE_TOKENS}
