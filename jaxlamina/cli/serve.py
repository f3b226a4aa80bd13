"""`jaxlamina serve`: the OpenAI-compatible server. Knows its options; what it does is `jaxlamina.server`'s.

Everything it says is on stderr, but uvicorn's access log, which is on stdout.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from jaxlamina.cli import model_options
from jaxlamina.cli.model_options import CommandOptions, with_options
from jaxlamina.console.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.process import garbage
from jaxlamina.server.settings import Settings


@with_options
def serve(
    options: CommandOptions,
    settings: Settings,
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
) -> None:
    """Serve a model over HTTP, as OpenAI's API: completions, chats, batches."""
    settings = replace(
        settings, served_model_names=tuple(served_model_name or [options.model]), api_key=api_key
    )
    path = options.find()
    garbage.hold()
    console = Console(stderr=True)
    with console.status("starting JAX"):
        from jaxlamina import ranks
        from jaxlamina.server.run import App, bound
    if settings.pool_metrics_interval and ranks.current() is None:
        raise UserError(
            "--pool-metrics-interval records ranks: start them with `jaxlamina launch … -- serve …`"
        )
    with bound(host, port) as listener:
        # Until there is something to bring to an end; jax.distributed would take the signal and go on.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        llm = model_options.load(console, path, options, recording=settings.pool_metrics_interval > 0)
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
