"""Options that several benches have, each defined once, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxlamina import model_files
from jaxlamina.cli.model_options import find
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config


def option(help: str, *flags: str, **how: Any) -> Any:
    """An option of a command; ``how``: as of `typer.Option`."""
    return typer.Option(*flags, help=help, **how)


AsJson = Annotated[bool, option("Only the line of JSON on stdout, no tables.", "--json")]
Rounds = Annotated[int, option("Timed rounds, in which what is compared takes turns.", min=1)]
RoundsOfEach = Annotated[
    int, option("Timed rounds of each job that is compared, one after another; medians count.", min=1)
]
WayS = Annotated[
    float,
    option("Seconds for each job that is compared, with its start and its compiling.", min=1, max=10**6),
]
Seed = Annotated[int, option("Of drawn lengths and arrivals.", min=0)]
Figure = Annotated[Path | None, option("Draw what was measured: a .svg, .png or .pdf.")]

# Of model shapes with random weights.
Config = Annotated[
    str,
    option(
        "A model shape, with random weights: a name in configs/models, or a config.json. Or a function that "
        "makes a FlaxModel, package.module:build."
    ),
]
Layers = Annotated[int | None, option("Fewer layers than --config's shape has.", min=1)]
DType = Annotated[str, option("Weights and KV: bfloat16 or float32.")]
Case = Annotated[str, option("Requests x stored tokens, separated by commas, such as 64x4096.")]
Staggered = Annotated[str, option("Also split into so many staggered batches: numbers, separated by commas.")]

# Of a server.
BaseUrl = Annotated[
    str | None, option("The server, such as https://example.org/v1. Default: --host and --port.")
]
Host = Annotated[str, typer.Option()]
Port = Annotated[int, typer.Option(min=1, max=65535)]
ServedModel = Annotated[str | None, option("Default: the first that the server has.")]
ApiKey = Annotated[str | None, option("The server's key.", envvar=["JAXLAMINA_API_KEY", "OPENAI_API_KEY"])]
Streams = Annotated[int, option("Requests of others that are answered meanwhile.", min=1)]


def address(base_url: str | None, host: str, port: int) -> str:
    """The server's, without "/v1"."""
    return (base_url or f"http://{host}:{port}").rstrip("/").removesuffix("/v1")


def shape_of(config: str, layers: int | None) -> Any:
    """The `ModelConfig` of ``--config`` and ``--layers``; "package.module:build" as it is."""
    if model_files.is_code(config):
        if layers is not None:
            raise UserError("--layers is for shapes: a model of yours has the layers that it is built with")
        return find(config)
    shape = model_config(config)
    if layers is not None and layers > shape.num_hidden_layers:
        raise UserError(f"--layers {layers}: {config} has {shape.num_hidden_layers}; say that or fewer")
    return shape if layers is None else shape.with_layers(layers)
