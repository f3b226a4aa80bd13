"""A server of the Hugging Face Hub's protocol on 127.0.0.1, as far as `huggingface_hub` needs it to fetch
models.

Listing, tree, HEAD and GET with ETag, X-Repo-Commit and X-Linked-*, large files by redirection and with
ranges, gated and private repositories, and the Hub's error codes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

GOOD_TOKEN = "hf_good"
_API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?/?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Repository:
    """``revisions``: files by path, of each branch. ``access``: open, gated or private."""

    revisions: dict[str, dict[str, bytes]]
    access: str = "open"

    def commit(self, revision: str) -> str:
        files = self.revisions[revision]
        return hashlib.sha1(repr([(path, len(files[path])) for path in sorted(files)]).encode()).hexdigest()

    def named(self, revision: str) -> str | None:
        """The branch of a branch's name or a commit."""
        return next((name for name in self.revisions if revision in (name, self.commit(name))), None)


@dataclass
class Hub:
    """``requests``: (method, path, Range header) of each. ``cut_after``: bytes after which the next large
    file is cut off."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cut_after: int | None = None
    port: int = 0

    def add(self, name: str, folder: Path, revision: str = "main", access: str = "open") -> None:
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.repositories.setdefault(name, Repository({}, access)).revisions[revision] = files

    def taken(self) -> set[str]:
        """Names of the files whose bytes were asked for; forgets all requests."""
        named = {
            f"/cdn/{_sha256(content)}": path
            for repository in self.repositories.values()
            for files in repository.revisions.values()
            for path, content in files.items()
        }
        asked = [path for method, path, _ in self.requests if method == "GET"]
        self.requests.clear()
        small = {match.group(3) for path in asked if (match := _FILE.fullmatch(path))}
        return {path for path in small if not _is_large(path)} | {
            named[path] for path in asked if path in named
        }

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Of a process whose Hub this is, with its cache in ``home``."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        own = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "JAX_PLATFORMS": "cpu",
            "COLUMNS": "160",
            "TERM": "dumb",
        }
        return kept | own | more

    def run(
        self, home: Path, *words: str, timeout: float = 240, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """A Python process with arguments ``words``."""
        env = self.environment(home, **more)
        return subprocess.run(
            [sys.executable, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=home,
            check=False,
        )


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/cdn/"):
            return self._content(path.removeprefix("/cdn/"))
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None:
            return self._error(404, "", "Not Found")
        repository = self.hub.repositories.get(match.group(1))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or (repository.access == "private" and token != GOOD_TOKEN):
            if token:
                return self._error(404, "RepoNotFound", "Repository not found")
            return self._error(401, "", "Invalid username or password.")
        if match.re is _API:
            return self._describe(repository, *match.groups())
        if repository.access == "gated" and token != GOOD_TOKEN:
            return self._error(403 if token else 401, "GatedRepo", "Access to this model is restricted.")
        return self._file(repository, match.group(2), match.group(3))

    def _describe(self, repository: Repository, name: str, kind: str | None, revision: str | None) -> None:
        branch = repository.named(revision or "main")
        if branch is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.revisions[branch]
        if kind == "tree":
            found: Any = []
            for path, content in files.items():
                entry = {"type": "file", "path": path, "size": len(content), "oid": _sha1(content)}
                if _is_large(path):
                    lfs = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
                    entry["lfs"] = lfs
                found.append(entry)
        else:
            siblings = [
                {"rfilename": path, "size": len(content), "blobId": _sha1(content)}
                for path, content in files.items()
            ]
            found = {
                "_id": "1",
                "id": name,
                "modelId": name,
                "sha": repository.commit(branch),
                "siblings": siblings,
            }
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: Repository, revision: str, path: str) -> None:
        branch = repository.named(revision)
        if branch is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        content = repository.revisions[branch].get(path)
        if content is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": repository.commit(branch), "ETag": f'"{_sha1(content)}"'}
        if not _is_large(path):
            return self._send(200, content, headers)
        name = _sha256(content)
        linked = {"X-Linked-ETag": f'"{name}"', "X-Linked-Size": str(len(content))}
        self._send(302, b"", headers | linked | {"Location": f"http://localhost:{self.hub.port}/cdn/{name}"})

    def _content(self, name: str) -> None:
        found = [
            content
            for repository in self.hub.repositories.values()
            for files in repository.revisions.values()
            for content in files.values()
            if _sha256(content) == name
        ]
        [content] = found[:1]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(wanted.group(1)) if wanted else 0
        headers = {"ETag": f'"{name}"', "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut, self.hub.cut_after = (
            (self.hub.cut_after, None) if self.command == "GET" else (None, self.hub.cut_after)
        )
        self._send(206 if wanted else 200, content[start:], headers, cut)

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", ".bin"))


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
