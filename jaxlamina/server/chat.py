"""What an answer of `/v1/chat/completions` looks like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxlamina.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxlamina.server.forms import Form, ranked, usage
from jaxlamina.server.protocol import (
    ChatAnswer,
    ChatChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatTokenLogprob,
    ChunkChoice,
    Delta,
    DeltaToolCall,
    TokenLogprob,
    ToolCall,
    Usage,
)
from jaxlamina.server.tools import ToolCallParser, parse


class ChatForm(Form):
    """``calls_tools``: the text is searched for calls."""

    prefix = "chatcmpl"

    def __init__(self, body: ChatCompletionRequest, model: str, calls_tools: bool) -> None:
        super().__init__(
            model,
            body.n or 1,
            holds=bool(body.logprobs),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )
        self._n_top = body.top_logprobs or 0
        self._calls_tools = calls_tools
        self._parsers = [ToolCallParser() for _ in range(self.n if calls_tools else 0)]

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        choices = []
        for choice, _, completion in self.choices(outputs):
            text, calls = parse(completion.text) if self._calls_tools else (completion.text, [])
            choices.append(
                ChatChoice(
                    index=choice,
                    message=ChatAnswer(content=text or (None if calls else ""), tool_calls=calls or None),
                    logprobs=self._logprobs(completion.logprobs),
                    finish_reason="tool_calls" if calls else completion.finish_reason,
                    stop_reason=completion.stop_reason,
                )
            )
        return ChatCompletionResponse(id=self.id, model=self.model, choices=choices, usage=usage(outputs))

    def opening(self) -> Iterator[ChatCompletionChunk]:
        for choice in range(self.n):
            yield self._chunk(ChunkChoice(index=choice, delta=Delta(role="assistant", content="")))

    def piece(self, choice: int, text: str, entry: PositionLogprobs | None) -> Iterator[ChatCompletionChunk]:
        calls: list[ToolCall] = []
        if self._calls_tools:
            parser = self._parsers[choice]
            n_before = parser.n_calls
            text, calls = parser.add(text)
            numbered = [
                DeltaToolCall(index=n_before + i, **call.model_dump()) for i, call in enumerate(calls)
            ]
        if text or entry is not None:
            logprobs = self._logprobs(None if entry is None else [entry])
            yield self._chunk(ChunkChoice(index=choice, delta=Delta(content=text), logprobs=logprobs))
        if calls:
            yield self._chunk(ChunkChoice(index=choice, delta=Delta(tool_calls=numbered)))

    def end(self, choice: int, completion: CompletionOutput) -> Iterator[ChatCompletionChunk]:
        reason: str = completion.finish_reason
        if self._calls_tools:
            parser = self._parsers[choice]
            if rest := parser.finish():
                yield self._chunk(ChunkChoice(index=choice, delta=Delta(content=rest)))
            reason = "tool_calls" if parser.n_calls else reason
        yield self._chunk(
            ChunkChoice(index=choice, delta=Delta(), finish_reason=reason, stop_reason=completion.stop_reason)
        )

    def usage_chunk(self, counts: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self.id, model=self.model, choices=[], usage=counts)

    def _chunk(self, choice: ChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self.id, model=self.model, choices=[choice])

    def _logprobs(self, entries: Sequence[PositionLogprobs] | None) -> ChatLogprobs | None:
        return None if entries is None else ChatLogprobs(content=[self._token(entry) for entry in entries])

    def _token(self, entry: PositionLogprobs) -> ChatTokenLogprob:
        chosen: Logprob = next(iter(entry.values()))
        tops = [_token_logprob(*top) for top in ranked(entry, self._n_top)]
        return ChatTokenLogprob(
            **_token_logprob(chosen.decoded_token, chosen.logprob).model_dump(), top_logprobs=tops
        )


def _token_logprob(token: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(token=token, logprob=logprob, bytes=list(token.encode("utf-8")))
