"""``LLM``: the Python interface. Prompts in, finished requests out.

Puts checkpoint, tokenizer, executor and engine together; each of them knows how to do its own part.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina import dtypes
from jaxlamina.engine.engine import Engine, TokenEvent
from jaxlamina.engine.outputs import RequestOutput
from jaxlamina.engine.policies import load_policy
from jaxlamina.errors import UserError
from jaxlamina.kv.placement import chosen_partition, why_chosen
from jaxlamina.models import ModelConfig, abstract_params, apply
from jaxlamina.options import check_headroom
from jaxlamina.process import jax_cache
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.steps.buckets import Buckets
from jaxlamina.workers.calibration import Calibration, calibration_rows
from jaxlamina.workers.capacity import (
    check_host_slots,
    check_largest_step,
    check_weights,
    is_accelerator,
    resolve_slots,
    slots_that_fit,
    spread_over,
)
from jaxlamina.workers.spec import CALIBRATED_KV_DTYPES, KV_DTYPES, AttentionSpec
from jaxlamina.workers.workspace import LargestStep, tree_bytes
from splitter import SplitReport

if TYPE_CHECKING:
    from jaxlamina.ranks import Group
    from jaxlamina.run.ranks import RanksExecutor
    from jaxlamina.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
KV_MANAGERS = ("token", "padded")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

# Text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}
Prompt = str | Sequence[int] | Mapping[str, Any]
# Whether there is a bar, or what makes one: called with ``total``, it has ``update(n)`` and ``close()``, as tqdm has.
UseTqdm = bool | Callable[..., Any]
Messages = Sequence[Mapping[str, Any]]  # one conversation


class ModelSource(Protocol):
    """What ``LLM`` needs of a checkpoint (`jaxlamina.weights.Checkpoint` is one)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def own_dtype(self) -> str | None: ...

    def load(self, dtype: Any, device: Any, progress: Any) -> Mapping[str, jax.Array]: ...

    def tokenizer(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class InMemoryModel:
    """A model whose parameters are already arrays; without a tokenizer it takes and gives token ids."""

    config: ModelConfig
    params: Mapping[str, jax.Array]
    text: Any | None = None  # a Tokenizer
    eos_token_ids: tuple[int, ...] = ()

    @property
    def own_dtype(self) -> str | None:
        """What most of the parameters are."""
        return dtypes.most_common_dtype((x.dtype.name, x.nbytes) for x in self.params.values())

    def load(self, dtype: Any, device: Any, progress: Any = None) -> dict[str, jax.Array]:
        return {name: jax.device_put(jnp.asarray(x, dtype), device) for name, x in self.params.items()}

    def tokenizer(self) -> Any:
        return self.text


class LLM:
    """A model ready to write.

    - ``model``: a name ("smollm2-135m-instruct"), a Hugging Face folder, a ``.gguf`` file, an orbax folder, a model of the
      Hugging Face Hub ("org/name", or "org/name:file.gguf"; a folder of that name goes first), or a ``ModelSource``.
    - ``revision``: a branch, tag or commit of the Hub's repository.
    - ``load_format``: "auto", or "dummy" for random weights: ``model`` is then a folder of which only config.json and the
      tokenizer are read, or a shape of configs/models (`jaxlamina.weights.DummyCheckpoint`).
    - ``dtype``: "float32" or "bfloat16", of weights and KV; "auto": the checkpoint's own (bfloat16 of float16 and of
      quantised weights), but float32 on CPUs. What it came to is in ``dtype`` of the instance, and logged.
    - ``max_num_seqs``: requests decoded at once.
    - ``max_model_len``: tokens of a request, prompt included; default the model's, or less if KV does not fit.
    - ``kv_slots``: tokens whose KV is kept, over all requests; default as many as could be used, as far as memory goes.
    - ``split``: model worker and attention worker apart, each on its own device where there are two; False runs
      each step as one program, to compare with.
    - ``q_first``: send q before k and v are computed; default where the workers have different devices.
    - ``devices``: one device for all workers; (model worker's, attention workers'); or (model worker's, one each).
    - ``prefix_caching``: keep the KV of prompts and answers until the room is needed, and start a prompt from it.
    - ``kv_dtype``: "auto" as ``dtype``; "int8" with a scale a token and KV head, "int8-channel" with a fixed scale a channel,
      or "int8-channel-asymmetric" with a fixed zero point, too: half the bytes of bfloat16, and not quite the same tokens.
    - ``calibration_tokens``: what fixed scales are found from: text, token ids, or lists of either. None: tokens drawn at
      random from the vocabulary. ``calibration_headroom``: how much more they hold than the largest values met; None: 2.
    - ``attention_workers``: how many share the KV, and by what ``partition``: "heads", "requests" or "tokens"; "auto": heads
      where the model's KV heads divide evenly, else tokens, which a line on stderr says.
    - ``host_kv_slots``: tokens whose KV may wait in host memory when requests outgrow ``kv_slots``; with 0, what must give way
      is computed again. "auto": beside accelerators as many as ``kv_slots``, in a quarter of the host's free memory at most;
      on CPUs none, for KV is in host memory there, and more ``kv_slots`` cost the same.
    - ``max_num_batched_tokens``: prompt tokens computed in one step; a longer prompt comes in chunks, between which running
      requests get their tokens. None: prompts are computed whole.
    - ``mixed_steps``: compute a prompt, or a chunk of one, in the program of the running requests' decode step, which reads
      weights once for both and holds them up less; there are more programs to compile. Prefill workers of a ``group``
      compute all prompts beside decode steps, whatever it says.
    - ``async_scheduling``: launch each step before the tokens of the one before it are looked at, so that the device need
      not wait for the host; the same tokens either way. Jobs of several model ranks go one step at a time regardless.
    - ``scheduling_policy``: who goes first, and who gives way last: "fifo", "priority", "chat-first",
      "shortest-remaining" or a class of your own, "package.module:Class" (`jaxlamina.engine.policies`).
    - ``kv_manager``: "token" takes a slot when a token needs it; "padded" counts every running sequence as long as the
      longest of them may become, as a contiguous KV cache does, to compare with.
    - ``kv_headroom``: of what running requests may still write, the share that must have room before another is admitted:
      1 so that none gives way for want of slots, 0 so that as many run as possible. None: as requests have written before.
    - ``group``: this process's job over real ranks (`jaxlamina.ranks.join`): attention workers are its other ranks. What
      ``split``, ``q_first``, ``devices``, ``attention_workers`` and ``partition`` say elsewhere, its cluster says.
    - ``recording``: with a ``group``, decode steps can be recorded on all ranks: ``executor`` is a
      `jaxlamina.run.recording.RecordingExecutor`.
    - ``seed``: requests without a seed of their own get theirs from it.
    - ``compilation_cache``: keep compiled programs on disk for the next process.
    - ``use_tqdm_on_load``: show a bar while weights are read, where stderr is a terminal.
    - ``on_load(done_bytes, total_bytes)``: progress of loading, in place of the bar.

    ``UserError`` for a model that is not there or not supported, for options out of range, and, before anything is allocated,
    for weights, KV or steps that memory does not hold.
    """

    def __init__(
        self,
        model: str | Path | ModelSource,
        *,
        revision: str | None = None,
        load_format: str = "auto",
        dtype: str = dtypes.AUTO,
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        kv_slots: int | None = None,
        split: bool = True,
        q_first: bool | None = None,
        devices: Sequence[jax.Device] | None = None,
        prefix_caching: bool = True,
        kv_dtype: str = "auto",
        calibration_tokens: Any = None,
        calibration_headroom: float | None = None,
        attention_workers: int = 1,
        partition: str = "auto",
        host_kv_slots: int | Literal["auto"] = "auto",
        max_num_batched_tokens: int | None = 2048,
        mixed_steps: bool = False,
        async_scheduling: bool = True,
        scheduling_policy: str = "fifo",
        kv_manager: str = "token",
        kv_headroom: float | None = None,
        group: Group | None = None,
        recording: bool = False,
        seed: int = 0,
        compilation_cache: bool = True,
        use_tqdm_on_load: bool = True,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        if load_format not in LOAD_FORMATS:
            raise UserError(f"{load_format=} must be one of {', '.join(LOAD_FORMATS)}")
        if dtype not in dtypes.CHOICES:
            raise UserError(f"{dtype=} must be one of {', '.join(dtypes.CHOICES)}")
        if max_num_seqs < 1:
            raise UserError(f"{max_num_seqs=} must be at least 1")
        if kv_dtype not in KV_DTYPES:
            raise UserError(f"{kv_dtype=} must be one of {', '.join(KV_DTYPES)}")
        if host_kv_slots != "auto" and (not isinstance(host_kv_slots, int) or host_kv_slots < 0):
            raise UserError(f"{host_kv_slots=} must be 0 (none) or more, or 'auto'")
        if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
            raise UserError(f"{max_num_batched_tokens=} must be at least 1, or None")
        if kv_slots is not None and kv_slots < 1:
            raise UserError(f"{kv_slots=} must be at least 1")
        if kv_manager not in KV_MANAGERS:
            raise UserError(f"{kv_manager=} must be one of {', '.join(KV_MANAGERS)}")
        check_headroom(kv_headroom)
        policy = load_policy(scheduling_policy)
        if attention_workers != 1 and not split:
            raise UserError(f"{attention_workers=} needs the model split: leave out split=False")
        source = _open(model, load_format, revision)
        self.config: ModelConfig = source.config
        if group is not None:
            _check_unused(split=(split, True), q_first=(q_first, None), devices=(devices, None),
                          attention_workers=(attention_workers, 1), partition=(partition, "auto"))  # fmt: skip
            attention_workers = len(group.workers)
        partition = _partition(partition, attention_workers, self.config.num_key_value_heads, group)
        if group is not None:
            self.model_device, attention_devices = group.device, [group.device]
        else:
            self.model_device, *attention_devices = _devices(devices, split, attention_workers)
        self.attention_device = attention_devices[0]
        self._attention_pool = str(self.attention_device) if group is None else _ranks_of(group)
        length = self._length(max_model_len)
        self.dtype, self.why_dtype = dtypes.chosen(
            dtype, source.own_dtype, not is_accelerator(self.model_device)
        )
        if self.why_dtype:
            _log.info(self.why_dtype)
        if compilation_cache:
            jax_cache.keep_programs()
        least = 2 if max_model_len is None else length
        most = max_num_seqs * length
        n_slots = kv_slots or partial(slots_that_fit, most=most, least=least)
        largest = LargestStep(max_num_seqs, length, length)
        check_largest_step(largest, self.config.vocab_size)
        specs = _layers_of(self.config, self.dtype, kv_dtype)
        if group is None and host_kv_slots != "auto":
            check_host_slots(host_kv_slots, specs)
        if group is None and kv_slots is not None:  # and again by the executor, beside weights
            same = len(attention_devices) == attention_workers
            on = spread_over(attention_workers, self.attention_device, self.model_device)
            resolve_slots(kv_slots, specs, attention_devices if same else on)
        self.tokenizer, self._why_no_tokenizer = _tokenizer(source)
        calibration = self._calibration(kv_dtype, calibration_tokens, calibration_headroom)
        load_device = self.model_device if group is None else group.load_device
        if not isinstance(source, InMemoryModel):
            n_bytes = tree_bytes(abstract_params(self.config, DTYPES[self.dtype]))
            check_weights(n_bytes, self.dtype, load_device)
        with _loading(use_tqdm_on_load and on_load is None) as progress:
            params = source.load(DTYPES[self.dtype], load_device, on_load or progress)
        fn = partial(apply, self.config)
        kv: dict[str, Any] = {
            "n_slots": n_slots,
            "kv_dtype": kv_dtype,
            "calibration": calibration,
            "n_host_slots": None if host_kv_slots == "auto" else host_kv_slots,
            "largest": largest,
        }
        self.executor: LocalExecutor | UnsplitExecutor | RanksExecutor
        if group is not None:
            from jaxlamina.run.ranks import RanksExecutor
            from jaxlamina.run.recording import RecordingExecutor

            kind = RecordingExecutor if recording else RanksExecutor
            del kv["n_slots"]
            bounds: dict[str, Any] = {"kv_slots": kv_slots, "most_slots": most, "least_slots": least}
            self.executor = kind(fn, params, group=group, config=self.config, **bounds, **kv)
            specs = list(self.executor.specs)
        elif split:
            self.executor = LocalExecutor(
                fn,
                params,
                model_device=self.model_device,
                attention_device=self.attention_device,
                attention_devices=attention_devices if len(attention_devices) == attention_workers else None,
                attention_workers=attention_workers,
                partition=partition,
                q_first=q_first,
                **kv,
            )
            specs = list(self.executor.specs)
        else:
            self.executor = UnsplitExecutor(fn, params, device=self.model_device, **kv)
            specs = list(self.executor.specs)
        self.max_model_len = min(length, self.executor.n_slots + 1)
        cut = self.executor.capabilities.bucket_cut
        self.buckets = Buckets.default(max_num_seqs, self.max_model_len, cut)
        self.engine = Engine(
            self.executor,
            self.tokenizer,
            vocab_size=self.config.vocab_size,
            buckets=self.buckets,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            eos_token_ids=source.eos_token_ids,
            seed=seed,
            prefix_caching=prefix_caching,
            host_kv_slots=self.executor.n_host_slots,
            max_num_batched_tokens=max_num_batched_tokens,
            mixed_steps=mixed_steps,
            async_scheduling=async_scheduling,
            policy=policy,
            padded=kv_manager == "padded",
            headroom=kv_headroom,
            kv_slot_bytes=sum(spec.slot_bytes for spec in specs),
        )

        self.engine.admission.longer = self._longer(length)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; outputs in the prompts' order, ``n`` continuations in each one's ``outputs``.

        A prompt is a string, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [int]}``; a flat list of token
        ids is one prompt. ``sampling_params``: one for all (default ``SamplingParams()``) or one each; ``priority``: one each
        (default 0; lower goes first, where the scheduling policy looks at it). ``on_token`` is called for every token as it
        comes.

        ``use_tqdm``: True shows a bar of finished prompts where stderr is a terminal and there is no ``on_token``; a callable
        makes one, as ``tqdm.tqdm`` does; False shows none. ``UserError`` for a prompt that cannot be served; then none is.
        """
        prompts = _list_of(prompts)
        params = _one_each(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise UserError(f"{len(priority)} priorities for {len(prompts)} prompts: give one each")
        if on_token is not None and not callable(use_tqdm):
            use_tqdm = False
        with self._queued(prompts, params, priority) as ids, _prompt_bar(use_tqdm, len(ids)) as one_more:
            finished: dict[str, RequestOutput] = {}
            while len(finished) < len(ids):
                for event in self.engine.step():
                    if event.error is not None:
                        raise event.error
                    if event.output is not None:
                        finished[event.request_id] = event.output
                        one_more()
                    if on_token is not None:
                        on_token(event)
            return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        on_token: Callable[[TokenEvent], None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, put into words by the model's chat template.

        A conversation is a list of ``{"role": …, "content": …}``; ``template`` goes to the template as it is, but
        ``chat_template`` (one in place of the model's) and ``continue_final_message`` (go on with the last message). The rest
        is as of `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [self.chat_prompt(conversation, **template) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_token=on_token)

    def chat_prompt(self, messages: Any, **template: Any) -> dict[str, Any]:
        """The prompt, text and token ids, that ``chat`` makes of one conversation."""
        tokenizer = self._tokenizer_for("chat")
        template.setdefault("add_generation_prompt", not template.get("continue_final_message"))
        text = tokenizer.apply_chat_template(list(messages), **template)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str]:
        """Continues one prompt and yields its text piece by piece as tokens come (bad input: ``UserError`` at once).

        ``best_of`` and beam search choose at the end, so their text comes then.
        """
        if sampling_params is not None and sampling_params.n > 1:
            raise UserError(
                f"n={sampling_params.n} texts cannot be streamed as one: use generate with on_token"
            )
        pieces = self._pieces(prompt, _one_each(sampling_params, 1))
        next(pieces)  # queues the request
        return pieces

    def _pieces(self, prompt: Prompt, params: Sequence[SamplingParams]) -> Generator[str]:
        with self._queued([prompt], params) as [request_id]:
            yield ""  # begun now, so that closing it early ends the request
            finished = False
            while not finished:
                for event in self.engine.step():
                    if event.request_id == request_id:
                        if event.error is not None:
                            raise event.error
                        finished = event.output is not None
                        if event.new_text:
                            yield event.new_text

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with ``encode``, ``decode`` and ``apply_chat_template``. ``UserError`` if it has none."""
        tokenizer: Tokenizer = self._tokenizer_for("get_tokenizer()")
        return tokenizer

    def split_report(self) -> SplitReport:
        """Slices, what each cut keeps and what crosses between the pools, for a decode step of one request."""
        return self.executor.report

    def stats(self) -> dict[str, Any]:
        """Counts and seconds so far; buckets; slots; programs compiled, by what they were compiled for; and over ranks how
        decode steps are staggered (`RanksExecutor.staggering`)."""
        staggering = self.executor.staggering()
        return dataclasses.asdict(self.engine.stats) | {
            "mean_batch_size": self.engine.stats.mean_batch_size,
            "n_compilations": self.executor.programs.total + self.engine.sampler.n_compiled,
            "compilations": dict(self.executor.programs.counts) | {"sampler": self.engine.sampler.n_compiled},
            "buckets": dataclasses.asdict(self.buckets),
            **self.engine.kv_stats(),
            "dtype": self.dtype,
            "kv_headroom": self.engine.scheduler.headroom.share,
            **({"staggering": staggering} if staggering is not None else {}),
            "model_device": str(self.model_device),
            "attention_device": self._attention_pool,
        }

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes: the next prompt is computed from its first token on."""
        self.engine.reset_prefix_cache()

    @contextmanager
    def _queued(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int] | None = None,
    ) -> Iterator[list[str]]:
        """The prompts as requests of the engine; those not finished on leaving are aborted."""
        ids: list[str] = []
        try:
            for prompt, p, priority in zip(prompts, params, priorities or [0] * len(prompts), strict=True):
                text, tokens = self._tokens(prompt)
                ids.append(self.engine.add_request(tokens, p, text, priority=priority))
            yield ids
        finally:
            for request_id in ids:
                self.engine.abort(request_id)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer_for("a text prompt").encode(prompt)
        if isinstance(prompt, list | tuple | np.ndarray):
            return None, prompt  # the engine looks at each token id
        if not isinstance(prompt, Mapping) or not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise UserError(
                'a prompt must be a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": […]}, not '
                f"{prompt!r:.80}"
            )
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        if unknown:
            raise UserError(f"a prompt has no field {sorted(unknown)}, only prompt and prompt_token_ids")
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), prompt["prompt_token_ids"]
        return self._tokens(prompt["prompt"])

    def _tokenizer_for(self, what: str) -> Any:
        if self.tokenizer is None:
            raise UserError(f"{what} needs a tokenizer ({self._why_no_tokenizer}): give prompt_token_ids")
        return self.tokenizer

    def _calibration(self, kv_dtype: str, tokens: Any, headroom: float | None) -> Calibration:
        given = {"calibration_tokens": tokens, "calibration_headroom": headroom}
        names = [name for name, value in given.items() if value is not None]
        if names and kv_dtype not in CALIBRATED_KV_DTYPES:
            raise UserError(
                f"{names[0]} finds fixed scales, which {kv_dtype=} has not: take {' or '.join(CALIBRATED_KV_DTYPES)}"
            )
        rows = None
        if tokens is not None:
            rows = calibration_rows(tokens, self._encode_calibration, self.config.vocab_size)
        return Calibration(rows) if headroom is None else Calibration(rows, headroom)

    def _encode_calibration(self, text: str) -> list[int]:
        tokenizer = self._tokenizer_for("a calibration text")
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _longer(self, length: int) -> str:
        """What would let longer requests in than ``max_model_len``, which is at most ``length``."""
        if self.max_model_len < length:
            return f", or give more kv_slots than {self.executor.n_slots}"
        longest = self.config.max_position_embeddings
        return f", or raise max_model_len, to {longest} at most" if length < longest else ""

    def _length(self, max_model_len: int | None) -> int:
        longest = self.config.max_position_embeddings
        if max_model_len is None:
            return longest
        if not 2 <= max_model_len <= longest:
            raise UserError(f"{max_model_len=} must be at least 2 and at most {longest}, the model's length")
        return max_model_len


def _open(model: str | Path | ModelSource, load_format: str, revision: str | None) -> ModelSource:
    if not isinstance(model, str | Path):
        return model
    # Readers need more than an in-memory model does.
    from jaxlamina.weights import DummyCheckpoint, open_checkpoint

    return DummyCheckpoint(model, revision) if load_format == "dummy" else open_checkpoint(model, revision)


def _layers_of(config: ModelConfig, dtype: str, kv_dtype: str) -> list[AttentionSpec]:
    """What each layer keeps, as far as its bytes go."""
    heads, size = config.num_key_value_heads, config.head_dim
    kept = AttentionSpec(heads, size, np.dtype(DTYPES[dtype]), 1.0, None, None, kv_dtype)
    return [kept] * config.num_hidden_layers


def _list_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Each prompt; a flat list of token ids is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    given: list[Any] = list(prompts)
    is_flat = bool(given) and isinstance(given[0], int | np.integer)
    return [given] if is_flat else given


@contextmanager
def _loading(wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Where the progress of loading goes: to a bar, on a terminal."""
    if not wanted:
        yield None
        return
    with _bar("reading weights", in_bytes=True) as on_progress:
        yield on_progress


@contextmanager
def _prompt_bar(use_tqdm: UseTqdm, n: int) -> Iterator[Callable[[], Any]]:
    """What to call for every prompt that is finished, of ``n``."""
    if callable(use_tqdm):
        made = use_tqdm(total=n, desc="Processed prompts", dynamic_ncols=True)
        try:
            yield lambda: made.update(1)
        finally:
            made.close()
    elif use_tqdm and n:
        with _bar("prompts") as on_progress:
            on_progress(0, n)
            counted = itertools.count(1)
            yield lambda: on_progress(next(counted), n)
    else:
        yield lambda: None


def _bar(what: str, in_bytes: bool = False) -> Any:
    from rich.console import Console

    from jaxlamina.console.progress import bar

    return bar(Console(stderr=True), what, in_bytes=in_bytes)


def _tokenizer(source: ModelSource) -> tuple[Any | None, str]:
    """The model's tokenizer, or None and why: token ids can be served without one."""
    try:
        return source.tokenizer(), "this model has none"
    except UserError as error:
        return None, str(error)


def _devices(devices: Sequence[jax.Device] | None, split: bool, n_workers: int) -> list[jax.Device]:
    """The model worker's device, then one for all attention workers or one for each of them."""
    given = list(jax.local_devices() if devices is None else devices)
    if not given or (devices is not None and len(given) not in (1, 2, 1 + n_workers)):
        each = f", or {1 + n_workers}: one for each attention worker" if n_workers > 1 else ""
        raise UserError(
            f"devices={given} must be one device, or two: the model worker's and the attention worker's{each}"
        )
    if not split or len(given) == 1:
        return [given[0], given[0]]
    return given[: 1 + n_workers] if len(given) > n_workers else given[:2]


def _partition(partition: str, n_workers: int, n_kv_heads: int, group: Group | None) -> str:
    """What workers share out, where it was left open too, which is said then. ``UserError`` for what cannot be."""
    if group is None:
        chosen = chosen_partition(partition, n_workers, [n_kv_heads])
    else:
        from jaxlamina.ranks.layout import partition_of

        partition, chosen = group.cluster.partition, partition_of(group.cluster, [n_kv_heads])
    if why := why_chosen(partition, chosen, n_workers, [n_kv_heads]):
        print(f"note: {why}", file=sys.stderr, flush=True)
    return chosen


def _ranks_of(group: Group) -> str:
    return ", ".join(f"rank {rank}" for rank in group.workers) + f" by {group.cluster.transport}"


def _check_unused(**options: tuple[Any, Any]) -> None:
    """``UserError`` for options, ``(given, default)``, that a cluster says."""
    given = [name for name, (value, default) in options.items() if value != default]
    if given:
        raise UserError(f"{given[0]} is what the cluster says, for a model over ranks: leave it out")


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if len(params) != n:
        raise UserError(f"{len(params)} sampling parameters for {n} prompts: give one for all or one each")
    return params
