"""The programs that `jaxlamina bench decode` times, behind one interface: prompts in, greedy tokens and
seconds out.

Each is loaded in a process of its own (`processes`), so that no peer's threads, allocator or import order
touches another's times. All compute the same: greedy tokens of prompts of one length, in float32, on every
core they may use. Seconds are split where the prompts' own pass has given each row its first token; decode
seconds cover `n_steps` steps from there on, each ending with the chosen tokens on the host. No peer turns
tokens into text.
"""

from __future__ import annotations

import importlib.util
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxlamina.bench.machine import n_cores
from jaxlamina.errors import UserError
from jaxlamina.model_files import is_code
from jaxlamina.models import ModelConfig


@dataclass(frozen=True)
class PeerJob:
    """What a peer is loaded for: the model, and the largest batch and longest sequence it will be given."""

    model: str
    max_batch: int
    max_length: int  # tokens of a prompt and all its decode steps
    async_scheduling: bool = True  # of our engine
    quantized: bool = False  # a GGUF's own matrices, not decoded to float32


@dataclass(frozen=True)
class Decoded:
    """One run: `n_steps + 1` tokens a row, seconds of the prompts' pass and of the steps after it."""

    tokens: list[list[int]]
    prefill_s: float
    decode_s: float


def opened(model: str | Path) -> Any:
    """A checkpoint, or what a user's own "package.module:build" gives."""
    from jaxlamina.models.causal_lm import built
    from jaxlamina.weights import open_checkpoint

    return built(str(model)) if is_code(str(model)) else open_checkpoint(model)


def _checkpoint(model: str) -> Any:
    if is_code(model):
        raise UserError(f"{model} is a function of its user's, which nobody else runs")
    return opened(model)


class Peer(Protocol):
    """A loaded model. `note` says what a reader should know of how it is run."""

    note: str

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> Decoded: ...


