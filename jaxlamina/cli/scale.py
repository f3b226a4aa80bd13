"""`jaxlamina scale`: more or fewer workers for a supervised server that runs. Asks it over HTTP; what is done
there is `jaxlamina.supervisor`'s."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from jaxlamina.errors import UserError
from jaxlamina.server.client import Client, ServerError
from jaxlamina.supervisor.changes import MOST_S


def scale(
    attention: Annotated[int, typer.Option(help="Attention workers more, or fewer: 1, -1.")] = 0,
    model: Annotated[int, typer.Option(help="Model workers more, or fewer.")] = 0,
    prefill: Annotated[int, typer.Option(help="Prefill workers more, or fewer.")] = 0,
    url: Annotated[str, typer.Option(help="The supervised server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="JAXLAMINA_API_KEY", help="Its key.")] = None,
    stop_first: Annotated[
        bool,
        typer.Option(
            "--stop-first",
            help="End the job before the new one is made ready, where there is no room for both.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, max=MOST_S, help="Seconds for the new job to be ready.")
    ] = 600.0,
) -> None:
    """Give a server that runs below `serve --supervise` over ranks more or fewer workers. Its requests go on.

    A job of so many workers is made ready beside the one that runs, which is then ended.
    """
    change = {"instruction": "scale", "attention": attention, "model": model, "prefill": prefill}
    change |= {"stop_first": stop_first, "timeout": timeout}
    console = Console(stderr=True)
    try:
        with console.status("making the new job ready"):
            server = Client(url, api_key=api_key, silence_s=2 * timeout + 60)
            found = server.post("/v1/fault_tolerance/apply", change)
        console.print(f"{found['job']}, ready after {found['last_start_seconds']:.1f} s", highlight=False)
    except ServerError:
        raise
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"no answer from {url}: {error}; is it a supervised server?") from None
