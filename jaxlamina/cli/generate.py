"""`jaxlamina generate`: prompts in, text as it is written, then how fast it was and how the model was cut.

Text goes to stdout, everything else to stderr. Knows `LLM`; nothing of how it runs.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxlamina.cli import model_options
from jaxlamina.cli.model_options import CommandOptions, with_options
from jaxlamina.console.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxlamina.engine.outputs import RequestOutput
    from jaxlamina.llm import LLM

# The decode step that --profile records, by when all prompts are being continued, and how many times it is
# run.
_PROFILE_AFTER, _PROFILED_STEPS = 2, 8


# Greedy, and long enough to be read.
_USUAL = SamplingParams(max_tokens=128, temperature=0.0)


@with_options
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT", help="Each is a prompt of its own; '-' reads one from stdin."),
    ],
    *,
    params: SamplingParams = _USUAL,
    options: CommandOptions,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or continue it as it is. "
            "Default: the template where the model has one.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before the prompt, with --chat.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Over ranks: record a decode step on all of them, write their spans for Perfetto (.json, "
            ".json.gz) and print the shares."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout instead of text.")
    ] = False,
) -> None:
    """Write text with a model that is cut at its attention operators: compute pool and memory pool apart."""
    texts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]
    if system is not None and chat is False:
        raise UserError("--system needs the chat template: leave out --raw")
    _check(texts, params, as_json, profile)
    path = options.find()
    console = Console(stderr=True)
    with console.status("starting JAX"):
        import jaxlamina.llm  # noqa: F401  (the slow import, under the spinner)
    started = time.perf_counter()
    llm = model_options.load(
        console,
        path,
        options,
        default_seqs=len(texts) * params.n_sequences,
        default_policy=model_options.FIRST_COME,
        recording=profile is not None,
    )
    load_s = time.perf_counter() - started
    ready = _prompts(llm, texts, chat, system)
    with console.status("compiling, or reading compiled programs from disk"):
        # Two tokens go through every program of the first steps, so that the speed below is one of decoding.
        llm.generate(
            ready, replace(params, max_tokens=min(2, params.max_tokens or 2), min_tokens=0), use_tqdm=False
        )
        llm.reset_prefix_cache()
    warm_s = time.perf_counter() - started - load_s
    if profile is not None:
        recorder: Any = llm.executor
        recorder.record_later(_PROFILE_AFTER, _PROFILED_STEPS)
    watch = _Stopwatch(streams=not params.chosen_at_end)
    show = watch.on_token if as_json else _Streamer(watch, n_texts=len(texts) * params.n).on_token
    with _prompt_bar(console, len(texts)) as on_output:

        def on_token(event: Any) -> None:
            show(event)
            on_output(event)

        outputs = llm.generate(ready, params, on_token=on_token)
    n_rows = len(outputs) * params.n_sequences
    if profile is not None:
        _write_profile(console, llm, profile)
    if as_json:
        record = _record(llm, options, outputs, watch, watch.tokens_per_s(n_rows), load_s, warm_s)
        print(json.dumps(record, ensure_ascii=False))
        return
    _write_several(outputs, params.n)
    _closing_lines(console, llm, n_rows, watch, load_s, warm_s, options.split)


def _check(texts: list[str], params: SamplingParams, as_json: bool, profile: Path | None) -> None:
    if not all(texts):
        raise UserError("the prompt is empty: give some text")
    for option, asked in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
        if asked is not None and not as_json:
            raise UserError(f"{option} are shown in the JSON output only: add --json")
    if profile is not None:
        _check_profile(profile, params.max_tokens or 0)


def _check_profile(path: Path, max_tokens: int) -> None:
    from jaxlamina import ranks
    from jaxlamina.profiling import perfetto

    if ranks.current() is None:
        raise UserError(
            "--profile records ranks: start them with `jaxlamina launch … -- generate --profile …`"
        )
    if max_tokens < _PROFILE_AFTER + 2:
        raise UserError(f"--profile needs a few decode steps: take --max-tokens {_PROFILE_AFTER + 2} or more")
    perfetto.check(path, "--profile")


def _write_profile(console: Console, llm: LLM, path: Path) -> None:
    from jaxlamina.profiling import perfetto

    recorder: Any = llm.executor
    timeline = recorder.recorded
    if timeline is None:
        console.print(f"no profile: the text ended within {_PROFILE_AFTER + 1} tokens", style="yellow")
        return
    perfetto.write({"decode": timeline}, path)
    for pool in timeline.pools:
        found = timeline.shares(timeline.ranks_of(pool))
        shares = ", ".join(f"{kind} {found[kind]:.0%}" for kind in timeline.kinds_of(pool))
        console.print(f"{pool} pool, of {timeline.step_ms:.2f} ms a step: {shares}", highlight=False)


def _write_several(outputs: list[RequestOutput], n: int) -> None:
    """Texts that could not be streamed, since they would have mixed: numbered by prompt, and by
    continuation."""
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            if len(outputs) * n > 1:
                of_prompt = [str(i + 1)] if len(outputs) > 1 else []
                of_n = [str(completion.index + 1)] if n > 1 else []
                print(f"[{'.'.join(of_prompt + of_n)}] {completion.text}")


def _prompts(llm: LLM, texts: list[str], chat: bool | None, system: str | None) -> list[Any]:
    """What `LLM.generate` takes, through the chat template where it is wanted."""
    if llm.tokenizer is None:
        raise UserError(
            "generate takes text, and this model has no tokenizer: give it one (FlaxModel's tokenizer=…), or "
            "ask by token ids, LLM.generate in Python or a server (jaxlamina serve)"
        )
    if chat is None:
        chat = system is not None or bool(getattr(llm.tokenizer, "chat_template", None))
    if not chat:
        return list(texts)
    first = [] if system is None else [{"role": "system", "content": system}]
    return [llm.chat_prompt([*first, {"role": "user", "content": text}]) for text in texts]


@dataclass
class _Stopwatch:
    """Times of the first and the last token. A rate over what lies between counts decode steps only.

    Without ``streams`` all tokens come at the end, and a rate counts the time since the start.
    """

    streams: bool = True
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    n_tokens: int = 0

    def on_token(self, _: Any) -> None:
        now = time.perf_counter()
        if not self.n_tokens:
            self.first = now
        self.last = now
        self.n_tokens += 1

    @property
    def seconds(self) -> float:
        return self.last - self.started

    def tokens_per_s(self, n_rows: int) -> float | None:
        """Tokens a second after the first of each of ``n_rows`` sequences; None for too few."""
        n, span = self.n_tokens - n_rows, self.last - self.first
        if not self.streams:
            n, span = self.n_tokens, self.seconds
        return n / span if n > 0 and span > 0 else None


class _Streamer:
    """Writes a single text as it comes; of several, only counts, since their pieces would mix."""

    def __init__(self, watch: _Stopwatch, n_texts: int) -> None:
        self.watch = watch
        self.write: Callable[[str], Any] = sys.stdout.write if n_texts == 1 else lambda _: None

    def on_token(self, event: Any) -> None:
        self.watch.on_token(event)
        if event.new_text:
            self.write(event.new_text)
        if event.output is not None:
            self.write("\n")
        sys.stdout.flush()


@contextmanager
def _prompt_bar(console: Console, n: int) -> Iterator[Callable[[Any], None]]:
    """A bar of finished prompts where there are several; a single one is seen as it is written."""
    if n == 1:
        yield lambda event: None
        return
    with bar(console, "prompts") as on_progress:
        done = itertools.count(1)
        on_progress(0, n)
        yield lambda event: None if event.output is None else on_progress(next(done), n)


def _closing_lines(
    console: Console, llm: LLM, n_rows: int, watch: _Stopwatch, load_s: float, warm_s: float, split: bool
) -> None:
    model_options.say_dtype(console, llm)
    stats = llm.stats()
    rate = watch.tokens_per_s(n_rows)
    speed = f"{rate:.1f} tokens/s" if rate is not None else f"{watch.seconds:.2f} s"
    console.print(
        f"\n{watch.n_tokens} tokens, {speed} (first after {(watch.first - watch.started) * 1e3:.0f} ms; "
        f"loaded in {load_s:.1f} s, {stats['n_compilations']} programs ready in {warm_s:.1f} s)",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    if split:
        where = f"compute pool on {stats['model_device']}, memory pool on {stats['attention_device']}"
        line = f"{llm.split_report().line()}; {where}"
    else:
        line = f"not split: each step is one program on {stats['model_device']}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _record(
    llm: LLM,
    options: CommandOptions,
    outputs: list[RequestOutput],
    watch: _Stopwatch,
    tokens_per_s: float | None,
    load_s: float,
    warm_s: float,
) -> dict[str, Any]:
    report = llm.split_report() if options.split else None
    return {
        "model": options.model,
        "dtype": llm.dtype,
        "outputs": [asdict(output) for output in outputs],
        "n_tokens": watch.n_tokens,
        "seconds": round(watch.seconds, 4),
        "tokens_per_s": tokens_per_s,
        "load_s": round(load_s, 3),
        "warm_up_s": round(warm_s, 3),
        "split": report
        and {
            "n_slices": report.n_slices,
            "n_programs": report.n_programs,
            "context_bytes": [cut.context_bytes for cut in report.cuts],
            "exchanged_bytes_per_token": report.exchanged_bytes_per_token,
        },
    }
