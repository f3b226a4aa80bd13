"""Debian's Chromium without a window, driven over a pipe by its DevTools protocol: for tests of pages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0


class Navigated(AssertionError):
    """The page was left, for another or the same one, while it was asked something."""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab. ``said``: what its console and its network log said that was no success."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._from, self._read, self._n = to, answers, b"", 0
        self._session: str | None = None
        self.said: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One of the protocol's methods; its result."""
        self._n += 1
        message = {"id": self._n, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + DEADLINE_S
        while True:
            found = self._next(until)
            if found.get("id") == self._n:
                if "navigated" in (error := found.get("error", {})).get("message", ""):
                    raise Navigated(error)
                assert not error, error
                return found["result"]
            self._note(found)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._from], [], [], max(0, until - time.monotonic()))[0], "no answer"
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(x.get("value")) for x in params["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        self.size(width, height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int) -> None:
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def run(self, expression: str) -> Any:
        """What an expression of JavaScript is, awaited where it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, deadline_s: float = DEADLINE_S) -> None:
        """Until the expression holds, if need be of the page that is loaded meanwhile."""
        until = time.monotonic() + deadline_s
        wrapped = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"

        def holds() -> bool:
            with contextlib.suppress(Navigated):
                return bool(self.run(wrapped))
            return False

        while not holds():
            assert time.monotonic() < until, (expression, self.said, self.run("document.body.innerText"))
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def press(self, key: str, code: int) -> None:
        """A key by its name and its number (`KeyboardEvent.keyCode`)."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            how = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **how, **(text if kind == "keyDown" else {}))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """What is seen as a PNG; ``whole``: all of the page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    command = chromium()
    assert command is not None
    # Chromium reads from its descriptor 3 and writes to 4.
    for_it, to_it = os.pipe()
    from_it, of_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        )
        words += ("--remote-debugging-pipe", f"--user-data-dir={folder}", "--hide-scrollbars")
        script = f'exec "$0" "$@" 3<&{for_it} 4>&{of_it}'
        process = subprocess.Popen(
            ["bash", "-c", script, command, *words],
            pass_fds=(for_it, of_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(for_it)
        os.close(of_it)
        try:
            yield Page(to_it, from_it)
        finally:
            process.kill()
            process.wait()
            os.close(to_it)
            os.close(from_it)
