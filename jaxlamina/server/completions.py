"""What an answer of `/v1/completions` looks like."""

from __future__ import annotations

import codecs
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
        token_bytes: Callable[[int], bytes],
        written_bytes: Callable[[int], bytes],
    ) -> None:
        """``token_bytes``: of a token id. ``written_bytes``: of them what is in a text that is written."""
        super().__init__(
            model,
            body.n or 1,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            gives_written=body.max_tokens != 0,
            gives_ids=bool(body.return_token_ids),
        )
        self._prompts, self._token_bytes, self._written_bytes = prompts, token_bytes, written_bytes
        self._n_top, self._n_prompt_top = body.logprobs or 0, body.prompt_logprobs
        self._echoes = [prompt.text or "" for prompt in prompts] if body.echo else [""] * len(prompts)
        self._scores = body.echo and body.logprobs is not None  # prompts have entries, too
        self._places: dict[int, _Place] = {}  # where each choice's next token begins in its text
        self._begun: set[int] = set()  # choices that have had a chunk

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        choices = []
        for choice, output, completion in self.choices(outputs):
            completion = self._given(completion)
            logprobs = self._of_written(choice, completion.logprobs)
            if self._scores:
                of_prompt = self._of_prompt(choice // self.n, output.prompt_logprobs or ())
                logprobs = of_prompt if logprobs is None else _joined(of_prompt, logprobs)
            choices.append(
                CompletionChoice(
                    index=choice,
                    text=self._echoes[choice // self.n] + completion.text,
                    logprobs=logprobs,
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
            if echo and not self._scores:
                yield from self._echoed(which, None)

    def scored(self, which: int, entries: Sequence[PositionLogprobs | None]) -> Iterator[CompletionResponse]:
        yield from self._echoed(which, entries)

    def _echoed(
        self, which: int, entries: Sequence[PositionLogprobs | None] | None
    ) -> Iterator[CompletionResponse]:
        logprobs = None if entries is None else self._of_prompt(which, entries)
        for choice in range(which * self.n, (which + 1) * self.n):
            yield self._chunk(CompletionChoice(index=choice, text=self._echoes[which], logprobs=logprobs))

    def piece(
        self, choice: int, text: str, entry: PositionLogprobs | None, ids: list[int] | None
    ) -> Iterator[Chunk]:
        if entry is None and (ids is None or choice in self._begun):  # the first one has the prompt's ids
            yield Text(choice, text, ids)
            return
        logprobs = self._of_written(choice, None if entry is None else [entry])
        yield self._chunk(CompletionChoice(index=choice, text=text, logprobs=logprobs, token_ids=ids))

    def pass_over(self, which: int, event: TokenEvent) -> None:
        if event.output is None and event.prompt_logprobs is None:
            self._begun.add(self._choice(which, event.index))  # all that its chunk would leave
        else:
            super().pass_over(which, event)

    def text_chunk(self, text: Text) -> CompletionResponse:
        return self._chunk(CompletionChoice(index=text.choice, text=text.text, token_ids=text.ids))

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

    def _of_prompt(self, which: int, entries: Sequence[PositionLogprobs | None]) -> CompletionLogprobs:
        tokens = self._prompts[which].token_ids
        n_all = len(b"".join(map(self._token_bytes, tokens)).decode("utf-8", "replace"))
        # What is more than the text is of its start: a token that was put before it, a blank that it drops.
        return self._logprobs(tokens, entries, _Place(len(self._echoes[which]) - n_all), self._token_bytes)

    def _of_written(
        self, choice: int, entries: Sequence[PositionLogprobs] | None
    ) -> CompletionLogprobs | None:
        if entries is None:
            return None
        place = self._places.setdefault(choice, _Place(len(self._echoes[choice // self.n])))
        tokens = [next(iter(entry)) for entry in entries]
        return self._logprobs(tokens, entries, place, self._written_bytes)

    def _logprobs(
        self,
        tokens: Sequence[int],
        entries: Sequence[PositionLogprobs | None],
        place: _Place,
        in_text: Callable[[int], bytes],
    ) -> CompletionLogprobs:
        tokens = tokens[: len(entries)]
        return CompletionLogprobs(
            tokens=[*map(self._name, tokens)],
            token_logprobs=[
                None if entry is None else next(iter(entry.values())).logprob for entry in entries
            ],
            top_logprobs=[None if entry is None else self._tops(entry) for entry in entries],
            text_offset=[place.passed(in_text(token)) for token in tokens],
        )

    def _tops(self, entry: PositionLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that stands there. Of several that look alike the likeliest
        counts."""
        found: dict[str, float] = {}
        for token, logprob in [*ranked(entry, self._n_top), next(iter(entry.items()))]:
            found.setdefault(self._name(token), logprob.logprob)
        return found

    def _name(self, token: int) -> str:
        """Its text; that of one which is no whole characters says its bytes, as OpenAI's."""
        raw = self._token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class _Place:
    """How many characters of a text are whole before its next token; from below 0 for what is not in it."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def passed(self, raw: bytes) -> int:
        """Where the token of these bytes begins; the next one begins behind it."""
        at = self._at
        self._at += len(self._utf8.decode(raw))
        return max(0, at)


def _joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(**{name: [*x, *getattr(then, name)] for name, x in first})
