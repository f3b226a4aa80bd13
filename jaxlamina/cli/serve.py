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
from jaxlamina.cli.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.server.settings import MAX_BODY_MIB, MAX_CONCURRENT_REQUESTS, SHUTDOWN_TIMEOUT_S, Settings

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def serve(
    model: model_options.Model = model_options.DEFAULT_MODEL,
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
    load_format: model_options.LoadFormat = "auto",
    dtype: model_options.DType = "float32",
    max_model_len: model_options.MaxModelLen = None,
    max_num_seqs: model_options.MaxNumSeqs = 32,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens computed in one step; longer prompts come in chunks.")
    ] = 2048,
    mixed_steps: Annotated[
        bool,
        typer.Option(
            "--mixed-steps", help="Compute prompts in the programs of decode steps; more programs to compile."
        ),
    ] = False,
    kv_slots: Annotated[
        int | None, typer.Option(min=1, help="Tokens whose KV is kept, of all requests together.")
    ] = None,
    kv_dtype: model_options.KvDtype = "auto",
    host_kv_slots: Annotated[
        int, typer.Option(min=0, help="Tokens whose KV may wait in host memory when there is no room.")
    ] = 0,
    split: model_options.Split = True,
    attention_workers: Annotated[int, typer.Option(min=1, help="Workers that share the KV.")] = 1,
    partition: model_options.Partition = "heads",
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Start prompts from KV that others left.",
        ),
    ] = True,
    scheduling_policy: model_options.SchedulingPolicy = "fifo",
    kv_manager: model_options.KvManager = "token",
    kv_headroom: model_options.KvHeadroom = None,
    gpu_memory_utilization: model_options.GpuMemoryUtilization = None,
    chat_template: model_options.ChatTemplate = None,
    seed: Annotated[int, typer.Option(min=0, help="Requests without a seed get theirs from it.")] = 0,
    warm_up: Annotated[
        bool,
        typer.Option(
            "--warm-up/--no-warm-up", help="Compile all programs first; or each when it is first needed."
        ),
    ] = True,
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
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Requests answered at once; one more gets status 429.")
    ] = MAX_CONCURRENT_REQUESTS,
    max_body_mib: Annotated[int, typer.Option(min=1, help="A request's largest body.")] = MAX_BODY_MIB,
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
    settings = Settings(
        served_model_names=tuple(served_model_name or [model]),
        api_key=api_key,
        max_concurrent_requests=max_concurrent_requests,
        max_body_bytes=max_body_mib * 2**20,
        shutdown_timeout_s=shutdown_timeout,
        files_dir=files_dir,
        log_level=uvicorn_log_level,
        warm_up=warm_up,
        warm_up_scored_prompts=warm_up_prompt_logprobs,
        pool_metrics_interval_s=pool_metrics_interval,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=enable_prefix_caching,
    )
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
        llm = model_options.load(
            console,
            model,
            chat_template=chat_template,
            load_format=load_format,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            mixed_steps=mixed_steps,
            kv_slots=kv_slots,
            kv_dtype=kv_dtype,
            host_kv_slots=host_kv_slots,
            split=split,
            attention_workers=attention_workers,
            partition=partition,
            prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            kv_manager=kv_manager,
            kv_headroom=kv_headroom,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            recording=pool_metrics_interval > 0,
        )
        address = "http://{}:{}".format(*_shown(*listener.getsockname()[:2]))

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        with bar(console, "compiling") as on_progress:
            app = App(llm, settings, on_progress, lambda: say(f"ready: {address}/v1"))
            listener.listen()
            say(f"serving {settings.served_model_names[0]} at {address}")
            ended = app.run(listener)
    if not ended:
        sys.stderr.flush()
        os._exit(1)  # a thread that compiles does not end by itself


def _shown(host: str, port: int) -> tuple[str, int]:
    return (f"[{host}]" if ":" in host else host), port
