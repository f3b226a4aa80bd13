"""What an answer of `/v1/completions` looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jaxlamina.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenEvent
from jaxlamina.server.async_engine import Prompt
from jaxlamina.server.forms import Chunk, Form, Text, prompt_field, ranked
from jaxlamina.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)


class CompletionForm(Form):
    prefix = "cmpl"

    def __init__(
        self,
        body: CompletionRequest,
        model: str,
        prompts: Sequence[Prompt],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """``decode``: token ids as text."""
        super().__init__(
            model,
            body.n or 1,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            gives_written=body.max_tokens != 0,
            gives_ids=bool(body.return_token_ids),
        )
        self._prompts = prompts
        self._n_top, self._n_prompt_top = body.logprobs or 0, body.prompt_logprobs
        self._echoes = [prompt.text or "" for prompt in prompts] if body.echo else [""] * len(prompts)
        # A prompt's first token has no entry, so its text must be known; empty unless prompts are echoed with
        # entries.
        scores = body.echo and body.logprobs is not None
        self._firsts = [decode(prompt.token_ids[:1]) for prompt in prompts] if scores else []
        self._offsets: dict[int, int] = {}  # of each choice's next token in its text
        self._begun: set[int] = set()  # choices that have had a chunk

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        choices = []
        for choice, output, completion in self.choices(outputs):
            completion = self._given(completion)
            entries: Sequence[PositionLogprobs | None] | None = completion.logprobs
            if self._firsts:
                entries = [*(output.prompt_logprobs or ()), *(entries or ())]
            choices.append(
                CompletionChoice(
                    index=choice,
                    text=self._echoes[choice // self.n] + completion.text,
                    logprobs=self._logprobs(choice, entries),
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                    prompt_logprobs=prompt_field(output, self._n_prompt_top),
                    prompt_token_ids=self._prompt_ids(choice),
                    token_ids=list(completion.token_ids) if self.gives_ids else None,
                )
            )
        return CompletionResponse(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage(outputs)
        )

    def opening(self) -> Iterator[CompletionResponse]:
        for which, echo in enumerate(self._echoes):
            if echo and not self._firsts:
                yield from self._echoed(which, None)

    def scored(self, which: int, entries: Sequence[PositionLogprobs | None]) -> Iterator[CompletionResponse]:
        yield from self._echoed(which, entries)

    def _echoed(
        self, which: int, entries: Sequence[PositionLogprobs | None] | None
    ) -> Iterator[CompletionResponse]:
        for choice in range(which * self.n, (which + 1) * self.n):
            logprobs = self._logprobs(choice, entries)
            yield self._chunk(CompletionChoice(index=choice, text=self._echoes[which], logprobs=logprobs))

    def piece(
        self, choice: int, text: str, entry: PositionLogprobs | None, ids: list[int] | None
    ) -> Iterator[Chunk]:
        if entry is None and ids is None:
            yield Text(choice, text)
            return
        logprobs = self._logprobs(choice, None if entry is None else [entry])
        yield self._chunk(CompletionChoice(index=choice, text=text, logprobs=logprobs, token_ids=ids))

    def pass_over(self, which: int, event: TokenEvent) -> None:
        if event.output is None and event.prompt_logprobs is None:
            self._begun.add(self._choice(which, event.index))  # all that its chunk would leave
        else:
            super().pass_over(which, event)

    def text_chunk(self, choice: int, text: str) -> CompletionResponse:
        return self._chunk(CompletionChoice(index=choice, text=text))

    def end(self, choice: int, completion: CompletionOutput) -> Iterator[CompletionResponse]:
        completion = self._given(completion)
        why, by = completion.finish_reason, completion.stop_reason
        yield self._chunk(CompletionChoice(index=choice, text="", finish_reason=why, stop_reason=by))

    def _given(self, completion: CompletionOutput) -> CompletionOutput:
        if self.gives_written:
            return completion
        none = None if completion.logprobs is None else ()
        return CompletionOutput(completion.index, "", (), None, none, "length")

    def usage_chunk(self, counts: Usage) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self.created, model=self.model, choices=[], usage=counts
        )

    def _prompt_ids(self, choice: int) -> list[int] | None:
        return list(self._prompts[choice // self.n].token_ids) if self.gives_ids else None

    def _chunk(self, choice: CompletionChoice) -> CompletionResponse:
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            choice.prompt_token_ids = self._prompt_ids(choice.index)
        return CompletionResponse(id=self.id, created=self.created, model=self.model, choices=[choice])

    def _logprobs(
        self, choice: int, entries: Sequence[PositionLogprobs | None] | None
    ) -> CompletionLogprobs | None:
        if entries is None:
            return None
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        at = self._offsets.get(choice, 0)
        for entry in entries:
            token, logprob = (self._firsts[choice // self.n], None) if entry is None else _stands(entry)
            found.tokens.append(token)
            found.token_logprobs.append(logprob)
            found.top_logprobs.append(None if entry is None else self._tops(entry))
            found.text_offset.append(at)
            at += len(token)
        self._offsets[choice] = at
        return found

    def _tops(self, entry: PositionLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that stands there. Of several that look alike the likeliest
        counts."""
        found: dict[str, float] = {}
        for token, logprob in [*ranked(entry, self._n_top), _stands(entry)]:
            found.setdefault(token, logprob)
        return found


def _stands(entry: PositionLogprobs) -> tuple[str, float]:
    stands = next(iter(entry.values()))
    return stands.decoded_token, stands.logprob
