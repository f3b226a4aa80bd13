"""How the events of a request become an answer of the API: whole, or chunk by chunk.

`Form` is what both kinds of answers share; `completions` and `chat` say how each looks. Knows outputs and
events; nothing of the engine or HTTP.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from jaxlamina.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, TokenEvent
from jaxlamina.server.errors import ApiError
from jaxlamina.server.protocol import PromptEntry, PromptLogprob, PromptTokensDetails, Usage

_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_ANY_TEXT, _ANY_IDS = "\ue000text\ue000", [-(2**53)]


class Text(NamedTuple):
    """A chunk that has some more text of a choice, where wanted its tokens' ``ids``, and nothing else: nearly
    all of a stream. Of one choice all have ids, or none."""

    choice: int
    text: str
    ids: list[int] | None = None


Chunk = BaseModel | Text


class Form(ABC):
    """One request's answer. ``gives_written``: what the model writes is part of it; ``gives_ids``: so are
    token ids, of prompts and of what is written."""

    prefix: str
    counts_events = False  # each says how many there were before it

    def __init__(
        self, model: str, n: int, *, include_usage: bool, gives_written: bool = True, gives_ids: bool = False
    ) -> None:
        self.model, self.n, self.gives_written, self.gives_ids = model, n, gives_written, gives_ids
        self.identify(uuid.uuid4().hex, int(time.time()))
        self._include_usage = include_usage
        # A choice's text, and its ids, in the event of a `Text`.
        self._around: dict[int, tuple[str, str, str]] = {}
        self._finished: dict[int, RequestOutput] = {}

    def identify(self, key: str, created: int) -> None:
        """Gives the answer its id, of which all ids in it are made, and when it was begun: before it is."""
        self._key, self.created = key, created
        self.id = f"{self.prefix}-{key}"

    def new_id(self, *what: object) -> str:
        """32 hexadecimal digits: the same for the same part of the same answer, in any process."""
        return hashlib.blake2b("/".join(map(str, (self._key, *what))).encode(), digest_size=16).hexdigest()

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """All of it. ``outputs``: one a prompt."""

    def opening(self) -> Iterator[Chunk]:
        """Chunks before the first token."""
        yield from ()

    def chunks(self, which: int, event: TokenEvent) -> Iterator[Chunk]:
        """What prompt number ``which``'s event adds to the stream."""
        if event.prompt_logprobs is not None:
            yield from self.scored(which, event.prompt_logprobs)
        if self.gives_written and (event.new_text or event.logprobs is not None or self.gives_ids):
            ids = [event.token_id] if self.gives_ids else None
            yield from self.piece(self._choice(which, event.index), event.new_text, event.logprobs, ids)
        if event.output is not None:
            self._finished[which] = event.output
            for completion in event.output.outputs:
                yield from self.end(self._choice(which, completion.index), completion)

    def pass_over(self, which: int, event: TokenEvent) -> None:
        """As `chunks` of an event that has gone out already, maybe as several unless they are counted: what
        comes after goes by it."""
        for _ in self.chunks(which, event):
            pass

    def closing(self) -> Iterator[Chunk]:
        """Chunks after the last token."""
        if self._include_usage:
            yield self.usage_chunk(self.usage([*self._finished.values()]))

    def scored(self, which: int, entries: Sequence[PositionLogprobs | None]) -> Iterator[Chunk]:
        """How likely prompt number ``which`` is; before the first piece of its choices."""
        yield from ()

    @abstractmethod
    def piece(
        self, choice: int, text: str, entry: PositionLogprobs | None, ids: list[int] | None
    ) -> Iterator[Chunk]:
        """Some more text of a choice, with the log-probabilities and, where wanted, the id of the token it
        came with."""

    @abstractmethod
    def end(self, choice: int, completion: CompletionOutput) -> Iterator[Chunk]:
        """A choice is finished; its text has gone out."""

    last = "data: [DONE]\n\n"  # after all else, in a stream

    def text_chunk(self, text: Text) -> BaseModel:
        """It as it goes out, of forms that have them."""
        raise NotImplementedError

    def event(self, chunk: Chunk) -> str:
        """A chunk as a server-sent event."""
        if not isinstance(chunk, Text):
            return _event(dump(chunk))
        # Said for every token: what is the same each time is made once.
        around = self._around.get(chunk.choice)
        if around is None:
            any_ids = None if chunk.ids is None else _ANY_IDS
            event = self.event(self.text_chunk(Text(chunk.choice, _ANY_TEXT, any_ids)))
            before, _, after = event.partition(_JSON.encode(_ANY_TEXT))
            between, _, after = after.partition(_JSON.encode(_ANY_IDS))
            around = self._around[chunk.choice] = before, between, after
        ids = "" if chunk.ids is None else f"[{','.join(map(str, chunk.ids))}]"
        return around[0] + _JSON.encode(chunk.text) + around[1] + ids + around[2]

    def failure(self, error: ApiError) -> str:
        """The event of an answer that cannot be finished."""
        return _event(error.body())

    @abstractmethod
    def usage_chunk(self, counts: Usage) -> BaseModel:
        """The chunk that ends a stream whose client wants to know what it cost."""

    def choices(
        self, outputs: Sequence[RequestOutput]
    ) -> Iterator[tuple[int, RequestOutput, CompletionOutput]]:
        for which, output in enumerate(outputs):
            for completion in output.outputs:
                yield self._choice(which, completion.index), output, completion

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """What ``outputs``, one a prompt, cost."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completions = [completion for output in outputs for completion in output.outputs]
        written = sum(len(completion.token_ids) for completion in completions) if self.gives_written else 0
        cached = sum(output.n_cached_tokens for output in outputs)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def _choice(self, which: int, index: int) -> int:
        return which * self.n + index


def ranked(entry: PositionLogprobs, n: int) -> list[tuple[int, Logprob]]:
    """The ``n`` likeliest tokens of a position, likeliest first."""
    return sorted(entry.items(), key=lambda one: one[1].rank)[:n]


def prompt_field(output: RequestOutput, n: int | None) -> list[PromptEntry | None] | None:
    """vLLM's ``prompt_logprobs`` of an answer, of ``n`` likeliest tokens a position; None: it is not
    wanted."""
    if n is None or output.prompt_logprobs is None:
        return None
    return [None if entry is None else _entry(entry, n) for entry in output.prompt_logprobs]


def _entry(entry: PositionLogprobs, n: int) -> PromptEntry:
    stands = next(iter(entry))
    return {
        str(token): PromptLogprob(**logprob._asdict())
        for token, logprob in entry.items()
        if token == stands or logprob.rank <= n
    }


def _event(data: dict[str, Any]) -> str:
    return f"data: {_JSON.encode(data)}\n\n"


def dump(answer: BaseModel) -> dict[str, Any]:
    """A whole answer or a chunk as plain data; a chunk has no fields that it says nothing about."""
    found = answer.model_dump()
    _without_none(found, "usage", "prompt_logprobs", "prompt_token_ids")
    for choice in found.get("choices", ()):
        _without_none(choice, "prompt_logprobs", "prompt_token_ids", "token_ids")
        if "delta" in choice:
            _without_none(choice["delta"], *choice["delta"])
        elif "message" in choice:
            _without_none(choice["message"], "tool_calls", "reasoning_content")
    return found


def _without_none(found: dict[str, Any], *names: str) -> None:
    for name in names:
        if found.get(name) is None:
            found.pop(name, None)
