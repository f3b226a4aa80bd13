"""`jaxlamina bench …` in this process, for its tests."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from jaxlamina.bench.cli import app
from jaxlamina.errors import UserError


def bench(*words: str, exit_code: int = 0) -> tuple[dict[str, Any], str]:
    """The record of a bench, and all that is on stdout."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == exit_code, (done.output, done.exception)
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def refused(*words: str) -> str:
    """The one line that says what a bench cannot do."""
    error = CliRunner().invoke(app, list(words)).exception
    assert isinstance(error, UserError) and "\n" not in str(error)
    return str(error)
