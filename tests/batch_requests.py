"""Batches as OpenAI's client hands them in, for tests of servers that run them."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
from serving import WORDS_TEMPLATE, Server, serving

LIMIT_S = 120
OVER = ("completed", "failed", "expired", "cancelled")


def start(tiny: Path, folder: Path, *more: str) -> AbstractContextManager[Server]:
    """A server of a `tiny_words_folder` over a folder of files."""
    options = ("--files-dir", str(folder), "--chat-template", WORDS_TEMPLATE, "--max-num-seqs", "4", *more)
    return serving("--model", str(tiny), "--served-model-name", "tiny", "--no-warm-up", *options)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def submit(client: openai.OpenAI, lines: list[Any], endpoint: Any = "/v1/completions") -> Any:
    raw = b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
    file = client.files.create(file=("requests.jsonl", raw), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(raw), "requests.jsonl", "batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "a test"}
    )


def wait(client: openai.OpenAI, batch: Any, until: tuple[str, ...] = OVER) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while batch.status not in until:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    return {x["custom_id"]: x for x in map(json.loads, client.files.content(file_id).text.splitlines())}
