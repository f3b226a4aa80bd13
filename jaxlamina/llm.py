"""``LLM``: the Python interface. Prompts in, finished requests out.

Puts checkpoint, tokenizer, executor and engine together; each of them knows how to do its own part.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxlamina import dtypes
from jaxlamina.console.bars import UseTqdm, loading_bar, prompt_bar, stderr_bar
from jaxlamina.engine import chunk_size as chunk_sizes
from jaxlamina.engine.engine import Engine, TokenEvent
from jaxlamina.engine.outputs import RequestOutput
from jaxlamina.engine.policies import load_policy
from jaxlamina.errors import UserError
from jaxlamina.kv.kept import KeptWanted
from jaxlamina.models import ModelConfig
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.options import FIRST_COME, LLMOptions, definitions, described
from jaxlamina.process import jax_cache, kept_folders
from jaxlamina.process.start_clock import CLOCK
from jaxlamina.run.make import ExecutorMaker, ModelPlace
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.steps.buckets import Buckets
from jaxlamina.text.chat_template import with_text
from jaxlamina.weights.fingerprint import fingerprint
from jaxlamina.weights.replacing import check_same_arrays, copied
from jaxlamina.weights.sources import ModelSource, as_stored, open_source, open_weights, tokenizer_of
from jaxlamina.workers.calibration import Calibration, calibration_rows
from jaxlamina.workers.capacity import check_weights, is_accelerator
from jaxlamina.workers.kept_kv import kept_prefixes
from jaxlamina.workers.spec import CALIBRATED_KV_DTYPES
from jaxlamina.workers.workspace import tree_bytes
from splitter import SplitReport

if TYPE_CHECKING:
    from jaxlamina.ranks import Group
    from jaxlamina.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# Text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]  # one conversation


class LoadedWeights(NamedTuple):
    """Weights that `LLM.put_weights` takes; ``fingerprint``: "" where no KV is kept by content."""

    params: Mapping[str, jax.Array]
    fingerprint: str


class LLM:
    """A model ready to write.

        - ``model``: a name ("smollm2-135m-instruct"), a Hugging Face folder, a ``.gguf`` file, an orbax
          folder, a model of the Hugging Face Hub ("org/name", or "org/name:file.gguf"; a folder of that name
          goes first), or a ``ModelSource``.
        - ``devices``: one device for all workers; (model worker's, attention workers'); or (model worker's,
          one each).
        - ``calibration_tokens``: what fixed scales are found from: text, token ids, or lists of either. None:
          tokens drawn at random from the vocabulary. ``calibration_headroom``: how much more they hold than
          the largest values met; None: 2.
        - ``group``: this process's job over real ranks (`jaxlamina.ranks.join`): attention workers are its
          other ranks. What ``devices`` and the options of workers say elsewhere, its cluster says.
        - ``recording``: with a ``group``, decode steps can be recorded on all ranks: ``executor`` is a
          `jaxlamina.run.recording.RecordingExecutor`.
        - ``on_load(done_bytes, total_bytes)``: progress of loading, in place of the bar.

        And these options (`jaxlamina.options.LLMOptions`, as ``options`` of the instance):

    {options}

        ``UserError`` for a model that is not there or not supported, for options out of range, and, before
        anything is allocated, for weights, KV or steps that memory does not hold.
    """

    def __init__(
        self,
        model: str | Path | ModelSource,
        *,
        devices: Sequence[jax.Device] | None = None,
        calibration_tokens: Any = None,
        calibration_headroom: float | None = None,
        group: Group | None = None,
        recording: bool = False,
        on_load: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        self.options = o = _checked(options)
        policy = load_policy(o.scheduling_policy or FIRST_COME)
        source = open_source(model, o.load_format, o.revision)
        self.model: CausalLM = source.model
        CLOCK.done("imports")
        self.place = ModelPlace.of(o, devices, group, self.model.kv_heads)
        self.place.begin_memory()
        CLOCK.done("devices")
        on_cpu = not is_accelerator(self.place.model_device)
        self.dtype, self.why_dtype = self._dtype(o.dtype, source.own_dtype, on_cpu)
        platform, of_job = self.place.model_device.platform, self.place.group
        in_shards = of_job is not None and of_job.cluster.tensor_parallel > 1
        source = as_stored(source, o.quantization, self.dtype, platform, in_shards)
        self.model = source.model
        length = self._length(o.max_model_len)
        if self.why_dtype:
            _log.info(self.why_dtype)
        if o.compilation_cache:
            jax_cache.keep_programs()
        if o.check_model:
            source.check()
        maker = ExecutorMaker(self.place, self.model, self.dtype, o, length)
        self.tokenizer, self._why_no_tokenizer = tokenizer_of(source)
        calibration = self._calibration(o.kv_dtype, calibration_tokens, calibration_headroom)
        self.modelled = maker.modelled
        most_prompt_tokens, chunk_size = self._chunks()
        maker.check(weights=not source.in_memory)
        with loading_bar(o.use_tqdm_on_load and on_load is None) as progress:
            later = source.later(self.dtype) if self.place.shares_weights else None
            params = later or source.load(self.dtype, self.place.load_device, on_load or progress)
        CLOCK.done("weights")
        self.executor = maker.make(params, calibration, recording)
        CLOCK.done("KV memory")
        self.max_model_len = min(length, self.executor.n_slots + 1)
        cut = self.executor.capabilities.bucket_cut
        self.buckets = Buckets.default(maker.n_seqs, self.max_model_len, cut)
        self.engine = Engine(
            self.executor,
            self.tokenizer,
            vocab_size=self.model.vocab_size,
            buckets=self.buckets,
            max_num_seqs=maker.n_seqs,
            max_model_len=self.max_model_len,
            eos_token_ids=source.eos_token_ids,
            seed=o.seed,
            prefix_caching=o.prefix_caching,
            host_kv_slots=self.executor.n_host_slots,
            max_num_batched_tokens=most_prompt_tokens,
            chunk_size=chunk_size,
            mixed_steps=o.mixed_steps,
            prompt_batch_tokens=o.prompt_batch_tokens,
            async_scheduling=o.async_scheduling,
            policy=policy,
            padded=o.kv_manager == "padded",
            headroom=o.kv_headroom,
            kv_slot_bytes=sum(spec.slot_bytes for spec in self.executor.specs),
        )
        self.engine.admission.longer = self._longer(length)
        self._come: dict[str, deque[TokenEvent]] = {}  # of whom each request is, not looked at yet
        self._turn = threading.RLock()  # to touch the engine
        self._like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
        self._of_weights = self._of_scales = ""
        self._kept_as: tuple[str | None, int | str | None] = None, None
        if o.keeps_kv:
            self._of_weights = fingerprint(params)
            if o.kv_dtype in CALIBRATED_KV_DTYPES:  # what they were found from, which an update leaves behind
                self._of_scales = f"{calibration.digest()} {length} {self._of_weights}"
            self.keep_kv(o.kept_kv_folder, o.kept_kv_slots)
            CLOCK.done("kept KV")

    def _chunks(self) -> tuple[int | None, chunk_sizes.ChunkSize | None]:
        """`chunk_sizes.chosen`. Prefill workers compute beside decode steps, whose price is without them."""
        o, group, modelled = self.options, self.place.group, self.modelled
        if group is not None and group.cluster.prefill_workers:
            modelled = None
        predict = None if modelled is None else partial(modelled.with_prompt_s, o.mixed_steps)
        return chunk_sizes.chosen(o.max_num_batched_tokens, o.tpot_slo_ms, predict)

    def keep_kv(self, folder: str | None, n: int | str | None) -> None:
        """Keeps KV in host memory by content from now on, as ``kept_kv_folder`` and ``kept_kv_slots`` have
        it; of a model that was made to keep some. Not while a step runs."""
        if folder is not None and folder != self._kept_as[0]:
            self._folder_held = kept_folders.hold_alone(Path(folder))
        self._kept_as = folder, n
        wanted = self._kept_wanted(folder, n)
        self.engine.keep_kv(kept_prefixes(wanted, self.executor.open_kept(wanted)))

    def foresee_kv(self, folder: str, n: int | str | None) -> None:
        """Makes ready for `keep_kv` of the same, where another process still keeps KV: its files are mapped
        as they fill."""
        self.executor.open_kept(self._kept_wanted(folder, n)._replace(ahead=True))

    def _kept_wanted(self, folder: str | None, n: int | str | None) -> KeptWanted:
        # The same weights make other KV with another rope_theta, say, or in another function of a user's.
        follows_from = self._of_weights, self.dtype, self.options.kv_dtype, self._of_scales, self.model.name
        asked = n if isinstance(n, int) else None
        return KeptWanted(folder, " ".join(map(str, (*follows_from, asked))), asked)

    def update_weights(
        self,
        source: str | Path | ModelSource | Mapping[str, Any],
        *,
        revision: str | None = None,
        keep_kv: bool = False,
    ) -> None:
        """The model goes on with other weights, as after a step of training. Nothing is compiled anew.

        ``source``: a model, as `LLM` takes one, which must be the same but for its weights; or arrays by
        name, all of them, with the names, shapes and dtypes of those that were loaded. Arrays are copied.
        ``revision``: of a model of the Hub.

        ``keep_kv``: False forgets cached prefixes, and computes the KV of requests that run again from their
        tokens. True lets both stay as the weights before made them; then no KV is kept by content any more,
        until an update without it. Fixed scales of KV (``kv_dtype="int8-channel"``) stay as they were found;
        another process finds its own from the new weights, and what is kept with these is not found there.
        Tokenizer and end tokens stay, too.

        It may be called between two steps, as from ``on_token``. ``UserError`` for what does not fit, which
        is named; the weights are the old ones then. Host memory must have room for the new weights.
        """
        self.put_weights(self.load_weights(source, revision), keep_kv=keep_kv)

    def load_weights(
        self, source: str | Path | ModelSource | Mapping[str, Any], revision: str | None = None
    ) -> LoadedWeights:
        """What `update_weights` puts in place: read into host memory, and checked. In any thread."""
        n_bytes, device = tree_bytes(self._like), _host(self.place.load_device)
        if isinstance(source, Mapping):
            check_same_arrays(self._like, source, "the new weights")
            check_weights(n_bytes, self.dtype, device)
            params = copied(source, device)
        else:
            opened = open_weights(source, revision, self.model, self.dtype)
            check_weights(n_bytes, self.dtype, device)
            params = dict(opened.load(self.dtype, device, None))
            check_same_arrays(self._like, params, "the new weights")
        return LoadedWeights(params, fingerprint(params) if self.options.keeps_kv else "")

    def put_weights(self, loaded: LoadedWeights, *, keep_kv: bool = False) -> None:
        """As `update_weights`, of what `load_weights` gave. Between two steps."""
        with self._turn:
            self.engine.put_weights(loaded.params, keep_kv=keep_kv)
            self._of_weights = loaded.fingerprint
            if self.options.keeps_kv and not keep_kv:
                self.keep_kv(*self._kept_as)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; outputs in the prompts' order, ``n`` continuations in each one's
        ``outputs``.

        A prompt is a string, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [int]}``; a
        flat list of token ids is one prompt. ``sampling_params``: one for all (default ``SamplingParams()``)
        or one each; ``priority``: one each (default 0; lower goes first, where the scheduling policy looks at
        it). ``on_token`` is called for every token as it comes.

        ``use_tqdm``: True shows a bar of finished prompts where stderr is a terminal and there is no
        ``on_token``; a callable makes one, as ``tqdm.tqdm`` does; False shows none. ``UserError`` for a
        prompt that cannot be served; then none is.
        """
        prompts = _list_of(prompts)
        params = _one_each(sampling_params, len(prompts))
        if not isinstance(priority, Sequence | np.ndarray | None):
            raise UserError(f"priority={priority!r:.60} must be a list, one each for the prompts")
        if priority is not None and len(priority) != len(prompts):
            raise UserError(f"{len(priority)} priorities for {len(prompts)} prompts: give one each")
        if on_token is not None and not callable(use_tqdm):
            use_tqdm = False
        with (
            self._queued(prompts, params, priority) as (ids, events),
            prompt_bar(use_tqdm, len(ids)) as one_more,
        ):
            finished: dict[str, RequestOutput] = {}
            while len(finished) < len(ids):
                event = next(events)
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

        A conversation is a list of ``{"role": …, "content": …}``, whose content is a text, or a list of
        ``{"type": "text", "text": …}``, a line each. ``template`` goes to the template as it is, but
        ``chat_template`` (one in place of the model's) and ``continue_final_message`` (go on with the last
        message). The rest is as of `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [self.chat_prompt(conversation, **template) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_token=on_token)

    def chat_prompt(self, messages: Any, **template: Any) -> dict[str, Any]:
        """The prompt, text and token ids, that ``chat`` makes of one conversation."""
        tokenizer = self._tokenizer_for("chat")
        template.setdefault("add_generation_prompt", not template.get("continue_final_message"))
        text = tokenizer.apply_chat_template([with_text(message) for message in messages], **template)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str]:
        """Continues one prompt and yields its text piece by piece as tokens come (bad input: ``UserError`` at
        once).

        ``best_of`` and beam search choose at the end, so their text comes then.
        """
        if sampling_params is not None and sampling_params.n > 1:
            raise UserError(
                f"n={sampling_params.n} texts cannot be streamed as one: use generate with on_token"
            )
        self._tokenizer_for("stream, which gives text,")
        pieces = self._pieces(prompt, _one_each(sampling_params, 1))
        next(pieces)  # queues the request
        return pieces

    def _pieces(self, prompt: Prompt, params: Sequence[SamplingParams]) -> Generator[str]:
        with self._queued([prompt], params) as (_, events):
            yield ""  # begun now, so that closing it early ends the request
            finished = False
            while not finished:
                event = next(events)
                finished = event.output is not None
                if event.new_text:
                    yield event.new_text

    def serve(self, host: str = "127.0.0.1", port: int = 8000, **settings: Any) -> None:
        """Serves the model over HTTP, as `jaxlamina serve` does, until SIGINT or SIGTERM; from the main
        thread.

        ``settings``: as of `jaxlamina.server.settings.Settings`. ``UserError`` for a port that is taken, and
        for an unknown setting.
        """
        from jaxlamina.server.listening import bound, shown
        from jaxlamina.server.run import App
        from jaxlamina.server.settings import Settings

        unknown = sorted(settings.keys() - {field.name for field in dataclasses.fields(Settings)})
        if unknown:
            raise UserError(f"serve has no setting {unknown[0]!r}: jaxlamina serve --help lists them")
        settings.setdefault("served_model_names", ("model",))
        with bound(host, port) as listener, stderr_bar("compiling") as on_progress:
            address = shown(listener, settings.get("ssl_certfile") is not None)
            app = App(
                self,
                Settings(**settings),
                on_progress,
                lambda: print(f"ready: {address}/v1", file=sys.stderr, flush=True),
            )
            listener.listen()
            app.run(listener)

    @property
    def model_device(self) -> jax.Device:
        """Where the model's slices are computed: the first model worker's."""
        return self.place.model_device

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with ``encode``, ``decode`` and ``apply_chat_template``. ``UserError`` if it
        has none."""
        tokenizer: Tokenizer = self._tokenizer_for("get_tokenizer()")
        return tokenizer

    def split_report(self) -> SplitReport:
        """Slices, what each cut keeps and what crosses between the pools, for a decode step of one
        request. Where model workers share out the weights (``tensor_parallel``): of the first one's share of
        the model."""
        return self.executor.report

    def stats(self) -> dict[str, Any]:
        """Counts and seconds so far; buckets; slots; programs compiled, by what they were compiled for; and
        over ranks how decode steps are staggered and where attention is computed
        (`RanksExecutor.staggering`, `RanksExecutor.local_attention`)."""
        staggering, local = self.executor.staggering(), self.executor.local_attention()
        return dataclasses.asdict(self.engine.stats) | {
            "mean_batch_size": self.engine.stats.mean_batch_size,
            "n_compilations": self.executor.programs.total + self.engine.sampler.n_programs,
            "compilations": dict(self.executor.programs.counts) | {"sampler": self.engine.sampler.n_programs},
            "buckets": dataclasses.asdict(self.buckets),
            **self.engine.kv_stats(),
            "dtype": self.dtype,
            "kv_headroom": self.engine.scheduler.headroom.share,
            **({"staggering": staggering} if staggering is not None else {}),
            **({"local_attention": local} if local is not None else {}),
            "prompt_chunk_tokens": self.engine.scheduler.prefill_chunk,
            "model_device": self.place.compute_pool,
            "attention_device": self.place.attention_pool,
        }

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes: the next prompt is computed from its first token on."""
        with self._turn:
            self.engine.reset_prefix_cache()

    @contextmanager
    def _queued(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int] | None = None,
    ) -> Iterator[tuple[list[str], Iterator[TokenEvent]]]:
        """The prompts as requests of the engine, and their events as they come; those not finished on leaving
        are aborted."""
        ids: list[str] = []
        come = deque[TokenEvent]()
        try:
            for prompt, p, priority in zip(prompts, params, priorities or [0] * len(prompts), strict=True):
                text, tokens = self._tokens(prompt)
                with self._turn:
                    ids.append(self.engine.add_request(tokens, p, text, priority=priority))
                    self._come[ids[-1]] = come
            yield ids, self._events(come)
        finally:
            with self._turn:
                for request_id in ids:
                    self.engine.abort(request_id)
                    del self._come[request_id]

    def _events(self, come: deque[TokenEvent]) -> Iterator[TokenEvent]:
        """Those of ``come``, of which each step adds some. It adds others' to theirs: several texts may be
        streamed at once, by turns or by threads."""
        while True:
            while come:
                event = come.popleft()
                if event.error is not None:
                    raise event.error
                yield event
            with self._turn:
                for event in () if come else self.engine.step():
                    if event.request_id in self._come:
                        self._come[event.request_id].append(event)

    def _tokens(self, prompt: Any) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer_for("a text prompt").encode(prompt)
        if isinstance(prompt, list | tuple) or hasattr(prompt, "__array__"):
            return None, prompt  # the engine looks at each token id
        if not isinstance(prompt, Mapping) or not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise UserError(
                'a prompt must be a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": '
                f"[…]}}, not {prompt!r:.80}"
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
                f"{names[0]} finds fixed scales, which {kv_dtype=} has not: take "
                f"{' or '.join(CALIBRATED_KV_DTYPES)}"
            )
        rows = None
        if tokens is not None:
            rows = calibration_rows(tokens, self._encode_calibration, self.model.vocab_size)
        return Calibration(rows) if headroom is None else Calibration(rows, headroom)

    def _encode_calibration(self, text: str) -> list[int]:
        tokenizer = self._tokenizer_for("a calibration text")
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _dtype(self, asked: str, own: str | None, on_cpu: bool) -> dtypes.Chosen:
        """A user's own function computes in its parameters' dtype; ours in any."""
        if self.model.dtype is None:
            return dtypes.chosen(asked, own, on_cpu)
        if asked not in (dtypes.AUTO, self.model.dtype):
            raise UserError(
                f"dtype={asked!r}: this model's function is of {self.model.dtype} parameters; make it with "
                "others, or leave dtype out"
            )
        return dtypes.Chosen(self.model.dtype, f"dtype={self.model.dtype}, the parameters' own")

    @property
    def config(self) -> ModelConfig:
        """Of a model of ours. ``UserError`` for a user's own, which has none."""
        if self.model.config is None:
            raise UserError("this model is a function of its user's, and has no config: see LLM.model")
        return self.model.config

    def _longer(self, length: int) -> str:
        """What would let longer requests in than ``max_model_len``, which is at most ``length``."""
        if self.max_model_len < length:
            return f", or give more kv_slots than {self.executor.n_slots}"
        longest = self.model.max_len
        return f", or raise max_model_len, to {longest} at most" if length < longest else ""

    def _length(self, max_model_len: int | None) -> int:
        longest = self.model.max_len
        if max_model_len is None:
            return longest
        if not 2 <= max_model_len <= longest:
            raise UserError(f"{max_model_len=} must be at least 2 and at most {longest}, the model's length")
        return max_model_len


def _host(device: jax.Device) -> jax.Device:
    """Where arrays are in host memory, beside what ``device`` has; that itself where JAX knows no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return device


def _list_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Each prompt; a flat list of token ids is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "__array__"):
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts must be a prompt or a list of them, not {prompts!r:.80}")
    given: list[Any] = list(prompts)
    is_flat = bool(given) and isinstance(given[0], int | np.integer)
    return [given] if is_flat else given


def _checked(options: Mapping[str, Any]) -> LLMOptions:
    known = definitions(LLMOptions)
    for name in options:
        if name not in known:
            near = "".join(f", there is {there!r}" for there in difflib.get_close_matches(name, known, 1))
            raise TypeError(f"LLM has no option {name!r}{near}: help(jaxlamina.LLM) lists them")
    return LLMOptions(**options)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise UserError(f"sampling_params must be a SamplingParams, or a list of them, not {params!r:.80}")
    if len(params) != n:
        raise UserError(f"{len(params)} sampling parameters for {n} prompts: give one for all or one each")
    return params


# The options, for `help` and for editors: of the definitions, and so said once.
_own = inspect.signature(LLM.__init__)
LLM.__init__.__signature__ = _own.replace(  # type: ignore[attr-defined]
    parameters=[
        *(p for p in _own.parameters.values() if p.kind is not p.VAR_KEYWORD),
        *(
            inspect.Parameter(
                d.name, inspect.Parameter.KEYWORD_ONLY, default=d.default, annotation=d.annotation
            )
            for d in definitions(LLMOptions).values()
        ),
    ]
)
LLM.__doc__ = (LLM.__doc__ or "").replace("{options}", described(LLMOptions).lstrip())
