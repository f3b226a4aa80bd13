"""`jaxlamina serve`: the OpenAI-compatible server. Knows its options; what it does is `jaxlamina.server`'s.

Everything it says is on stderr, but uvicorn's access log, which is on stdout.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxlamina.cli import model_options
from jaxlamina.cli.model_options import ModelOptions, with_options
from jaxlamina.console.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.process import garbage
from jaxlamina.server.reasoning import PARSERS as REASONING
from jaxlamina.server.settings import (
    CLIENT_TIMEOUT_S,
    GRAMMAR_TIMEOUT_S,
    MAX_BODY_MIB,
    MAX_CONCURRENT_REQUESTS,
    MAX_CONNECTIONS,
    MAX_GRAMMAR_BYTES,
    SHUTDOWN_TIMEOUT_S,
    Settings,
)
from jaxlamina.server.tool_parsers import PARSERS as CALL_FORMS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@with_options
def serve(
    options: ModelOptions,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="JAXLAMINA_API_KEY", help="Requests to /v1 must bring it: Authorization: Bearer KEY."
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests call the model; may be repeated. Default: --model."),
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Run the chat templates that requests bring: programs of theirs.",
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help=f"How the model calls tools: {', '.join(CALL_FORMS)}. Default: as its template says."
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help=f"Give what the model thinks apart, as reasoning_content: {', '.join(REASONING)}. Default: as text."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Requests without a seed get theirs from it.")] = 0,
    warm_up: Annotated[
        bool,
        typer.Option(
            "--warm-up/--no-warm-up",
            help="Compile the programs that serve every request first, and the others behind; or each when it is first needed.",
        ),
    ] = True,
    wait_for_all: Annotated[
        bool, typer.Option("--wait-for-all", help="Compile all programs before the first request.")
    ] = False,
    warm_up_prompt_logprobs: Annotated[
        bool,
        typer.Option(
            "--warm-up-prompt-logprobs", help="Also those of echo with logprobs and prompt_logprobs."
        ),
    ] = False,
    pool_metrics_interval: Annotated[
        float,
        typer.Option(
            min=0,
            help="Over ranks: seconds between decode steps that are recorded for each pool's times in /metrics. 0: none.",
        ),
    ] = 0.0,
    profile_after: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after the first step at which it is recorded once what each rank's device does; told in the log. 0: never.",
        ),
    ] = 0.0,
    profile_s: Annotated[float, typer.Option(min=0.1, help="Seconds that are recorded then.")] = 3.0,
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Requests answered at once; one more gets status 429.")
    ] = MAX_CONCURRENT_REQUESTS,
    max_body_mib: Annotated[int, typer.Option(min=1, help="A request's largest body.")] = MAX_BODY_MIB,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections open at once; one more is closed with status 503.")
    ] = MAX_CONNECTIONS,
    client_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds for a request's headers, between parts of its body, or without taking in an answer.",
        ),
    ] = CLIENT_TIMEOUT_S,
    max_grammar_bytes: Annotated[
        int,
        typer.Option(min=1, help="The longest schema, regular expression or choice an output is to follow."),
    ] = MAX_GRAMMAR_BYTES,
    grammar_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to compile it; what takes longer is refused.")
    ] = GRAMMAR_TIMEOUT_S,
    files_dir: Annotated[
        Path | None, typer.Option(help="Where files and batches are kept. Default: a temporary folder.")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM or SIGINT.")
    ] = SHUTDOWN_TIMEOUT_S,
    uvicorn_log_level: Annotated[str, typer.Option(help=", ".join(LOG_LEVELS) + ".")] = "info",
) -> None:
    """Serve a model over HTTP, as OpenAI's API: completions, chats, batches."""
    if uvicorn_log_level not in LOG_LEVELS:
        raise UserError(f"--uvicorn-log-level {uvicorn_log_level!r} must be one of {', '.join(LOG_LEVELS)}")
    for option, name, names in (
        ("--tool-call-parser", tool_call_parser, CALL_FORMS),
        ("--reasoning-parser", reasoning_parser, REASONING),
    ):
        if name is not None and name not in names:
            raise UserError(f"{option} {name!r} must be one of {', '.join(names)}")
    settings = Settings(
        served_model_names=tuple(served_model_name or [options.model]),
        api_key=api_key,
        max_concurrent_requests=max_concurrent_requests,
        max_body_bytes=max_body_mib * 2**20,
        max_connections=max_connections,
        client_timeout_s=client_timeout,
        max_grammar_bytes=max_grammar_bytes,
        grammar_timeout_s=grammar_timeout,
        shutdown_timeout_s=shutdown_timeout,
        files_dir=files_dir,
        trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        log_level=uvicorn_log_level,
        warm_up=warm_up,
        wait_for_all=wait_for_all,
        warm_up_scored_prompts=warm_up_prompt_logprobs,
        pool_metrics_interval_s=pool_metrics_interval,
        profile_after_s=profile_after,
        profile_s=profile_s,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_caching=options.enable_prefix_caching,
    )
    path = options.find()
    garbage.hold()
    console = Console(stderr=True)
    with console.status("starting JAX"):
        from jaxlamina import ranks
        from jaxlamina.server.run import App, bound
    if pool_metrics_interval and ranks.current() is None:
        raise UserError(
            "--pool-metrics-interval records ranks: start them with `jaxlamina launch … -- serve …`"
        )
    with bound(host, port) as listener:
        # Until there is something to bring to an end; jax.distributed would take the signal and go on.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        llm = model_options.load(console, path, options, seed=seed, recording=pool_metrics_interval > 0)
        model_options.say_dtype(console, llm)
        address = "http://{}:{}".format(*_shown(*listener.getsockname()[:2]))

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        with bar(console, "compiling", line_every_s=15.0) as on_progress:
            app = App(llm, settings, on_progress, lambda: say(f"ready: {address}/v1"))
            listener.listen()
            say(f"serving {settings.served_model_names[0]} at {address}")
            ended = app.run(listener)
    if app.is_compiling or not ended:  # a thread that compiles does not end by itself
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if ended else 1)


def _shown(host: str, port: int) -> tuple[str, int]:
    return (f"[{host}]" if ":" in host else host), port
