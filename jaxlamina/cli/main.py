"""`jaxlamina`: the commands, and the one place where errors become lines.

Exit codes: 0 done, 1 `doctor` found something broken, 2 bad input or an output that cannot be written, 130
interrupted. Knows no model.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from jaxlamina import __version__
from jaxlamina.bench.cli import app as bench_app
from jaxlamina.cli import (
    batch,
    chat,
    convert,
    doctor,
    generate,
    launch,
    plan,
    reproduce,
    scale,
    schedule,
    serve,
    simulate,
    split,
)
from jaxlamina.console.command import HELP, add, as_options
from jaxlamina.errors import UserError
from jaxlamina.server.pieces import WHY

app = typer.Typer(
    name="jaxlamina",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **HELP,
    help="LLM decoding with model-attention disaggregation on JAX: weights in one pool, KV and attention in "
    "another.",
)
add(app, "generate", generate.generate)
add(app, "serve", serve.serve)
add(app, "chat", chat.chat)
add(app, "batch", batch.batch)
add(app, "split", split.split)
add(app, "convert", convert.convert)
add(app, "doctor", doctor.doctor)
add(app, "launch", launch.launch)
add(app, "plan", plan.plan)
add(app, "schedule", schedule.schedule)
add(app, "reproduce", reproduce.reproduce)
add(app, "scale", scale.scale)
add(app, "simulate", simulate.simulate)
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"jaxlamina {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


def main(
    arguments: Sequence[str] | None = None, who: str = "", defaults: Mapping[str, Any] | None = None
) -> int:
    """Runs one command line (default: the process's own) and returns its exit code. Bad input is one line on
    stderr.

    ``who``: which of several processes this is; the line begins with it. ``defaults``: of commands' options,
    by command and name, where they are not those of the definitions.
    """
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # no stderr to write to
        faulthandler.enable()  # what a library dies of is said by where its caller was
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # texts may have what the terminal's encoding has not
            with contextlib.suppress(OSError):  # its descriptor has become another file's
                stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="jaxlamina", default_map=defaults)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            return _reader_is_gone()
        return _flushed(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _reader_is_gone()
    except Exception as error:
        line = _line_of(error, sys.argv[1:] if arguments is None else arguments)
        if line is None:
            raise
        if isinstance(error, OSError):  # what is still buffered cannot be written either
            _drop_output()
        line = f"{who}: {line}" if who else line
        _tell_supervisor(line)
        print(f"error: {line}", file=sys.stderr)
        return 2
    return _flushed(0)


def _tell_supervisor(line: str) -> None:
    """Why this process ends, if nobody else of its job has said so, nor a supervisor is there."""
    with contextlib.suppress(KeyError, OSError), open(os.environ[WHY], "x", encoding="utf-8") as file:
        file.write(line)


def _flushed(code: int) -> int:
    """``code``, or that of an output which cannot be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        return _reader_is_gone()
    except OSError as error:
        _drop_output()
        print(f"error: {_unwritten(error)}", file=sys.stderr)
        return 2
    return code


def _reader_is_gone() -> int:
    """As with `| head`: no error."""
    _drop_output()
    return 0


def _drop_output() -> None:
    """What is still buffered goes nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _unwritten(error: OSError) -> str:
    return f"the output cannot be written ({error.strerror}): make room, or write it elsewhere"


def _line_of(error: Exception, words: Sequence[str]) -> str | None:
    """The line to show for an error that input or environment caused; None for one that is ours."""
    if isinstance(error, UserError):
        return as_options(str(error), app, words)
    if "splitter" in sys.modules:
        from splitter import SplitError

        if isinstance(error, SplitError):
            return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _unwritten(error)
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in str(error):
        reason = " ".join(str(error).split())
        return f"JAX cannot start ({reason}); check JAX_PLATFORMS, or run: jaxlamina doctor"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("jaxlamina"):
        return f"the Python package {error.name} is not installed; run: jaxlamina doctor"
    return None


def run() -> None:
    """The script's entry."""
    sys.exit(main())
