"""`jaxlamina batch`: many prompts at once, in this process or at a server; goes on where an interrupted run
was.

The server keeps what is done line by line; here only the batch's id is kept, under a name made of the
requests, until its results have been shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxlamina.cli import served
from jaxlamina.cli.batch_input import Requests, names_of, parse, read
from jaxlamina.cli.batch_job import BatchJob, grouped
from jaxlamina.cli.model_options import CommandOptions, with_options
from jaxlamina.console.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.options import DEFAULT_SEQS
from jaxlamina.process.cache_folder import cache_dir

_LOOK_EVERY_S = 0.3


@with_options
def batch(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Each is a batch: a file (JSONL, or text with a prompt a line), '-' for stdin, or "
            """'["p1", "p2"] [32, 64]': prompts and max tokens.""",
        ),
    ],
    options: CommandOptions,
    url: served.Url = None,
    api_key: served.ApiKey = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Prompts through the chat template, or continued as they are."),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Where a prompt does not say: write at most so many.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Where a prompt does not say; 0: the likeliest.")
    ] = 0.0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Results as JSON lines, as in OpenAI's files, with the input's name and the prompt.",
        ),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, also where a run was interrupted.")
    ] = False,
) -> None:
    """Run batches of prompts. Interrupted, the same command goes on: what is done is not done again.

    Exits with 1 if a prompt could not be served.
    """
    defaults = {"max_tokens": max_tokens, "temperature": temperature}
    batches = [
        parse(
            sys.stdin.read() if text == "-" else read(text),
            chat=chat,
            defaults=defaults,
            source=name,
            prefix=f"{name}:" if len(inputs) > 1 else "",
        )
        for text, name in zip(inputs, names_of(inputs), strict=True)
    ]
    where = [url] if url is not None else [dataclasses.asdict(options)]
    memory = _Memory(where, batches)
    if restart:
        memory.forget()
    console = Console(stderr=True)
    files_dir = memory.folder if url is None else None
    with served.server(
        console, url, api_key, options, default_seqs=DEFAULT_SEQS, files_dir=files_dir
    ) as client:
        ids = memory.batch_ids()
        jobs = []
        try:
            for i, requests in enumerate(batches):
                jobs.append(_job(client, requests, ids[i]))
                ids[i] = jobs[i].id
                memory.keep(ids)
            _wait(console, client, jobs)
            found = [job.results(client) for job in jobs]
        except (KeyboardInterrupt, UserError):
            if any(ids):
                console.print("interrupted: the same command goes on where this one was")
            raise
        n_missing = 0
        for job, results in zip(jobs, found, strict=True):
            n_missing += len(job.requests.lines) - sum(r["response"]["status_code"] == 200 for r in results)
            for line in map(json.dumps, results) if as_json else grouped(job, results):
                print(line, flush=True)
            if job.error is not None:
                console.print(f"error: {job.error}", highlight=False, markup=False, soft_wrap=True)
    memory.forget()
    raise typer.Exit(1 if n_missing else 0)


class _Memory:
    """Which batches a command has submitted, in a folder named by what it asks, and of whom."""

    def __init__(self, where: Sequence[Any], batches: Sequence[Requests]) -> None:
        asked = json.dumps(
            [*where, [[requests.endpoint, requests.lines] for requests in batches]], default=str
        )
        self._n = len(batches)
        self.folder = cache_dir() / "batches" / hashlib.sha256(asked.encode()).hexdigest()[:24]
        self._file = self.folder / "ids.json"

    def batch_ids(self) -> list[str | None]:
        """Of each batch, None where it is not submitted yet."""
        found: list[str | None] = json.loads(self._file.read_text()) if self._file.exists() else []
        return found or [None] * self._n

    def keep(self, ids: Sequence[str | None]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(ids))

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _job(client: Any, requests: Requests, batch_id: str | None) -> BatchJob:
    job = None if batch_id is None else BatchJob.found(client, requests, batch_id)
    return BatchJob.submit(client, requests) if job is None else job


def _wait(console: Console, client: Any, jobs: Sequence[BatchJob]) -> None:
    n_all = sum(len(job.requests.lines) for job in jobs)
    with bar(console, "prompts") as on_progress:
        while True:
            on_progress(sum(job.n_done for job in jobs), n_all)
            if all(job.is_over for job in jobs):  # no later than a batch's 24 hours
                return
            time.sleep(_LOOK_EVERY_S)
            for job in jobs:
                job.look(client)
