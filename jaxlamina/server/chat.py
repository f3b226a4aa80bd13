"""What an answer of `/v1/chat/completions` looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jaxlamina.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxlamina.server.async_engine import Prompt
from jaxlamina.server.forms import Chunk, Form, Text, prompt_field, ranked
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
from jaxlamina.server.reading import Read, Reading
from jaxlamina.server.tool_parsers import Call
from jaxlamina.server.tools import tool_call


class ChatForm(Form):
    """``reading``: what the text may have in it; ``token_bytes``: of a token id."""

    prefix = "chatcmpl"

    def __init__(
        self,
        body: ChatCompletionRequest,
        model: str,
        prompt: Prompt,
        reading: Reading,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        super().__init__(
            model,
            body.n or 1,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            gives_ids=bool(body.return_token_ids),
        )
        self._n_top, self._n_prompt_top = body.top_logprobs or 0, body.prompt_logprobs
        self._gives_thoughts = body.include_reasoning
        self._prompt_ids = list(prompt.token_ids) if self.gives_ids else None
        self._reading, self._token_bytes = reading, token_bytes
        self._readers = [reading.reader() for _ in range(self.n)]

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        choices = []
        for choice, _, completion in self.choices(outputs):
            read = self._reading.reader().whole(completion.text)
            calls = [self._call(choice, n, call) for n, call in enumerate(read.calls)]
            message = ChatAnswer(
                content=read.answered or (None if calls else ""),
                reasoning_content=(self._gives_thoughts and read.thought) or None,
                tool_calls=calls or None,
            )
            choices.append(
                ChatChoice(
                    index=choice,
                    message=message,
                    logprobs=self._logprobs(completion.logprobs),
                    finish_reason=_finish_reason(completion, bool(calls)),
                    stop_reason=completion.stop_reason,
                    token_ids=list(completion.token_ids) if self.gives_ids else None,
                )
            )
        return ChatCompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage(outputs),
            prompt_logprobs=prompt_field(outputs[0], self._n_prompt_top),
            prompt_token_ids=self._prompt_ids,
        )

    def opening(self) -> Iterator[ChatCompletionChunk]:
        for choice in range(self.n):
            chunk = self._chunk(ChunkChoice(index=choice, delta=Delta(role="assistant", content="")))
            chunk.prompt_token_ids = self._prompt_ids
            yield chunk

    def piece(
        self, choice: int, text: str, entry: PositionLogprobs | None, ids: list[int] | None
    ) -> Iterator[Chunk]:
        read = self._readers[choice].add(text)
        match read:
            case Read("", (str(answered),)) if answered and entry is None:  # nearly always
                yield Text(choice, answered, ids)
                return
        logprobs = self._logprobs(None if entry is None else [entry])
        delta = self._delta(choice, read)
        if delta is None and (logprobs, ids) != (None, None):
            delta = Delta(content="")
        if delta is not None:
            yield self._chunk(ChunkChoice(index=choice, delta=delta, logprobs=logprobs, token_ids=ids))

    def text_chunk(self, text: Text) -> ChatCompletionChunk:
        delta = Delta(content=text.text)
        return self._chunk(ChunkChoice(index=text.choice, delta=delta, token_ids=text.ids))

    def end(self, choice: int, completion: CompletionOutput) -> Iterator[ChatCompletionChunk]:
        reader = self._readers[choice]
        delta = self._delta(choice, reader.finish())
        if delta is not None:
            yield self._chunk(ChunkChoice(index=choice, delta=delta))
        reason = _finish_reason(completion, reader.n_calls > 0)
        yield self._chunk(
            ChunkChoice(index=choice, delta=Delta(), finish_reason=reason, stop_reason=completion.stop_reason)
        )

    def _delta(self, choice: int, read: Read) -> Delta | None:
        """What is new; None if nothing is."""
        first = self._readers[choice].n_calls - len(read.calls)
        calls = [
            DeltaToolCall(index=first + i, **self._call(choice, first + i, call).model_dump())
            for i, call in enumerate(read.calls)
        ]
        thought = read.thought if self._gives_thoughts else ""
        if not (thought or read.answered or calls):
            return None
        return Delta(
            content=read.answered or None, reasoning_content=thought or None, tool_calls=calls or None
        )

    def _call(self, choice: int, n: int, call: Call) -> ToolCall:
        return tool_call(call, self._reading.form, self.new_id("call", choice, n))

    def usage_chunk(self, counts: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=[], usage=counts
        )

    def _chunk(self, choice: ChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[choice])

    def _logprobs(self, entries: Sequence[PositionLogprobs] | None) -> ChatLogprobs | None:
        return None if entries is None else ChatLogprobs(content=[self._token(entry) for entry in entries])

    def _token(self, entry: PositionLogprobs) -> ChatTokenLogprob:
        tops = [self._token_logprob(*top) for top in ranked(entry, self._n_top)]
        chosen = self._token_logprob(*next(iter(entry.items())))
        return ChatTokenLogprob(**chosen.model_dump(), top_logprobs=tops)

    def _token_logprob(self, token: int, logprob: Logprob) -> TokenLogprob:
        raw = [*self._token_bytes(token)]
        return TokenLogprob(token=logprob.decoded_token, logprob=logprob.logprob, bytes=raw)


def _finish_reason(completion: CompletionOutput, called: bool) -> str:
    """A text that was cut off says so even with calls in it: more of them may have been to come."""
    return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason
