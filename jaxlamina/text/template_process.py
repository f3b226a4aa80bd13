"""Chat templates in a process of their own: time and memory of a template are bounded, whatever is in it.

A template is a program that comes with a model, from strangers: it may loop for ever, or double a string
until nothing is left, and in C, where no counter sees it. The process is started with the first chat, kept,
and ended where a template goes beyond its bounds. Knows `chat_template` alone; nothing of tokens, and no JAX.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.text.chat_template import plain, render_chat

CPU_S = "JAXLAMINA_TEMPLATE_CPU_S"
"""In the environment: seconds of a core that one chat's prompt may take; an ordinary one takes a
thousandth."""
MOST_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 26

_WALL_S = (
    120.0  # of a start, and of a prompt on a busy host; then it is in something that cannot be interrupted
)
_TRIES = 2
_TOO_LONG = "the model's chat template did not end within {:g} s: give another by --chat-template"
_TOO_LARGE = (
    f"the model's chat template needs more than {MOST_BYTES >> 20} MiB for these messages: give another by "
    "--chat-template"
)


class _Process:
    """The one process. For any number of threads, one chat at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Connection | None = None

    def render(self, asked: bytes) -> str:
        with self._lock:
            text, error = self._answered(asked)
        if error is not None:
            raise UserError(error)
        return str(text)

    def _answered(self, asked: bytes) -> tuple[str | None, str | None]:
        """As of `_answer`. Somebody else may have ended the process, as a host that is short of memory does:
        what is asked for twice and ends both of them is the template."""
        for _ in range(_TRIES):
            wire = self._started()
            try:
                wire.send_bytes(asked)
                if wire.poll(_WALL_S):
                    text, error = json.loads(wire.recv_bytes())
                    return text, error
            except (OSError, EOFError):
                self.end()
            else:
                self.end()
                return None, _TOO_LONG.format(_WALL_S)
        return None, "the model's chat template ended the process it ran in"

    def end(self) -> None:
        if self._process is not None and self._wire is not None:
            self._wire.close()
            self._process.kill()
            self._process.wait()
            self._process = self._wire = None

    def _started(self) -> Connection:
        if self._process is not None and self._wire is not None and self._process.poll() is None:
            return self._wire
        self.end()
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxlamina.text.template_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        self._wire = Connection(ours.detach())
        return self._wire


_process = _Process()
atexit.register(_process.end)


def render_bounded(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """`render_chat`, within bounds. Raises `UserError` as it does, and beyond the bounds."""
    try:
        asked = json.dumps([template, plain(messages), {str(k): plain(v) for k, v in variables.items()}])
    except RecursionError:
        raise UserError("messages or tools are nested too deeply") from None
    except ValueError as error:  # an int of thousands of digits
        raise UserError(f"messages cannot be given to a chat template: {error}") from None
    return _process.render(asked.encode("ascii"))


class _Late(BaseException):
    pass


def _late(*_: object) -> None:
    raise _Late


def _answer(asked: bytes) -> tuple[str | None, str | None]:
    """Text, or what is wrong."""
    most_s = float(os.environ.get(CPU_S, "10"))
    signal.setitimer(signal.ITIMER_PROF, most_s)
    try:
        text = render_chat(*json.loads(asked))
    except UserError as error:
        return None, str(error)
    except _Late:
        return None, _TOO_LONG.format(most_s)
    except MemoryError:
        return None, _TOO_LARGE
    except RecursionError:
        return None, "the model's chat template, or the messages, are nested too deeply"
    except Exception as error:  # noqa: BLE001 (whatever a template does)
        return None, f"the model's chat template failed on these messages: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return (text, None) if len(text) <= MOST_CHARACTERS else (None, _TOO_LARGE)


def _serve(wire: Connection) -> None:
    # A terminal's Ctrl-C, and what ends a rank and all that it has started, are for the one that is served:
    # it may have chats to answer until its own end, at which the wire is closed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _late)
    with suppress(OSError, ValueError):  # where a system has no such bound
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    while True:
        try:
            asked = wire.recv_bytes()
        except (EOFError, OSError):  # the other side is gone
            return
        wire.send_bytes(json.dumps(_answer(asked)).encode("ascii"))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
