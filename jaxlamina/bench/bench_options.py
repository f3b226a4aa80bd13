"""Options that several benches have, each defined once, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config

AsJson = Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout, no tables.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds, in which what is compared takes turns.")]
Seed = Annotated[int, typer.Option(min=0, help="Of drawn lengths and arrivals.")]
Figure = Annotated[Path | None, typer.Option(help="Draw what was measured: a .svg, .png or .pdf.")]

# Of model shapes with random weights.
Config = Annotated[str, typer.Option(help="A model shape: a name in configs/models, or a config.json.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Fewer layers than --config's shape has.")]
DType = Annotated[str, typer.Option(help="Weights and KV: bfloat16 or float32.")]
Case = Annotated[str, typer.Option(help="Requests x stored tokens, separated by commas, such as 64x4096.")]
Staggered = Annotated[
    str, typer.Option(help="Also split into so many staggered batches: numbers, separated by commas.")
]

# Of a server.
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


def shape_of(config: str, layers: int | None) -> Any:
    """The `ModelConfig` of ``--config`` and ``--layers``."""
    shape = model_config(config)
    if layers is None:
        return shape
    from jaxlamina.bench.split_bench import with_layers

    return with_layers(shape, layers)


def dtype_of(dtype: str) -> Any:
    """JAX's type of ``--dtype``'s name. ``UserError`` for another name."""
    from jaxlamina.run.make import DTYPES

    if dtype not in DTYPES:
        raise UserError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
