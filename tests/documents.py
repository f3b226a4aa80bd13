"""The blocks of a page of documentation, and running them in order as a user would.

    python documents.py README.md FOLDER

runs a page's commands (```sh, ```console) and Python (```python) in FOLDER: one shell, one interpreter, and
one server at a time, which a line of a block starts, is waited for, and is ended when the next one comes or
no later block has its port. Output of a block that fails is printed, and the exit code is 1. Of a ```console
block the line after `$` is run, and what follows `> ` is typed. A block after `<!-- not run: why -->` or
`<!-- needs: what -->` is not run; one after `<!-- file: NAME -->` is saved under that name. Knows nothing of what the blocks do.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ("sh", "console", "python")
DEADLINE_S = 400
_FENCE = re.compile(r"^ *```(\w*)\s*$")  # also in a list
_MARK = re.compile(r"^<!-- (not run|needs|file): (.+) -->$")
_SERVES = re.compile(r"^(jaxlamina serve|jaxlamina launch .*-- serve)\b[^&|;]*(?=&?$)")


@dataclass(frozen=True)
class Block:
    """Lines between two fences. ``why_not``: what its mark says, "not run: …" or "needs: …"; ``file``: the
    name that the block is saved under, where its mark says one."""

    page: str
    line: int
    language: str
    text: str
    why_not: str | None
    file: str | None = None

    @property
    def commands(self) -> list[str]:
        """Its command lines, joined where a backslash breaks them, without comments."""
        if self.language == "console":
            return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        if self.language != "sh":
            return []
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [found for line in joined.splitlines() if (found := re.sub(r"(^|\s)#.*", "", line).strip())]


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block of a page (its path below the repository's root)."""
    mark, begin, language, found = None, 0, "", list[str]()
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if not begin and fence:
            begin, language, found = number, fence[1], []
        elif begin and fence:
            text = textwrap.dedent("\n".join(found)) + "\n"
            why_not = f"{mark[1]}: {mark[2]}" if mark and mark[1] != "file" else None
            yield Block(page, begin, language, text, why_not, mark[2] if mark and not why_not else None)
            begin, mark = 0, None
        elif begin:
            found.append(line)
        elif line.strip():
            mark = _MARK.match(line)
    assert not begin, f"{page}:{begin}: a block without an end"


class Child:
    """A process that runs one block after another: a shell, or a Python."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def run(self, text: str, end: str) -> str:
        """Sends a block, waits for the line ``end`` that it prints last, and gives what came before it."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()
        said, until = "", time.monotonic() + DEADLINE_S
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"not over within {DEADLINE_S} s:\n{said}") from None
            if line is None:
                raise SystemExit(f"failed:\n{said}")
            if line.rstrip("\n").endswith(end):
                return said + line.rstrip("\n").removesuffix(end)
            said += line


# Reads a block as a line of JSON and runs it in the one namespace, as an interactive interpreter keeps it.
_PYTHON = """
import json, sys
space = {"__name__": "__main__"}
for line in sys.stdin:
    name, text, end = json.loads(line)
    exec(compile(text, name, "exec"), space)
    print(end, flush=True)
"""


class Session:
    """A user's terminals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shell = Child(["bash", "-euo", "pipefail"], folder)
        self.python: Child | None = None
        self.server: subprocess.Popen[bytes] | None = None
        self.port = ""  # ":8000", of the server

    def run(self, block: Block, number: int) -> str:
        end = f"end of block {number}"
        if block.file is not None:
            (self.folder / block.file).write_text(block.text)
            return ""
        if block.language == "python":
            self.python = self.python or Child([sys.executable, "-c", _PYTHON], self.folder)
            return self.python.run(json.dumps([f"{block.page}:{block.line}", block.text, end]) + "\n", end)
        if block.language == "console":
            typed = "".join(f"{line[2:]}\n" for line in block.text.splitlines() if line.startswith("> "))
            (self.folder / "typed").write_text(typed)
            return self.shell.run(f"{block.commands[0]} <typed\nprintf '%s\\n' '{end}'\n", end)
        said = ""
        for command in block.commands:
            if _SERVES.match(command):
                self.serve(command.removesuffix("&").strip())
            else:  # nothing but the block itself may read what is typed
                said += self.shell.run(f"{{ {command}\n}} </dev/null\nprintf '%s\\n' '{end}'\n", end)
        return said

    def serve(self, command: str) -> None:
        """Starts a server and waits until it is healthy."""
        self.end_server()
        log = self.folder / "server.log"
        with log.open("wb") as out:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        until = time.monotonic() + DEADLINE_S
        while not (
            address := re.search(r"^serving .* at (http://\S+)$", log.read_text(), re.MULTILINE)
        ) or not _healthy(address[1]):
            if self.server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command} is not ready:\n{log.read_text()}")
            time.sleep(0.1)
        self.port = address[1][address[1].rindex(":") :]

    def end_server(self) -> None:
        if self.server is not None:
            self.server.terminate()
            code = self.server.wait(DEADLINE_S)
            if code:
                raise SystemExit(f"the server ended with {code}:\n{(self.folder / 'server.log').read_text()}")
            self.server = None


def _healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=10).status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(page: str, folder: str) -> None:
    session = Session(Path(folder))
    todo = [
        block for block in blocks(page) if (block.language in RUN and block.why_not is None) or block.file
    ]
    try:
        for number, block in enumerate(todo):
            where, began = f"{page}:{block.line}", time.monotonic()
            try:
                said = session.run(block, number)
                if not any(session.port in later.text for later in todo[number + 1 :]):
                    session.end_server()
            except SystemExit as stop:
                raise SystemExit(f"{where}: {stop.code}\n--- of\n{block.text}") from None
            print(f"{where}: {time.monotonic() - began:.1f} s\n{said}", flush=True)
    finally:
        if session.server is not None:
            session.server.kill()
        for child in (session.shell, session.python):
            if child is not None:
                child.process.kill()


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "80")
    main(*sys.argv[1:])
