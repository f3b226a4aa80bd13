"""`jaxlamina serve`: the OpenAI-compatible server. Knows its options; what it does is `jaxlamina.server`'s.

Everything it says is on stderr, but uvicorn's access log, which is on stdout.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from jaxlamina.cli import launch, model_options
from jaxlamina.cli.model_options import CommandOptions, with_options
from jaxlamina.console.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.process import garbage
from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.server.dashboard import PAGE
from jaxlamina.server.pieces import SECRET, STANDBY
from jaxlamina.server.settings import Settings
from jaxlamina.server.tls import tls_context
from jaxlamina.supervisor.changes import JobCommand
from jaxlamina.supervisor.settings import Supervision

STARTER: ContextVar[JobCommand | None] = ContextVar("STARTER", default=None)
"""The command of which this one is part, where there is one: `jaxlamina launch` starts all ranks."""


_asked_to_end = threading.Event()


def heed_sigterm() -> None:
    """Until there is something to bring to an end SIGTERM ends this process well; jax.distributed would take
    the signal and go on."""
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    _asked_to_end.set()
    sys.unraisablehook = lambda _: None  # a callback of Python's collector may get what is raised here
    sys.exit(0)


@with_options
def serve(
    options: CommandOptions,
    settings: Settings,
    supervision: Supervision,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    uds: Annotated[
        str | None, typer.Option(help="A Unix socket to listen at, in place of host and port.")
    ] = None,
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
    weights: Annotated[
        str | None,
        typer.Option(hidden=True, help="Whose weights --model has: a supervisor's, after an update."),
    ] = None,
    weights_revision: Annotated[str | None, typer.Option(hidden=True, help="Of --weights.")] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API: completions, chats, batches."""
    settings = replace(
        settings,
        served_model_names=tuple(served_model_name or [options.model]),
        api_key=api_key,
        uds=uds,
        supervisor=os.environ.get(SECRET),
    )
    if not all(name.strip() for name in settings.served_model_names):
        raise UserError("--served-model-name is empty: requests could not name the model")
    # Before anything takes long. What a supervisor has at its port is not for the server below it.
    ApiKeys(api_key, settings.api_key_file)
    if settings.supervisor is None:
        has_tls = tls_context(settings.ssl_certfile, settings.ssl_keyfile) is not None
        if has_tls and uds is not None:
            raise UserError("--ssl-certfile is for a port, and --uds has none: leave one out")
    path = options.find()
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if supervision.supervise:
        from jaxlamina.server.listening import door, shown
        from jaxlamina.supervisor.run import supervise

        heed_sigterm()
        with door(uds, host, port) as front:
            front.listen()
            address = shown(front, settings.ssl_certfile is not None)
            say(f"serving {settings.served_model_names[0]} at {address}")
            if settings.dashboard:
                say(f"dashboard: {address}{PAGE}")
            announce = partial(say, f"ready: {address}/v1")
            code = supervise(_job(), settings, supervision, front, announce, options.kept_kv_folder)
        raise typer.Exit(code)
    if settings.supervisor is None:
        supervision.check_alone()
    garbage.hold()
    with console.status("starting JAX"):
        from jaxlamina.server import imported

        imported.await_turn(imported.OF_A_SERVER)
        from jaxlamina import ranks
        from jaxlamina.server.listening import door, shown
        from jaxlamina.server.run import App
        from jaxlamina.server.standing_by import stand_by
        from jaxlamina.workers import kept_kv
    if settings.pool_metrics_interval and ranks.current() is None:
        raise UserError(
            "--pool-metrics-interval records ranks: start them with `jaxlamina launch … -- serve …`"
        )
    # The socket that a supervisor names is the server's once it is ready: it asks there.
    of_supervisor = settings.supervisor is not None
    with nullcontext() if of_supervisor else door(uds, host, port) as listener:
        heed_sigterm()
        stands_by = os.environ.pop(STANDBY, None) is not None
        asked = options
        if stands_by and asked.keeps_kv:  # the folder is another's as yet
            options = replace(options, kept_kv_folder=None, kept_kv_slots=1)
        other = None if weights is None else (weights, weights_revision)
        recording = settings.pool_metrics_interval > 0
        llm = model_options.load(console, path, options, weights=other, recording=recording)
        model_options.say_dtype(console, llm)
        address = "" if listener is None else shown(listener, settings.ssl_certfile is not None)
        with bar(console, "compiling", line_every_s=15.0) as on_progress:
            on_ready = (lambda: None) if of_supervisor else partial(say, f"ready: {address}/v1")
            app = App(llm, settings, on_progress, on_ready)
            if stands_by:
                if asked.keeps_kv and asked.kept_kv_folder is not None:
                    llm.foresee_kv(asked.kept_kv_folder, asked.kept_kv_slots)
                app.stood_by(stand_by(llm, settings, on_progress))
                if asked.keeps_kv:
                    llm.keep_kv(asked.kept_kv_folder, asked.kept_kv_slots)
            if listener is not None:
                listener.listen()
            if not of_supervisor:
                say(f"serving {settings.served_model_names[0]} at {address}")
                if settings.dashboard:
                    say(f"dashboard: {address}{PAGE}")
            if _asked_to_end.is_set():  # what ran then took the exception for its own
                app.close()
                raise typer.Exit(0)
            ended = app.run(listener)
    if app.is_compiling or not ended:  # a thread that compiles does not end by itself
        if ended:
            kept_kv.flush_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if ended else 1)


def _job() -> JobCommand:
    """The command that serves the same, as `Supervision` runs it."""
    if (starter := STARTER.get()) is not None:
        return starter
    if "jaxlamina.ranks" in sys.modules:
        raise UserError(
            "--supervise starts the ranks itself: jaxlamina launch … -- serve …, on several hosts by its "
            "--starter"
        )
    os.environ.update(launch.environment())
    return JobCommand((sys.executable, "-P", "-m", "jaxlamina", *sys.argv[1:]))
