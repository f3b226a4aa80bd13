"""Answers as a supervisor follows them: piece by piece, each with its token, so that another process can go
on.

Whoever answers knows nothing of recovery: what was written before is given to the engine, which repeats its
events, and the supervisor (`jaxlamina.supervisor`) knows which of them a client has had. Knows answers' forms
and events; nothing of HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from jaxlamina.engine.outputs import RequestOutput, TokenEvent
from jaxlamina.server.async_engine import Answers, Unavailable
from jaxlamina.server.errors import ApiError, JsonResponse
from jaxlamina.server.forms import Chunk, Form, dump
from jaxlamina.server.pieces import Opening, Piece
from jaxlamina.server.workshop import in_thread


class FollowedAnswer:
    """The lines of one answer, without those of repeated tokens that need not be told again: of sequences,
    (prompt, continuation), the first ``n_given``. `close` in any case, also where nothing was read."""

    def __init__(
        self,
        form: Form,
        answers: Answers,
        error_of: Callable[[Exception], ApiError],
        n_given: Mapping[tuple[int, int], int],
        *,
        is_stream: bool,
    ) -> None:
        self._form, self._answers, self._error_of, self._is_stream = form, answers, error_of, is_stream
        self._n_given = n_given

    def close(self) -> None:
        self._answers.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        form, outputs, n_seen = self._form, dict[int, RequestOutput](), Counter[tuple[int, int]]()
        try:
            n_tokens = self._answers.n_prompt_tokens
            opening = Opening(self._is_stream, n_tokens, len(n_tokens) * form.n)
            yield Piece(self._text(form.opening()), opening=opening).line()
            async for which, event in self._answers:
                if event.output is not None:
                    outputs[which] = event.output
                of = which, event.index
                n_seen[of] += event.n_tokens
                at = n_seen[of] - 1
                if event.is_again and at < self._n_given.get(of, 0):
                    if self._is_stream:
                        form.pass_over(which, event)
                    continue
                text = await text_of(form, which, event) if self._is_stream else ""
                yield Piece(text, of=of, token=event.token_id, at=at, n_found=event.n_found).line()
            if self._is_stream:
                end = Piece(self._text(form.closing()) + form.last, status=200)
            else:
                found = [outputs[which] for which in sorted(outputs)]
                end = Piece(status=200, answer=await in_thread(lambda: _json(dump(form.whole(found)))))
        except Unavailable as error:
            end = Piece(gone=str(error))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
            failed = self._error_of(error)
            text = form.failure(failed) + form.last if self._is_stream else ""
            end = Piece(text, status=failed.status, answer=_json(failed.body()))
        yield end.line()

    def _text(self, chunks: Iterable[Chunk]) -> str:
        return "".join(map(self._form.event, chunks)) if self._is_stream else ""


async def text_of(form: Form, which: int, event: TokenEvent) -> str:
    """What prompt number ``which``'s event adds to a stream; in a thread where that is much."""

    def text() -> str:
        return "".join(map(form.event, form.chunks(which, event)))

    # A prompt's entries may be many thousands.
    return text() if event.prompt_logprobs is None else await in_thread(text)


def _json(content: Any) -> str:
    return bytes(JsonResponse(content).body).decode("ascii")
