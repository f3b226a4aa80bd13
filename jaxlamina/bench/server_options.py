"""Options of the benches that ask a server, each defined once."""

from __future__ import annotations

from typing import Annotated

import typer

BaseUrl = Annotated[
    str | None,
    typer.Option(help="The server, such as https://example.org/v1. Default: --host and --port."),
]
Host = Annotated[str, typer.Option()]
Port = Annotated[int, typer.Option(min=1, max=65535)]
ServedModel = Annotated[str | None, typer.Option(help="Default: the first that the server has.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar=["JAXLAMINA_API_KEY", "OPENAI_API_KEY"], help="The server's key.")
]
Streams = Annotated[int, typer.Option(min=1, help="Requests of others that are answered meanwhile.")]


def address(base_url: str | None, host: str, port: int) -> str:
    """The server's, without "/v1"."""
    return (base_url or f"http://{host}:{port}").rstrip("/").removesuffix("/v1")
