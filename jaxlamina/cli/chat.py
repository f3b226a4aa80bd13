"""`jaxlamina chat`: a conversation on a terminal or a pipe, with a server or with the model in this process.

Batches can be submitted meanwhile, and run in the background; their results are shown between two answers and
never in one (FineInfer §3.1).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxlamina.cli import served
from jaxlamina.cli.batch_input import parse, read
from jaxlamina.cli.batch_job import BatchJob, grouped
from jaxlamina.cli.model_options import CommandOptions, with_options
from jaxlamina.errors import UserError
from jaxlamina.server.client import Client

# What /set takes: `jaxlamina.server.protocol.ChatCompletionRequest` has them.
SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_SEQS = 4  # rows for the chat and for batches beside it
HELP = """\
/system TEXT     the system message, for what follows; without TEXT, none
/reset           forget what was said
/set NAME=VALUE  such as temperature=0.7, max_tokens=200, stop=["END"]; without a value, the default
/batch INPUT     run prompts in the background: a file, or ["p1", "p2"] [32, 64]; results come between answers
/save FILE       the conversation as JSON
/exit            or Ctrl-D
Ctrl-C           stops an answer"""


@with_options
def chat(
    options: CommandOptions,
    url: served.Url = None,
    api_key: served.ApiKey = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 takes the likeliest token.")] = None,
) -> None:
    """Talk with a model. /help lists the commands; answers go to stdout, everything else to stderr."""
    console = Console(stderr=True)
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    with served.server(console, url, api_key, options, default_seqs=_SEQS) as client:
        given = {name: value for name, value in settings.items() if value is not None}
        left = "it ends with this chat" if url is None else "the server goes on with it"
        chat = Chat(client, console, given, left)
        chat.system = system
        if console.is_terminal:
            chat.say("/help lists the commands, /exit ends")
        chat.run()


class Chat:
    """One conversation. ``settings``: fields of every request; ``left_batches``: what becomes of batches that
    it leaves."""

    def __init__(
        self, client: Client, console: Console, settings: dict[str, Any], left_batches: str = ""
    ) -> None:
        self.client, self.console, self.settings, self.left_batches = client, console, settings, left_batches
        self.system: str | None = None
        self.turns: list[dict[str, str]] = []
        self.batches: list[BatchJob] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/reset": lambda _: self.turns.clear(),
            "/set": self._set,
            "/batch": self._submit,
            "/save": self._save,
            "/help": lambda _: self.say(HELP),
        }

    def run(self) -> None:
        """Until /exit or the end of stdin. What is wrong with one line does not end it."""
        asked = False
        while True:
            self._show_batches()
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return self._leave()
            except KeyboardInterrupt:
                self.say("")
                continue
            try:
                if line == "/exit":
                    self._show_batches()
                    if asked or not self.batches:
                        return self._leave()
                    asked = True
                    self.say(
                        f"still running: {self._ids}; /exit again leaves, and anything else shows what is "
                        f"done"
                    )
                    continue
                asked = False
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._answer(line)
            except UserError as error:
                self.say(f"error: {error}")

    @property
    def _ids(self) -> str:
        return ", ".join(job.id for job in self.batches)

    def _leave(self) -> None:
        if self.batches:
            done = ", ".join(
                f"{job.id} ({job.n_done} of {len(job.requests.lines)} done)" for job in self.batches
            )
            self.say(f"not waited for: {done}; {self.left_batches}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise UserError(f"there is no {name}; /help lists the commands")
        command(rest.strip())

    def _answer(self, text: str) -> None:
        """Streams the answer. Stopped by Ctrl-C, what there is of it stays in the conversation; failed,
        nothing does."""
        asked = {"role": "user", "content": text}
        body = {**self.settings, "messages": [*self.messages, asked], "stream": True}
        pieces: list[str] = []
        events = self.client.stream("/v1/chat/completions", body)
        try:
            for event in events:
                for choice in event["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
                    print(pieces[-1], end="", flush=True)
        except KeyboardInterrupt:
            events.close()
        finally:
            if pieces:
                print(flush=True)
        self.turns += [asked, {"role": "assistant", "content": "".join(pieces)}]

    def _set_system(self, text: str) -> None:
        self.system = text or None

    def _set(self, text: str) -> None:
        name, equals, value = text.partition("=")
        name = name.strip()
        if name not in SETTABLE:
            raise UserError(f"{name!r} cannot be set, but {', '.join(SETTABLE)}")
        if not equals or not value.strip():
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = json.loads(value)
        except ValueError:
            self.settings[name] = value.strip()

    def _submit(self, text: str) -> None:
        job = BatchJob.submit(self.client, parse(read(text), chat=True, defaults=self.settings))
        self.batches.append(job)
        self.say(f"{job.id}: {len(job.requests.lines)} prompts in the background")

    def _show_batches(self) -> None:
        for job in list(self.batches):
            try:
                job.look(self.client)
                if job.is_over:
                    self.batches.remove(job)
                    print("\n".join(grouped(job, job.results(self.client))), flush=True)
                    if job.error is not None:
                        self.say(f"error: {job.error}")
            except UserError as error:
                self.say(f"error: {error}")

    def _save(self, text: str) -> None:
        if not text:
            raise UserError("/save needs a file's name")
        saved = {"messages": self.messages, "settings": self.settings}
        try:
            Path(text).write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {text}: {error.strerror}") from None
