"""`jaxlamina bench`: the group of commands. Each has a module of its own."""

from __future__ import annotations

import typer

from jaxlamina.bench.breakdown_cli import breakdown_command
from jaxlamina.bench.calibrate_cli import calibrate_command
from jaxlamina.bench.choice_cli import choice_command
from jaxlamina.bench.decode_cli import decode_command
from jaxlamina.bench.exchange_cli import exchange_command
from jaxlamina.bench.heavy_cli import heavy_command
from jaxlamina.bench.kernels_cli import kernels_command
from jaxlamina.bench.lamina_cli import lamina_command
from jaxlamina.bench.overhead_cli import overhead_command
from jaxlamina.bench.predict_cli import predict_command
from jaxlamina.bench.prefix_cli import prefix_command
from jaxlamina.bench.recovery_cli import recovery_command
from jaxlamina.bench.serve_cli import serve_command
from jaxlamina.bench.simulation_cli import simulation_command
from jaxlamina.bench.split_cli import split_command
from jaxlamina.bench.start_cli import start_command
from jaxlamina.bench.step_cli import step_command
from jaxlamina.bench.throughput_cli import throughput_command
from jaxlamina.console.command import HELP, add

app = typer.Typer(
    no_args_is_help=True,
    **HELP,
    help="Measure what the project claims. Every bench ends with one line of JSON on stdout.",
)
add(app, "breakdown", breakdown_command)
add(app, "calibrate", calibrate_command)
add(app, "choice", choice_command)
add(app, "exchange", exchange_command)
add(app, "heavy", heavy_command)
add(app, "kernels", kernels_command)
add(app, "lamina", lamina_command)
add(app, "overhead", overhead_command)
add(app, "predict", predict_command)
add(app, "prefix", prefix_command)
add(app, "recovery", recovery_command)
add(app, "serve", serve_command)
add(app, "simulation", simulation_command)
add(app, "start", start_command)
add(app, "step", step_command)
add(app, "throughput", throughput_command)
add(app, "split", split_command)
add(app, "decode", decode_command)
