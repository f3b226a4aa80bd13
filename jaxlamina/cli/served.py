"""Where `chat` and `batch` find a server: at an address, or in this process, which then loads the model.

Both are spoken to in the same way; the one in this process listens at a Unix socket that nobody else can
open.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxlamina.cli import model_options
from jaxlamina.cli.model_options import CommandOptions
from jaxlamina.errors import UserError
from jaxlamina.server.client import Client
from jaxlamina.supervisor.settings import Supervision

_RECOVERY_S = Supervision.recovery_timeout  # as a supervisor has it by itself

Url = Annotated[
    str | None,
    typer.Option(help="A server's address, such as http://localhost:8000. Default: in this process."),
]
ApiKey = Annotated[str | None, typer.Option(envvar="JAXLAMINA_API_KEY", help="The server's key, with --url.")]


@contextmanager
def server(
    console: Console,
    url: str | None,
    api_key: str | None,
    options: CommandOptions,
    *,
    default_seqs: int,
    files_dir: Path | None = None,
) -> Iterator[Client]:
    """A client of the server at ``url``, or of one in this process with the model that ``options`` say."""
    if url is not None:

        def say(error: UserError) -> None:
            console.print(f"waiting: {error}", style="yellow", highlight=False, markup=False, soft_wrap=True)

        client = Client(url, api_key=api_key, recovery_s=_RECOVERY_S, on_wait=say)
        if client.get("/health").get("status") != "ready":
            raise UserError(f"{url} is no server of this kind")
        yield client
        return
    from jaxlamina.server.settings import Settings

    path = options.find()
    with console.status("starting JAX"):
        from jaxlamina.server.run import in_process
    with tempfile.TemporaryDirectory(prefix="jaxlamina-") as folder:
        uds = str(Path(folder, "server"))
        settings = Settings(
            (options.model,),
            uds=uds,
            files_dir=files_dir,
            uvicorn_log_level="error",
            warm_up=False,
            shutdown_timeout=0.0,
        )
        llm = model_options.load(console, path, options, default_seqs=default_seqs)
        model_options.say_dtype(console, llm)
        with in_process(llm, settings):
            yield Client(uds=uds)
