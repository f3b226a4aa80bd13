"""Batches at a server, from the client's side: submitted without waiting, looked at, and their results by
batch.

Knows OpenAI's files and batches; nothing of what is printed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jaxlamina.cli.batch_input import Requests
from jaxlamina.server.client import Client, ServerError

_OVER = ("completed", "failed", "expired", "cancelled")


@dataclass
class BatchJob:
    """One batch. ``state``: what the server said of it last."""

    requests: Requests
    state: dict[str, Any]

    @classmethod
    def submit(cls, client: Client, requests: Requests) -> BatchJob:
        file = client.upload(requests.jsonl(), "requests.jsonl", "batch")
        asked = {"input_file_id": file["id"], "endpoint": requests.endpoint, "completion_window": "24h"}
        return cls(requests, client.post("/v1/batches", asked))

    @classmethod
    def found(cls, client: Client, requests: Requests, batch_id: str) -> BatchJob | None:
        """One that was submitted before, if the server still has it and it has not come to nothing."""
        try:
            state = client.get(f"/v1/batches/{batch_id}")
        except ServerError as error:
            if error.status == 404:
                return None
            raise
        is_lost = state["status"] in _OVER and state["status"] != "completed"
        return None if is_lost else cls(requests, state)

    @property
    def id(self) -> str:
        return str(self.state["id"])

    @property
    def is_over(self) -> bool:
        return self.state["status"] in _OVER

    @property
    def error(self) -> str | None:
        """Why it failed, if it did."""
        errors = self.state["errors"]
        return f"{self.id} failed: {errors['data'][0]['message']}" if errors else None

    @property
    def n_done(self) -> int:
        counts = self.state["request_counts"]
        return int(counts["completed"] + counts["failed"])

    def look(self, client: Client) -> None:
        if not self.is_over:
            self.state = client.get(f"/v1/batches/{self.id}")

    def results(self, client: Client) -> list[dict[str, Any]]:
        """A line for each request, in the order they were given; a request that was not run has none. Each
        says of which input it is (``input``), and its prompt or messages."""
        lines: dict[str, dict[str, Any]] = {}
        for kind in ("output_file_id", "error_file_id"):
            if self.state[kind] is not None:
                content = client.content(f"/v1/files/{self.state[kind]}/content")
                lines |= {line["custom_id"]: line for line in map(json.loads, content.splitlines())}
        return [
            {"batch_id": self.id, "input": self.requests.source, **_asked(body), **lines[name]}
            for name, body in self.requests.lines.items()
            if name in lines
        ]


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("prompt", "messages") if name in body}


def texts_of(result: dict[str, Any]) -> list[str]:
    """What was written for one request, or what went wrong with it."""
    body = result["response"]["body"]
    if "error" in body:
        return [f"error: {body['error']['message']}"]
    return [c["message"]["content"] or "" if "message" in c else c["text"] for c in body["choices"]]


def grouped(job: BatchJob, results: list[dict[str, Any]]) -> list[str]:
    """Lines to show: the batch's id, then each request's text under its name."""
    n_right = sum(result["response"]["status_code"] == 200 for result in results)
    lines = [f"{job.id}: {n_right} of {len(job.requests.lines)} done"]
    for result in results:
        lines += [f"[{result['custom_id']}] {text.strip()}" for text in texts_of(result)]
    return lines
