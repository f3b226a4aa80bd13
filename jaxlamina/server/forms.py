"""How the events of a request become an answer of the API: whole, or chunk by chunk.

`Form` is what both kinds of answers share; `completions` and `chat` say how each looks. Knows outputs and events;
nothing of the engine or HTTP.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from jaxlamina.engine import TokenEvent
from jaxlamina.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxlamina.server.protocol import PromptTokensDetails, Usage


class Form(ABC):
    """One request's answer. ``holds``: a stream's chunks need what only a finished request has (log-probabilities), so
    each prompt's chunks come together at its end.
    """

    prefix: str

    def __init__(self, model: str, n: int, *, holds: bool, include_usage: bool) -> None:
        self.model, self.n = model, n
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._holds, self._include_usage = holds, include_usage
        self._held: dict[int, list[TokenEvent]] = {}
        self._finished: dict[int, RequestOutput] = {}

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """All of it. ``outputs``: one a prompt."""

    def opening(self) -> Iterator[BaseModel]:
        """Chunks before the first token."""
        yield from ()

    def chunks(self, which: int, event: TokenEvent) -> Iterator[BaseModel]:
        """What prompt number ``which``'s event adds to the stream."""
        if self._holds:
            events = self._held.setdefault(which, [])
            events.append(event)
            if event.output is not None:
                yield from self._with_logprobs(which, events, event.output)
        elif event.new_text:
            yield from self.piece(self._choice(which, event.index), event.new_text, None)
        if event.output is not None:
            self._finished[which] = event.output
            for completion in event.output.outputs:
                yield from self.end(self._choice(which, completion.index), completion)

    def closing(self) -> Iterator[BaseModel]:
        """Chunks after the last token."""
        if self._include_usage:
            yield self.usage_chunk(usage([*self._finished.values()]))

    @abstractmethod
    def piece(self, choice: int, text: str, entry: PositionLogprobs | None) -> Iterator[BaseModel]:
        """Some more text of a choice, with the log-probabilities of the token it came with."""

    @abstractmethod
    def end(self, choice: int, completion: CompletionOutput) -> Iterator[BaseModel]:
        """A choice is finished; its text has gone out."""

    @abstractmethod
    def usage_chunk(self, counts: Usage) -> BaseModel:
        """The chunk that ends a stream whose client wants to know what it cost."""

    def choices(
        self, outputs: Sequence[RequestOutput]
    ) -> Iterator[tuple[int, RequestOutput, CompletionOutput]]:
        for which, output in enumerate(outputs):
            for completion in output.outputs:
                yield self._choice(which, completion.index), output, completion

    def _with_logprobs(
        self, which: int, events: Sequence[TokenEvent], output: RequestOutput
    ) -> Iterator[BaseModel]:
        entries = {completion.index: iter(completion.logprobs or ()) for completion in output.outputs}
        for event in events:
            yield from self.piece(
                self._choice(which, event.index), event.new_text, next(entries[event.index])
            )

    def _choice(self, which: int, index: int) -> int:
        return which * self.n + index


def usage(outputs: Sequence[RequestOutput]) -> Usage:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = sum(output.n_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def ranked(entry: PositionLogprobs, n: int) -> list[tuple[str, float]]:
    """The ``n`` likeliest tokens of a position, likeliest first."""
    likeliest = sorted(entry.values(), key=lambda logprob: logprob.rank)[:n]
    return [(logprob.decoded_token, logprob.logprob) for logprob in likeliest]


def dump(answer: BaseModel) -> dict[str, Any]:
    """A whole answer or a chunk as plain data; a chunk has no fields that it says nothing about."""
    found = answer.model_dump()
    if found.get("usage") is None:
        found.pop("usage", None)
    for choice in found.get("choices", ()):
        if "delta" in choice:
            choice["delta"] = {name: value for name, value in choice["delta"].items() if value is not None}
        elif "message" in choice and choice["message"]["tool_calls"] is None:
            del choice["message"]["tool_calls"]
    return found
