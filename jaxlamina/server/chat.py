"""What an answer of `/v1/chat/completions` looks like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxlamina.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxlamina.server.forms import Form, prompt_field, ranked
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
from jaxlamina.server.tools import ToolUse, parse, parser_for


class ChatForm(Form):
    """``use``: whether the text may have calls of tools in it, or must be one."""

    prefix = "chatcmpl"

    def __init__(self, body: ChatCompletionRequest, model: str, use: ToolUse) -> None:
        super().__init__(
            model,
            body.n or 1,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )
        self._n_top, self._n_prompt_top = body.top_logprobs or 0, body.prompt_logprobs
        self._use: ToolUse = use
        self._parsers = [parser_for(use) for _ in range(self.n)]

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        choices = []
        for choice, _, completion in self.choices(outputs):
            text, calls = parse(completion.text, self._use)
            choices.append(
                ChatChoice(
                    index=choice,
                    message=ChatAnswer(content=text or (None if calls else ""), tool_calls=calls or None),
                    logprobs=self._logprobs(completion.logprobs),
                    finish_reason="tool_calls" if calls else completion.finish_reason,
                    stop_reason=completion.stop_reason,
                )
            )
        return ChatCompletionResponse(
            id=self.id,
            model=self.model,
            choices=choices,
            usage=self.usage(outputs),
            prompt_logprobs=prompt_field(outputs[0], self._n_prompt_top),
        )

    def opening(self) -> Iterator[ChatCompletionChunk]:
        for choice in range(self.n):
            yield self._chunk(ChunkChoice(index=choice, delta=Delta(role="assistant", content="")))

    def piece(self, choice: int, text: str, entry: PositionLogprobs | None) -> Iterator[ChatCompletionChunk]:
        parser = self._parsers[choice]
        calls: list[ToolCall] = []
        if parser is not None:
            text, calls = parser.add(text)
        if text or entry is not None:
            logprobs = self._logprobs(None if entry is None else [entry])
            yield self._chunk(ChunkChoice(index=choice, delta=Delta(content=text), logprobs=logprobs))
        yield from self._called(choice, calls)

    def end(self, choice: int, completion: CompletionOutput) -> Iterator[ChatCompletionChunk]:
        parser = self._parsers[choice]
        reason: str = completion.finish_reason
        if parser is not None:
            rest, calls = parser.finish()
            if rest:
                yield self._chunk(ChunkChoice(index=choice, delta=Delta(content=rest)))
            yield from self._called(choice, calls)
            reason = "tool_calls" if parser.n_calls else reason
        yield self._chunk(
            ChunkChoice(index=choice, delta=Delta(), finish_reason=reason, stop_reason=completion.stop_reason)
        )

    def _called(self, choice: int, calls: Sequence[ToolCall]) -> Iterator[ChatCompletionChunk]:
        """A chunk with calls that are complete now."""
        parser = self._parsers[choice]
        if parser is not None and calls:
            first = parser.n_calls - len(calls)
            numbered = [DeltaToolCall(index=first + i, **call.model_dump()) for i, call in enumerate(calls)]
            yield self._chunk(ChunkChoice(index=choice, delta=Delta(tool_calls=numbered)))

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
