"""One start of the job: its process, its socket, and the client that reaches its server there.

Knows one process; nothing of those before and after it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from jaxlamina.process import ending
from jaxlamina.process.parents import end_with_parent
from jaxlamina.server.pieces import HEADER, IMPORTS, SECRET, STANDBY, STANDS_BY, TAKES_OVER, WHY
from jaxlamina.supervisor.job_client import JobClient

NOT_STARTED = (OSError, MemoryError, subprocess.SubprocessError)
"""Where the system does not let a process begin, or take over: it has no room for it, or no more files."""

_SAID_WHY = ".why"  # what the file of `WHY` is called, after the socket's name


def why_not_started(error: BaseException) -> str:
    """Of one of `NOT_STARTED`."""
    return str(error) or type(error).__name__


class Running:
    """Starts ``command`` with the path of a socket in ``folder`` after it, and ``secret`` as what its
    supervisor says. One of `NOT_STARTED` where that cannot be.

    ``client`` reaches its server; ``n``: which start it is; ``command``: without the socket; ``is_spare``: it
    waits for another's end, ``imports_alone`` without what that has: devices, ports and files."""

    def __init__(
        self,
        n: int,
        command: tuple[str, ...],
        folder: Path,
        secret: str,
        *,
        is_spare: bool = False,
        imports_alone: bool = False,
    ) -> None:
        self.n, self.command, self.is_spare, self.imports_alone = n, command, is_spare, imports_alone
        self.socket = folder / f"{n}.sock"
        self.client = JobClient(self.socket, {HEADER: secret})
        self._why = Path(f"{self.socket}{_SAID_WHY}")
        waits = {IMPORTS: str(self.socket)} if imports_alone else {STANDBY: "1"} if is_spare else {}
        # Last: what fails before it leaves no process behind.
        self.process = subprocess.Popen(
            [*command, str(self.socket)],
            stdin=subprocess.DEVNULL,
            env=os.environ | {SECRET: secret, WHY: str(self._why)} | waits,
            start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
            preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 (from the main thread)
        )
        self.began, self._since = time.monotonic(), ending.began(self.process.pid)

    def exit_code(self) -> int | None:
        """None: it runs. One that does not may be there still."""
        return ending.code_of(self.process, self._since)

    def ended_with(self) -> str:
        """Its exit code, and what the first of its processes to end with an error has said of it."""
        try:
            line = self._why.read_text(encoding="utf-8", errors="replace")
        except (OSError, MemoryError):
            line = ""
        return f"ended with code {self.exit_code()}{': ' if line else ''}{line}"

    @property
    def stands_by(self) -> bool:
        """Whether it could take over at once; of one that ``imports_alone``, once the other is gone."""
        return Path(f"{self.socket}{STANDS_BY}").exists()

    def take_over(self) -> None:
        """It is its turn. `OSError` where it cannot be told."""
        self.is_spare, self.began = False, time.monotonic()
        Path(f"{self.socket}{TAKES_OVER}").touch()

    async def forget(self) -> None:
        """It is over."""
        await self.client.close()
        for of_it in ("", STANDS_BY, TAKES_OVER, _SAID_WHY):
            Path(f"{self.socket}{of_it}").unlink(missing_ok=True)
