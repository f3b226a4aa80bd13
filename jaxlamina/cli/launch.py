"""`jaxlamina launch`: a job's ranks. Checks the options, then becomes `python -m launch.local`, or a
supervisor that runs it.

Knows the options of the cluster's file and of the command that rank 0 will run; nothing of how ranks are
started.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

import jaxlamina
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import COMMANDS, Cluster, change
from jaxlamina.job.secret import secret_of
from jaxlamina.options import ModelOptions, definitions
from jaxlamina.supervisor.changes import JobCommand, Workers
from jaxlamina.supervisor.settings import Supervision


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND", help=f"What rank 0 runs: {', '.join(COMMANDS)}, with its own options."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The cluster's TOML; options given here go over it.")
    ] = None,
    dop: Annotated[str | None, typer.Option(help="Model workers, attention workers: 1,2.")] = None,
    transport: Annotated[str | None, typer.Option(help="mpi (mpi4jax) or xla (jax.distributed).")] = None,
    partition: Annotated[
        str | None, typer.Option(help="What attention workers share out: auto, heads, requests or tokens.")
    ] = None,
    local_attention: Annotated[
        str | None,
        typer.Option(
            help="The share of the KV that model workers keep and attend to themselves: 0 to 1, or auto."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="As of generate.")] = None,
    revision: Annotated[str | None, typer.Option(help="As of generate.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As of generate.")] = None,
    started_by: Annotated[
        str | None,
        typer.Option(
            "--starter",
            metavar="WORDS",
            help="What starts the ranks where they are on several hosts, rank 0 on this one: 'mpirun -n 3 "
            "--hostfile hosts'.",
        ),
    ] = None,
    supervise: Annotated[
        bool | None,
        typer.Option(
            "--supervise/--no-supervise",
            help="Whether serve starts its ranks again when one dies or hangs; the same as serve's. Default: "
            "yes.",
        ),
    ] = None,
    q_first: Annotated[
        bool | None,
        typer.Option("--q-first/--no-q-first", help="Send q before k and v are computed; or all together."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other key of the cluster's TOML; may be repeated."
        ),
    ] = None,
) -> None:
    """Start all ranks of a job on this host, or by --starter: model workers, then attention workers, then
    prefill workers if there are any; rank 0 runs COMMAND.

    Its stdout is the command's; other ranks' lines are on stderr, each with its rank. When one rank fails all
    are ended, and the last line says which and why. A server (serve) is then started again.
    """
    given = {
        "dop": dop,
        "transport": transport,
        "partition": partition,
        "local_attention": local_attention if local_attention in (None, "auto") else _number(local_attention),
        "model": model,
        "revision": revision,
        "dtype": dtype,
        "q_first": q_first,
    }
    quoted = {key: json.dumps(value, ensure_ascii=False) for key, value in given.items() if value is not None}
    words = [*(changes or []), *(f"{key}={value}" for key, value in quoted.items())]
    cluster = Cluster.load(config, dict(change(word) for word in words))
    secret_of(cluster, os.environ)  # before ranks are started that would find the same
    context = find_model(command or [], cluster)
    arguments = [*(() if config is None else ("--config", str(config)))]
    arguments += [part for word in words for part in ("--set", word)]
    arguments += [*(() if started_by is None else ("--starter", started_by))]
    sys.stdout.flush()
    sys.stderr.flush()
    argv = starter([*arguments, "--", *(command or [])])
    if _is_supervised(context, supervise):
        workers = Workers(cluster.n_model, cluster.dop[1], cluster.prefill_workers)
        _supervise(context, JobCommand(tuple(argv), workers, has_starter=started_by is not None))
    else:
        os.execve(argv[0], argv, environment())


def _supervise(context: Any, job: JobCommand) -> None:
    """Runs `serve` here, over a job that is started by other words."""
    from jaxlamina.cli.serve import STARTER

    if job.has_starter and context.params["spare"]:
        raise UserError("--spare does not go with --starter: two jobs cannot have one address for `control`")
    os.environ.update(environment())
    STARTER.set(job)
    context.params["supervise"] = True
    context.command.invoke(context)


def _is_supervised(context: Any, here: bool | None) -> bool:
    """Whether the command runs below a supervisor; ``here``: what `launch` is told of it."""
    there = context.params.get("supervise")
    if context.command.name != "serve":
        if here:
            raise UserError(f"--supervise is for serve, not for {context.command.name}: leave it out")
        return False
    if here is not None and there is not None and here != there:
        raise UserError("launch and serve are told --supervise and --no-supervise: leave one of them out")
    if here is False or there is False:
        known = definitions(Supervision)
        Supervision(**{name: context.params[name] for name in known}).check_alone()
        return False
    return True


def _number(text: str) -> float | str:
    """As a cluster file has it; text that is none is refused there."""
    try:
        return float(text)
    except ValueError:
        return text


def find_model(command: list[str], cluster: Cluster) -> Any:
    """Finds a bad option of the command, or a wrong model, and fetches what is missing of that model: before
    ranks are started that would wait for it, and before JAX is imported. The command's options, as they are
    understood."""
    from jaxlamina.cli.model_options import check_over_ranks, find, revision_of

    context = _context(command, cluster)
    if "revision" in context.params:  # a bench has its own ways to say which model
        check_over_ranks(context)
        find(context.params["model"], revision_of(context), context.params["load_format"])
    return context


def defaults(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What the cluster's file says of the model, for commands that do not say it themselves: by command and
    option."""
    said = {name: value for name, value in cluster.only(ModelOptions).items() if value is not None}
    of_generate = {
        name: value for name, value in said.items() if name != "max_num_seqs"
    }  # as many as prompts
    return {"serve": said, "generate": of_generate}


def _context(command: list[str], cluster: Cluster) -> Any:
    """The command's options as they are understood; finds a bad one before ranks are started."""
    if not command or command[0] not in COMMANDS:
        given = f"not {command[0]!r}" if command else "and there is none"
        raise UserError(
            f"the command for rank 0 must be one of {', '.join(COMMANDS)}, {given}: "
            'jaxlamina launch --dop 1,2 -- generate "…"'
        )
    from jaxlamina.cli.main import app

    current: Any = typer.main.get_command(app)
    name: Any = "jaxlamina"
    words, context = list(command), None
    more: dict[str, Any] = {"default_map": defaults(cluster)}
    while isinstance(current, typer.core.TyperGroup):
        context = current.make_context(name, list(words), parent=context, **more)
        name, current, words = current.resolve_command(context, words)
        more = {}
    return current.make_context(name, words, parent=context)


def starter(arguments: Sequence[str]) -> list[str]:
    """The command line that starts all ranks of a job on this host."""
    return [sys.executable, "-P", "-m", "launch.local", *arguments]


def environment() -> dict[str, str]:
    """Ours, with the folder that this package was imported from where Python would not find it by itself."""
    root = str(Path(jaxlamina.__file__).resolve().parents[1])
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
