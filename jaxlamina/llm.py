"""``LLM``: the Python interface. Prompts in, finished requests out.

Puts checkpoint, tokenizer, executor and engine together; each of them knows how to do its own part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from jaxlamina import compilation
from jaxlamina.buckets import Buckets, Cut
from jaxlamina.engine import Engine, TokenEvent
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, apply
from jaxlamina.outputs import RequestOutput
from jaxlamina.policies import load_policy
from jaxlamina.sampling import SamplingParams
from jaxlamina.workers import LocalExecutor, UnsplitExecutor
from jaxlamina.workers.capacity import slots_that_fit
from jaxlamina.workers.partition import checked_partition
from jaxlamina.workers.spec import KV_DTYPES
from jaxlamina.workers.workspace import LargestStep
from splitter import SplitReport

if TYPE_CHECKING:
    from jaxlamina.ranks import Group, RanksExecutor

KV_MANAGERS = ("token", "padded")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

Prompt = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": [...]}
Messages = Sequence[Mapping[str, Any]]  # one conversation


class ModelSource(Protocol):
    """What ``LLM`` needs of a checkpoint (`jaxlamina.weights.Checkpoint` is one)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def load(self, dtype: Any, device: Any, progress: Any) -> Mapping[str, jax.Array]: ...

    def tokenizer(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class InMemoryModel:
    """A model whose parameters are already arrays; without a tokenizer it takes and gives token ids."""

    config: ModelConfig
    params: Mapping[str, jax.Array]
    text: Any | None = None  # a Tokenizer
    eos_token_ids: tuple[int, ...] = ()

    def load(self, dtype: Any, device: Any, progress: Any = None) -> dict[str, jax.Array]:
        return {name: jax.device_put(jnp.asarray(x, dtype), device) for name, x in self.params.items()}

    def tokenizer(self) -> Any:
        return self.text


class LLM:
    """A model ready to write.

    - ``model``: a name ("smollm2-135m-instruct"), a Hugging Face folder, a ``.gguf`` file, an orbax folder, or
      a ``ModelSource``.
    - ``load_format``: "auto", or "dummy" for random weights: ``model`` is then a folder of which only config.json and the
      tokenizer are read, or a shape of configs/models (`jaxlamina.weights.DummyCheckpoint`).
    - ``dtype``: "float32" or "bfloat16", of weights and KV.
    - ``max_num_seqs``: requests decoded at once.
    - ``max_model_len``: tokens of a request, prompt included; default the model's, or less if KV does not fit.
    - ``kv_slots``: tokens whose KV is kept, over all requests; default as many as could be used, as far as memory goes.
    - ``split``: model worker and attention worker apart, each on its own device where there are two; False runs
      each step as one program, to compare with.
    - ``q_first``: send q before k and v are computed; default where the workers have different devices.
    - ``devices``: one device for all workers; (model worker's, attention workers'); or (model worker's, one each).
    - ``prefix_caching``: keep the KV of prompts and answers until the room is needed, and start a prompt from it.
    - ``kv_dtype``: "auto" as ``dtype``; "int8" with a scale a token and KV head, or "int8-channel" with a fixed scale
      a channel: half the bytes of bfloat16, and not quite the same tokens.
    - ``attention_workers``: how many share the KV, and by what ``partition``: "heads", "requests" or "tokens".
    - ``host_kv_slots``: tokens whose KV may wait in host memory when requests outgrow ``kv_slots``; without it, what
      must give way is computed again.
    - ``max_num_batched_tokens``: prompt tokens computed in one step; a longer prompt comes in chunks, between which running
      requests get their tokens. None: prompts are computed whole.
    - ``mixed_steps``: compute a prompt, or a chunk of one, in the program of the running requests' decode step, which reads
      weights once for both and holds them up less; there are more programs to compile. Prefill workers of a ``group``
      compute all prompts beside decode steps, whatever it says.
    - ``async_scheduling``: launch each step before the tokens of the one before it are looked at, so that the device need
      not wait for the host; the same tokens either way. Jobs of several model ranks go one step at a time regardless.
    - ``scheduling_policy``: who goes first, and who gives way last: "fifo", "priority", "chat-first",
      "shortest-remaining" or a class of your own, "package.module:Class" (`jaxlamina.policies`).
    - ``kv_manager``: "token" takes a slot when a token needs it; "padded" counts every running sequence as long as the
      longest of them may become, as a contiguous KV cache does, to compare with.
    - ``kv_headroom``: of what running requests may still write, the share that must have room before another is admitted:
      1 so that none gives way for want of slots, 0 so that as many run as possible. None: as requests have written before.
    - ``group``: this process's job over real ranks (`jaxlamina.ranks.join`): attention workers are its other ranks. What
      ``split``, ``q_first``, ``devices``, ``attention_workers`` and ``partition`` say elsewhere, its cluster says.
    - ``recording``: with a ``group``, decode steps can be recorded on all ranks: ``executor`` is a
      `jaxlamina.profiling.job.RecordingExecutor`.
    - ``seed``: requests without a seed of their own get theirs from it.
    - ``compilation_cache``: keep compiled programs on disk for the next process.
    - ``on_load(done_bytes, total_bytes)``: progress of loading.

    ``UserError`` for a model that is not there or not supported, and for options out of range.
    """

    def __init__(
        self,
        model: str | Path | ModelSource,
        *,
        load_format: str = "auto",
        dtype: str = "float32",
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        kv_slots: int | None = None,
        split: bool = True,
        q_first: bool | None = None,
        devices: Sequence[jax.Device] | None = None,
        prefix_caching: bool = True,
        kv_dtype: str = "auto",
        attention_workers: int = 1,
        partition: str = "heads",
        host_kv_slots: int = 0,
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
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        if load_format not in LOAD_FORMATS:
            raise UserError(f"{load_format=} must be one of {', '.join(LOAD_FORMATS)}")
        if dtype not in DTYPES:
            raise UserError(f"{dtype=} must be one of {', '.join(DTYPES)}")
        if max_num_seqs < 1:
            raise UserError(f"{max_num_seqs=} must be at least 1")
        if kv_dtype not in KV_DTYPES:
            raise UserError(f"{kv_dtype=} must be one of {', '.join(KV_DTYPES)}")
        if host_kv_slots < 0:
            raise UserError(f"{host_kv_slots=} must be 0 (none) or more")
        if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
            raise UserError(f"{max_num_batched_tokens=} must be at least 1, or None")
        if kv_slots is not None and kv_slots < 1:
            raise UserError(f"{kv_slots=} must be at least 1")
        if kv_manager not in KV_MANAGERS:
            raise UserError(f"{kv_manager=} must be one of {', '.join(KV_MANAGERS)}")
        if kv_headroom is not None and not 0 <= kv_headroom <= 1:
            raise UserError(f"{kv_headroom=} must be from 0 to 1, or None")
        policy = load_policy(scheduling_policy)
        if attention_workers != 1 and not split:
            raise UserError(f"{attention_workers=} needs the model split: leave out split=False")
        source = _open(model, load_format)
        self.config: ModelConfig = source.config
        if group is not None:
            _check_unused(split=(split, True), q_first=(q_first, None), devices=(devices, None),
                          attention_workers=(attention_workers, 1), partition=(partition, "heads"))  # fmt: skip
            attention_workers, partition = len(group.workers), group.cluster.partition
        checked_partition(partition, attention_workers, [self.config.num_key_value_heads])
        if group is not None:
            self.model_device, attention_devices = group.device, [group.device]
        else:
            self.model_device, *attention_devices = _devices(devices, split, attention_workers)
        self.attention_device = attention_devices[0]
        self._attention_pool = str(self.attention_device) if group is None else _ranks_of(group)
        length = self._length(max_model_len)
        if compilation_cache:
            compilation.keep_programs()
        least = 2 if max_model_len is None else length
        most = max_num_seqs * length
        n_slots = kv_slots or partial(slots_that_fit, most=most, least=least)
        self.tokenizer, self._why_no_tokenizer = _tokenizer(source)
        params = source.load(
            DTYPES[dtype], self.model_device if group is None else group.load_device, on_load
        )
        fn = partial(apply, self.config)
        kv: dict[str, Any] = {
            "n_slots": n_slots,
            "kv_dtype": kv_dtype,
            "n_host_slots": host_kv_slots,
            "largest": LargestStep(max_num_seqs, length, length),
        }
        self.executor: LocalExecutor | UnsplitExecutor | RanksExecutor
        if group is not None:
            from jaxlamina.profiling.job import RecordingExecutor
            from jaxlamina.ranks import RanksExecutor

            kind = RecordingExecutor if recording else RanksExecutor
            del kv["n_slots"]
            bounds: dict[str, Any] = {"kv_slots": kv_slots, "most_slots": most, "least_slots": least}
            self.executor = kind(fn, params, group=group, config=self.config, **bounds, **kv)
            specs = self.executor.specs
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
            specs = self.executor.attention.specs
        else:
            self.executor = UnsplitExecutor(fn, params, device=self.model_device, **kv)
            specs = self.executor.specs
        self.max_model_len = min(length, self.executor.n_slots + 1)
        cut: Cut = getattr(self.executor, "bucket_cut", "fine")
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
            host_kv_slots=host_kv_slots,
            max_num_batched_tokens=max_num_batched_tokens,
            mixed_steps=mixed_steps,
            async_scheduling=async_scheduling,
            policy=policy,
            padded=kv_manager == "padded",
            headroom=kv_headroom,
            kv_slot_bytes=sum(spec.slot_bytes for spec in specs),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; outputs in the prompts' order, ``n`` continuations in each one's ``outputs``.

        A prompt is a string, ``{"prompt": str}`` or ``{"prompt_token_ids": [int]}``; ``sampling_params`` one for
        all (default ``SamplingParams()``) or one each; ``priority`` one each (default 0; lower goes first, where the
        scheduling policy looks at it). ``on_token`` is called for every token as it comes.
        ``UserError`` for a prompt that cannot be served; then none is.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _one_each(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise UserError(f"{len(priority)} priorities for {len(prompts)} prompts: give one each")
        with self._queued(prompts, params, priority) as ids:
            finished: dict[str, RequestOutput] = {}
            while len(finished) < len(ids):
                for event in self.engine.step():
                    if event.output is not None:
                        finished[event.request_id] = event.output
                    if on_token is not None:
                        on_token(event)
            return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, put into words by the model's chat template.

        A conversation is a list of ``{"role": …, "content": …}``; ``template`` goes to the template as it is.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [self.chat_prompt(conversation, **template) for conversation in conversations]
        return self.generate(prompts, sampling_params, on_token=on_token)

    def chat_prompt(self, messages: Any, **template: Any) -> dict[str, Any]:
        """The prompt, text and token ids, that ``chat`` makes of one conversation."""
        tokenizer = self._tokenizer_for("chat")
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **template)
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
                        finished = event.output is not None
                        if event.new_text:
                            yield event.new_text

    def split_report(self) -> SplitReport:
        """Slices, what each cut keeps and what crosses between the pools, for a decode step of one request."""
        return self.executor.report

    def stats(self) -> dict[str, Any]:
        """Counts and seconds so far; buckets; slots; and programs compiled, by what they were compiled for."""
        return dataclasses.asdict(self.engine.stats) | {
            "mean_batch_size": self.engine.stats.mean_batch_size,
            "n_compilations": self.executor.programs.total + self.engine.sampler.n_compiled,
            "compilations": dict(self.executor.programs.counts) | {"sampler": self.engine.sampler.n_compiled},
            "buckets": dataclasses.asdict(self.buckets),
            **self.engine.kv_stats(),
            "kv_headroom": self.engine.scheduler.headroom.share,
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
        if not isinstance(prompt, Mapping) or not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise UserError(
                f'a prompt must be a string, {{"prompt": …}} or {{"prompt_token_ids": […]}}, not {prompt!r:.80}'
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

    def _length(self, max_model_len: int | None) -> int:
        longest = self.config.max_position_embeddings
        if max_model_len is None:
            return longest
        if not 2 <= max_model_len <= longest:
            raise UserError(f"{max_model_len=} must be at least 2 and at most {longest}, the model's length")
        return max_model_len


def _open(model: str | Path | ModelSource, load_format: str) -> ModelSource:
    if not isinstance(model, str | Path):
        return model
    # Readers need more than an in-memory model does.
    from jaxlamina.weights import DummyCheckpoint, open_checkpoint

    return DummyCheckpoint(model) if load_format == "dummy" else open_checkpoint(str(model))


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