class Ours:
    """This project's engine, stepped by hand: what `LLM.generate` does, less turning tokens into text."""

    def __init__(self, job: PeerJob, *, split: bool) -> None:
        from jaxlamina.llm import LLM
        from jaxlamina.weights.sources import InMemoryModel

        self.note = "model worker and attention worker, KV in float32" if split else "one program a step"
        found = opened(job.model)
        config = None if job.quantized else found.model.config
        if job.quantized:
            self.note += "; matrices as the GGUF has them"
        # Prompts that take the engine several steps to admit put their first rows that many tokens ahead.
        length = min(job.max_length + 1 + job.max_batch, found.model.max_len)
        self._llm = LLM(
            # no tokenizer: nothing is turned into text
            found if config is None else InMemoryModel(config, found.load(np.float32)),
            dtype="float32",
            quantization="gguf" if job.quantized else "none",
            split=split,
            max_num_seqs=job.max_batch,
            max_model_len=length,
            max_num_batched_tokens=job.max_batch * length,  # all prompts first, as others do it
            kv_slots=job.max_batch * length,
            prefix_caching=False,  # every round is to do the prompts' own pass
            async_scheduling=job.async_scheduling,
        )

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> Decoded:
        import jax
        import jax.numpy as jnp

        from jaxlamina.sampling.params import SamplingParams

        engine = self._llm.engine
        params = SamplingParams(max_tokens=n_steps + len(prompts), temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        tokens: dict[str, list[int]] = {engine.add_request(prompt, params): [] for prompt in prompts}

        def step() -> None:
            for event in engine.step():
                tokens[event.request_id].append(event.token_id)

        while not all(tokens.values()):
            step()
        prefilled = time.perf_counter()
        before = sum(map(len, tokens.values()))
        for _ in range(n_steps):
            step()
        decode_s = time.perf_counter() - prefilled
        for request_id in tokens:
            engine.abort(request_id)
        jax.block_until_ready(
            jnp.zeros(()) + 1
        )  # after a step that was launched ahead: the next peer is to be alone
        if sum(map(len, tokens.values())) - before != n_steps * len(prompts):
            raise UserError(
                "the engine could not keep all rows running; use a smaller --batch, --prompt or --tokens"
            )
        rows = [row[: n_steps + 1] for row in tokens.values()]
        return Decoded(rows, prefilled - start, decode_s)


def flash_attention() -> str | None:
    """transformers' newest flash attention for CUDA that is to be had here, by a package of its own or by
    `kernels`."""
    from transformers.utils import import_utils

    for version in (3, 2):
        is_there = getattr(import_utils, f"is_flash_attn_{version}_available", None)
        if is_there is None:
            continue
        by_kernels = {"kernels_fallback_ok": True} if inspect.signature(is_there).parameters else {}
        if is_there(**by_kernels):
            return f"flash_attention_{version}"
    return None


def transformers_model(
    config: ModelConfig,
    dtype: Any,
    device: str,
    weights: Mapping[str, Any] | None,
    attention: str | None = None,
) -> Any:
    """transformers' own model of this shape, with these weights or random ones, for inference. ``attention``:
    None for its own choice."""
    import torch
    import transformers

    from jaxlamina.weights.fused import fused

    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config.to_hf()),
            dtype=dtype,
            **({"attn_implementation": attention} if attention else {}),
        )
    if weights is not None:
        tensors = {name: torch.from_numpy(np.array(x)) for name, x in fused(config, weights).items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise UserError(f"transformers does not take these weights: {missing=} {unexpected=}")
        model.tie_weights()
    return model.eval()


class Transformers:
    """Hugging Face transformers on torch: a plain loop of forward passes with its KV cache.

    The loop is what `generate` does per token, less its bookkeeping: measured, up to 5 % faster.
    """

    note = "torch CPU, sdpa attention, forward loop with use_cache"

    def __init__(self, job: PeerJob) -> None:
        import torch

        if job.quantized:
            raise UserError("it decodes a GGUF's matrices to float32: leave out --quantized")
        torch.set_num_threads(n_cores())
        checkpoint = _checkpoint(job.model)
        self._torch = torch
        self._model = transformers_model(checkpoint.config, torch.float32, "cpu", checkpoint.load())

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> Decoded:
        torch, model = self._torch, self._model
        with torch.inference_mode():
            start = time.perf_counter()
            out = model(torch.tensor([list(p) for p in prompts]), use_cache=True, logits_to_keep=1)
            newest = out.logits[:, -1].argmax(-1, keepdim=True)
            chosen = [newest.tolist()]
            prefilled = time.perf_counter()
            for _ in range(n_steps):
                out = model(newest, past_key_values=out.past_key_values, use_cache=True)
                newest = out.logits[:, -1].argmax(-1, keepdim=True)
                chosen.append(newest.tolist())
            end = time.perf_counter()
        return Decoded(
            [[step[b][0] for step in chosen] for b in range(len(prompts))], prefilled - start, end - prefilled
        )


class LlamaCpp:
    """llama.cpp through llama-cpp-python's plain C interface, on an F32 GGUF made of the model's own file, or
    on that file."""

    def __init__(self, job: PeerJob) -> None:
        import llama_cpp

        from jaxlamina.bench.gguf_f32 import f32_gguf

        self._c = llama_cpp
        checkpoint = _checkpoint(job.model)
        if checkpoint.kind != "gguf":
            raise UserError(f"llama.cpp needs a GGUF model, {job.model} is {checkpoint.kind}")
        path = Path(checkpoint.path) if job.quantized else f32_gguf(Path(checkpoint.path))
        self.note = f"{'its own' if job.quantized else 'F32'} GGUF; KV cache in F16, its default"
        llama_cpp.llama_backend_init()
        self._silence = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._silence, None)
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise UserError(f"llama.cpp could not load {path}: remove it and run again")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._length = job.max_length + 1
        self._context: Any = None
        self._context_rows = 0

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> Decoded:
        c, n = self._c, len(prompts)
        context = self._context_for(n)
        c.llama_memory_clear(c.llama_get_memory(context), True)
        n_prompt = len(prompts[0])
        batch = c.llama_batch_init(max(n, n * n_prompt), 0, 1)
        try:
            start = time.perf_counter()
            newest = self._run(
                context,
                batch,
                [
                    (token, at, b, at == n_prompt - 1)
                    for b, p in enumerate(prompts)
                    for at, token in enumerate(p)
                ],
            )
            tokens = [[t] for t in newest]
            prefilled = time.perf_counter()
            for step in range(n_steps):
                newest = self._run(
                    context, batch, [(t, n_prompt + step, b, True) for b, t in enumerate(newest)]
                )
                for row, token in zip(tokens, newest, strict=True):
                    row.append(token)
            return Decoded(tokens, prefilled - start, time.perf_counter() - prefilled)
        finally:
            c.llama_batch_free(batch)

    def _run(self, context: Any, batch: Any, entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """One llama_decode of (token, position, row, wants logits); the likeliest token where logits were
        wanted."""
        for i, (token, position, row, wants_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        batch.n_tokens = len(entries)
        code = self._c.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        wanted = [i for i, entry in enumerate(entries) if entry[3]]
        rows = (
            np.ctypeslib.as_array(self._c.llama_get_logits_ith(context, i), (self._vocab_size,))
            for i in wanted
        )
        return [int(row.argmax()) for row in rows]

    def _context_for(self, n_rows: int) -> Any:
        """A context for exactly so many sequences: one made for more would scan the others' cells."""
        c = self._c
        if self._context is not None and self._context_rows != n_rows:
            c.llama_free(self._context)
            self._context = None
        if self._context is None:
            params = c.llama_context_default_params()
            each = -(-self._length // 256) * 256  # llama.cpp pads a sequence's cells to 256
            params.n_ctx, params.n_seq_max = each * n_rows, n_rows
            params.n_batch, params.n_ubatch = max(512, n_rows * self._length), 512
            params.n_threads = params.n_threads_batch = n_cores()
            self._context = c.llama_init_from_model(self._model, params)
            self._context_rows = n_rows
            if not self._context:
                raise RuntimeError(f"llama.cpp could not make a context for {n_rows} sequences")
        return self._context


LOADERS: dict[str, Callable[[PeerJob], Peer]] = {
    "split": lambda job: Ours(job, split=True),
    "unsplit": lambda job: Ours(job, split=False),
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}
OURS = ("split", "unsplit")
# What must be importable, and how to get it.
_NEEDS: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers": (("torch", "torch"), ("transformers", "transformers")),
    "llama.cpp": (("llama_cpp", "llama-cpp-python"), ("gguf", "gguf")),
}
PACKAGES = ("torch", "transformers", "llama-cpp-python")


def title(name: str) -> str:
    """What results call a peer."""
    return f"ours, {name}" if name in OURS else name


def load(name: str, job: PeerJob) -> Peer:
    return LOADERS[name](job)


def why_not(peer: str) -> str | None:
    """What keeps a peer from being measured here, with the command that mends it; None if nothing does."""
    missing = [
        package for module, package in _NEEDS.get(peer, ()) if importlib.util.find_spec(module) is None
    ]
    return f"not installed: pip install {' '.join(missing)}" if missing else None


def chosen(text: str) -> tuple[list[str], dict[str, str]]:
    """(peers to measure, peer -> why it is left out) from `--peers`: "auto", or names separated by commas.

    "auto" takes what is installed. A peer asked for by name that is missing is a `UserError`, as is an
    unknown one.
    """
    if text.strip() == "auto":
        reasons = {peer: why_not(peer) for peer in LOADERS}
        return [p for p, why in reasons.items() if why is None], {p: why for p, why in reasons.items() if why}
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in LOADERS:
            raise UserError(f"--peers: {name!r} is not one of auto, {', '.join(LOADERS)}")
        why = why_not(name)
        if why is not None:
            raise UserError(f"--peers: {name} is {why}")
    if not names:
        raise UserError(f"--peers is empty: give auto, or some of {', '.join(LOADERS)}")
    return names, {}
