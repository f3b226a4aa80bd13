"""An OpenAI-compatible server as its clients here see it: JSON, streams of events, uploads. Standard library
alone.

Knows HTTP; nothing of models. Whatever goes wrong is a `UserError` of one line.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from jaxlamina.errors import UserError

_CONNECT_S = 10.0
_UNAVAILABLE, _AGAIN_S = 503, 0.5


class ServerError(UserError):
    """The server answered with an error; ``status`` is HTTP's. ``state``: what its ``/health`` says it is."""

    def __init__(self, status: int, content: bytes) -> None:
        message, self.state = _message(content)
        super().__init__(f"the server says ({status}): {message}")
        self.status = status


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that shows a server a key. ``UserError`` for one that no header can hold."""
    if api_key is None:
        return {}
    key = api_key.strip()  # as from a file, with the end of its line
    if not key.isprintable() or max(key, default="") > "\xff":
        raise UserError("the API key has signs that HTTP has no place for: give it as the server has it")
    return {"Authorization": f"Bearer {key}"}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """A server at ``url`` ("http://host:8000", with or without "/v1"), or at the Unix socket ``uds``. Of
    "https" the certificate must be trusted: by the system, or by the file that SSL_CERT_FILE names.

    ``silence_s``: how long it may say nothing before it is given up. ``recovery_s``: how long
    `get` and `content` wait for one that is being started or started again, of which ``on_wait`` is told
    once.
    """

    def __init__(
        self,
        url: str = "",
        *,
        uds: str | None = None,
        api_key: str | None = None,
        silence_s: float = 600.0,
        recovery_s: float = 0.0,
        on_wait: Callable[[ServerError], object] = lambda why: None,
    ) -> None:
        parts = urlsplit(url)
        if uds is None and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise UserError(f"{url!r} must be a server's address, such as http://localhost:8000")
        self._parts, self._uds, self._silence_s = parts, uds, silence_s
        self._recovery_s, self._on_wait = recovery_s, on_wait
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = authorization(api_key)
        self.where = url or "this process"

    def get(self, path: str) -> Any:
        return json.loads(self.content(path))

    def post(self, path: str, body: Any = None) -> Any:
        with self._answered("POST", path, json.dumps(body).encode(), "application/json") as answer:
            return json.loads(answer.read())

    def content(self, path: str) -> bytes:
        until, is_told = time.monotonic() + self._recovery_s, False
        while True:
            try:
                return self._content(path)
            except ServerError as error:
                if error.status != _UNAVAILABLE or time.monotonic() >= until or not self._comes_back():
                    raise
                if not is_told:
                    self._on_wait(error)
            is_told = True
            time.sleep(_AGAIN_S)

    def _content(self, path: str) -> bytes:
        with self._answered("GET", path) as answer:
            return answer.read()

    def _comes_back(self) -> bool:
        """Whether a server that is not there is being started, or is there again."""
        try:
            self._content("/health")
        except ServerError as error:
            return error.state in ("starting", "recovering")
        return True

    def stream(self, path: str, body: Any) -> Generator[Any]:
        """The events of an answer. Left early, the connection is closed, and the server stops writing."""
        with self._answered("POST", path, json.dumps(body).encode(), "application/json") as answer:
            for line in answer:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    return
                if text:
                    event = json.loads(text)
                    if "error" in event:
                        raise UserError(f"the server says: {event['error']['message']}")
                    yield event
        raise UserError(f"{self.where} broke off its answer")

    def upload(self, content: bytes, filename: str, purpose: str) -> Any:
        mark = uuid.uuid4().hex
        fields = (
            f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        )
        body = fields.encode() + content + f"\r\n--{mark}--\r\n".encode()
        with self._answered("POST", "/v1/files", body, f"multipart/form-data; boundary={mark}") as answer:
            return json.loads(answer.read())

    @contextmanager
    def _answered(
        self, method: str, path: str, body: bytes | None = None, kind: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        headers = self._headers | ({} if kind is None else {"Content-Type": kind})
        try:
            connection.connect()
            if connection.sock is not None:
                connection.sock.settimeout(self._silence_s)
            connection.request(method, self._base + path, body, headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise ServerError(answer.status, answer.read())
            yield answer
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"{self.where} shows a certificate that is not trusted ({error.verify_message}): name it, or "
                "the one that signed it, in the environment as SSL_CERT_FILE"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"cannot talk to {self.where}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._uds is not None:
            return _UnixConnection(self._uds, _CONNECT_S)
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=_CONNECT_S)


def _message(content: bytes) -> tuple[str, str]:
    """What went wrong, and how the server is, if it says so."""
    try:
        said = json.loads(content)
        if "status" in said:  # of its health
            state = str(said["status"])
            return f"{state}: {said['reason']}" if said.get("reason") else state, state
        return str(said["error"]["message"]), ""
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:200], ""
