"""Completions and chats, from a checked request to a whole answer or a stream of chunks.

Puts prompts, parameters, the engine and an answer's form together. Knows nothing of HTTP; batches use it as
endpoints do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from jaxlamina.engine.outputs import RequestOutput
from jaxlamina.engine.policies import BATCH_PRIORITY
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.server.async_engine import Answers, AsyncEngine, Prompt, TooMany, Unavailable
from jaxlamina.server.chat import ChatForm
from jaxlamina.server.completions import CompletionForm
from jaxlamina.server.engine_thread import Ended
from jaxlamina.server.errors import ApiError, of_failure, refused, unavailable
from jaxlamina.server.followed import FollowedAnswer, text_of
from jaxlamina.server.forms import Form, dump
from jaxlamina.server.parameters import sampling_params
from jaxlamina.server.pieces import Follow
from jaxlamina.server.prompts import Prompts
from jaxlamina.server.protocol import MAX_CONTINUATIONS, ChatCompletionRequest, CompletionRequest
from jaxlamina.server.responses import ResponsesForm, ResponsesRequest, as_chat
from jaxlamina.server.settings import MAX_GRAMMAR_BYTES
from jaxlamina.server.workshop import in_thread

T = TypeVar("T")
Body = CompletionRequest | ChatCompletionRequest | ResponsesRequest


class Service:
    """Raises `ApiError` for whatever cannot be answered. ``counted``: see `AsyncEngine.submit`; what is not
    counted is batch work, which goes after chats unless it says a priority of its own."""

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Prompts,
        names: Sequence[str],
        ignores_priority: bool,
        max_grammar_bytes: int = MAX_GRAMMAR_BYTES,
    ) -> None:
        """``ignores_priority``: the scheduling policy never looks at a request's. ``max_grammar_bytes``: of
        what an output must follow."""
        self.engine, self.prompts, self.names = engine, prompts, tuple(names)
        self._ignores_priority, self._max_grammar_bytes = ignores_priority, max_grammar_bytes

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; there is {', '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )

    def check_ready(self) -> None:
        try:
            self.engine.check_ready()
        except Unavailable as error:
            raise unavailable(str(error)) from None

    async def whole(
        self, body: Body, *, counted: bool = True, on_event: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The answer, when all of it is there. ``on_event`` is called as often as something of it comes."""
        form, answers = await self._begin(body, counted)
        try:
            outputs: dict[int, RequestOutput] = {}
            async for which, event in answers:
                on_event()
                if event.output is not None:
                    outputs[which] = event.output
            return await in_thread(lambda: dump(form.whole([outputs[which] for which in sorted(outputs)])))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
            raise _of(error) from None
        finally:
            answers.close()

    async def stream(self, body: Body) -> EventStream:
        """The answer as server-sent events; accepted once this returns."""
        return EventStream(*await self._begin(body, counted=True))

    async def followed(self, body: Body, follow: Follow) -> FollowedAnswer:
        """The answer for a supervisor; accepted once this returns."""
        form, answers = await self._begin(body, counted=True, follow=follow)
        n_given = {(which, index): n for which, index, n in follow.n_given}
        return FollowedAnswer(form, answers, _of, n_given, is_stream=bool(body.stream))

    async def _begin(self, body: Body, counted: bool, follow: Follow | None = None) -> tuple[Form, Answers]:
        self.check_model(body.model)
        self.check_ready()
        try:
            form, prompts, params = await in_thread(self._prepared, body)
            priority = body.priority
            if not counted and not self._ignores_priority and "priority" not in body.model_fields_set:
                priority = BATCH_PRIORITY
            how: dict[str, Any] = {"priority": priority, "counted": counted}
            if follow is not None:
                form.identify(follow.key, follow.created)
                before = {"written": _by_prompt(follow.written), "n_cached": dict(follow.n_cached)}
                before |= {} if form.counts_events else {"n_given": _by_prompt(follow.n_given)}
                how |= {"seed": follow.seed, "n_together": follow.n_together, **before}
                how["was_taken"] = follow.was_taken
            return form, await self.engine.submit(prompts, params, **how)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
            raise _of(error) from None

    def _prepared(self, body: Body) -> tuple[Form, Sequence[Prompt], SamplingParams]:
        """All that a request asks for, checked. It may take long: a template is run, a long text is
        tokenised."""
        asked = as_chat(body) if isinstance(body, ResponsesRequest) else body
        params = sampling_params(asked)
        if body.priority and self._ignores_priority:
            raise refused(
                f"priority={body.priority} would change nothing: this server's scheduling policy does not "
                f"look at it; leave it out, or serve with --scheduling-policy priority (or chat-first)",
                "priority",
            )
        follows = params.structured_outputs
        if follows is not None and follows.n_bytes > self._max_grammar_bytes:
            raise refused(
                f"structured_outputs have {follows.n_bytes} bytes, at most {self._max_grammar_bytes} are "
                f"taken: ask for something shorter, or serve with a larger --max-grammar-bytes",
                "structured_outputs",
            )
        form: Form
        prompts: Sequence[Prompt]
        if isinstance(asked, ChatCompletionRequest):
            prompts = [self.prompts.chat(asked, params)]
            reading = self.prompts.reading(asked, params, prompts[0])
            params = self.prompts.with_marks(params, reading)
            if isinstance(body, ResponsesRequest):
                form = ResponsesForm(body, self.names[0], reading, self.prompts.n_tokens)
            else:
                form = ChatForm(asked, self.names[0], prompts[0], reading, self.prompts.token_bytes)
        else:
            # 16 where nobody says how many is no wish that must be met in full
            prompts = self.prompts.completion(asked, params)
            raw = self.prompts.token_bytes, self.prompts.written_bytes(params)
            form = CompletionForm(asked, self.names[0], prompts, *raw)
        if len(prompts) * params.n_sequences > MAX_CONTINUATIONS:
            raise refused(
                f"{len(prompts)} prompts with {params.n_sequences} continuations each are too many: a "
                f"request may have {MAX_CONTINUATIONS}",
                "n",
            )
        return form, prompts, params


def _by_prompt(of_sequences: Iterable[tuple[int, int, T]]) -> dict[int, dict[int, T]]:
    """What is said of (prompt, continuation)."""
    found: dict[int, dict[int, T]] = {}
    for which, index, what in of_sequences:
        found.setdefault(which, {})[index] = what
    return found


def _of(error: Exception) -> ApiError:
    if isinstance(error, Unavailable):
        return unavailable(str(error))
    if isinstance(error, Ended):
        return ApiError(503, str(error), type="service_unavailable", code="aborted")
    if isinstance(error, TooMany):
        return ApiError(429, str(error), type="rate_limit_error", code="rate_limit_exceeded")
    return of_failure(error)


class EventStream:
    """Server-sent events of one answer, text already. `close` in any case, also where nothing was read."""

    def __init__(self, form: Form, answers: Answers) -> None:
        self._form, self._answers = form, answers

    def close(self) -> None:
        self._answers.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        form = self._form
        try:
            for chunk in form.opening():
                yield form.event(chunk)
            async for which, event in self._answers:
                if text := await text_of(form, which, event):
                    yield text
            for chunk in form.closing():
                yield form.event(chunk)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
            yield form.failure(_of(error))
        yield form.last
