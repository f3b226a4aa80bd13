"""The command line that one rank and the starter of all ranks share: `[options] COMMAND ARGS…`.

Knows nothing of processes. Argparse and not typer: what follows COMMAND is not ours, and a rank starts
faster.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import COMMANDS, Cluster, change
from jaxlamina.server.settings import SHUTDOWN_TIMEOUT_S, end_s


@dataclass(frozen=True)
class LaunchOptions:
    """config: the cluster file; changes: "key=value" over it; rank: given by hand; command: what rank 0 runs.
    module: whose ``main(cluster, rank)`` every rank runs instead. starter: words that start all ranks, before
    the words of one."""

    config: str | None
    changes: tuple[str, ...]
    rank: int | None
    command: tuple[str, ...]
    module: str | None = None
    starter: tuple[str, ...] = ()

    @property
    def reads_stdin(self) -> bool:
        return self.module is None and self.command[0] != "serve"

    @property
    def end_s(self) -> float | None:
        """How long rank 0 may take to end once it is asked to; None: it has nothing to bring to an end."""
        if self.command[:1] != ("serve",):
            return None
        parser = _Parser(allow_abbrev=False, add_help=False)
        parser.add_argument("--shutdown-timeout", type=float, default=SHUTDOWN_TIMEOUT_S)
        asked, _ = parser.parse_known_args(self.command[1:])
        return end_s(asked.shutdown_timeout)

    def cluster(self) -> Cluster:
        """The file with the changes. Raises `UserError`."""
        return Cluster.load(self.config, dict(change(text) for text in self.changes))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")


def parse(prog: str, what: str, arguments: Sequence[str] | None) -> LaunchOptions:
    """Raises `UserError` for options that are none, and without a command that rank 0 can run."""
    parser = _Parser(prog=prog, description=what, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="the cluster's TOML; without it, the defaults")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="changes",
        help="a key of the cluster file, over what the file says; may be repeated",
    )
    parser.add_argument(
        "--module", metavar="NAME", help="every rank runs this module's main(cluster, rank), and not COMMAND"
    )
    parser.add_argument(
        "--starter", metavar="WORDS", help="what starts all ranks: 'mpirun -n 3 --hostfile hosts'"
    )
    parser.add_argument("--rank", type=int, help="this rank, where no starter says it")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND …",
        help=f"what rank 0 runs: {', '.join(COMMANDS)}, with its own options",
    )
    found = parser.parse_args(arguments)
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    if found.module is None:
        check_command(command)
    elif command:
        raise UserError(f"--module {found.module} is run in place of a command: leave out {command[0]!r}")
    starter = () if found.starter is None else _words(found.starter)
    return LaunchOptions(
        found.config, tuple(found.changes), found.rank, tuple(command), found.module, starter
    )


def _words(text: str) -> tuple[str, ...]:
    """Of --starter, as a shell takes them apart."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--starter {text!r} cannot be taken apart into words: {error}") from None
    if not words:
        raise UserError("--starter needs words: 'mpirun -n 3 --hostfile hosts'")
    return tuple(words)


def check_command(command: Sequence[str]) -> None:
    if not command or command[0] not in COMMANDS:
        given = f"not {command[0]!r}" if command else "and there is none"
        raise UserError(f"the command for rank 0 must be one of {', '.join(COMMANDS)}, {given}")
