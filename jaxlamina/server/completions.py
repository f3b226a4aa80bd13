"""What an answer of `/v1/completions` looks like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxlamina.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxlamina.server.async_engine import Prompt
from jaxlamina.server.forms import Form, ranked, usage
from jaxlamina.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)


class CompletionForm(Form):
    prefix = "cmpl"

    def __init__(self, body: CompletionRequest, model: str, prompts: Sequence[Prompt]) -> None:
        super().__init__(
            model,
            body.n or 1,
            holds=body.logprobs is not None,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )
        self._n_top = body.logprobs or 0
        self._echoes = [prompt.text or "" for prompt in prompts] if body.echo else [""] * len(prompts)
        self._offsets: dict[int, int] = {}  # of each choice's next token in its text

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        choices = [
            CompletionChoice(
                index=choice,
                text=self._echoes[choice // self.n] + completion.text,
                logprobs=self._logprobs(choice, completion.logprobs),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            for choice, _, completion in self.choices(outputs)
        ]
        return CompletionResponse(id=self.id, model=self.model, choices=choices, usage=usage(outputs))

    def opening(self) -> Iterator[CompletionResponse]:
        for which, echo in enumerate(self._echoes):
            for index in range(self.n if echo else 0):
                yield self._chunk(CompletionChoice(index=self._choice(which, index), text=echo))

    def piece(self, choice: int, text: str, entry: PositionLogprobs | None) -> Iterator[CompletionResponse]:
        logprobs = self._logprobs(choice, None if entry is None else [entry])
        yield self._chunk(CompletionChoice(index=choice, text=text, logprobs=logprobs))

    def end(self, choice: int, completion: CompletionOutput) -> Iterator[CompletionResponse]:
        why, by = completion.finish_reason, completion.stop_reason
        yield self._chunk(CompletionChoice(index=choice, text="", finish_reason=why, stop_reason=by))

    def usage_chunk(self, counts: Usage) -> CompletionResponse:
        return CompletionResponse(id=self.id, model=self.model, choices=[], usage=counts)

    def _chunk(self, choice: CompletionChoice) -> CompletionResponse:
        return CompletionResponse(id=self.id, model=self.model, choices=[choice])

    def _logprobs(self, choice: int, entries: Sequence[PositionLogprobs] | None) -> CompletionLogprobs | None:
        if entries is None:
            return None
        chosen = [next(iter(entry.values())) for entry in entries]
        offsets, at = [], self._offsets.get(choice, 0)
        for logprob in chosen:
            offsets.append(at)
            at += len(logprob.decoded_token)
        self._offsets[choice] = at
        return CompletionLogprobs(
            tokens=[logprob.decoded_token for logprob in chosen],
            token_logprobs=[logprob.logprob for logprob in chosen],
            top_logprobs=[dict(ranked(entry, self._n_top)) for entry in entries],
            text_offset=offsets,
        )
