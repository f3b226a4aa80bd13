"""Completions and chats, from a checked request to a whole answer or a stream of chunks.

Puts prompts, parameters, the engine and an answer's form together. Knows nothing of HTTP; batches use it as endpoints do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.outputs import RequestOutput
from jaxlamina.sampling import SamplingParams
from jaxlamina.server.async_engine import Answers, AsyncEngine, Prompt, TooMany, Unavailable
from jaxlamina.server.chat import ChatForm
from jaxlamina.server.completions import CompletionForm
from jaxlamina.server.errors import ApiError, of_user_error, refused, unavailable
from jaxlamina.server.forms import Form, dump
from jaxlamina.server.parameters import sampling_params
from jaxlamina.server.prompts import Prompts
from jaxlamina.server.protocol import ChatCompletionRequest, CompletionRequest

Body = CompletionRequest | ChatCompletionRequest


class Service:
    """Raises `ApiError` for whatever cannot be answered. ``counted``: see `AsyncEngine.submit`."""

    def __init__(
        self, engine: AsyncEngine, prompts: Prompts, names: Sequence[str], ignores_priority: bool
    ) -> None:
        """``ignores_priority``: the scheduling policy never looks at a request's."""
        self.engine, self.prompts, self.names = engine, prompts, tuple(names)
        self._ignores_priority = ignores_priority

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

    async def whole(self, body: Body, *, counted: bool = True) -> dict[str, Any]:
        """The answer, when all of it is there."""
        form, answers = await self._begin(body, counted)
        try:
            outputs: dict[int, RequestOutput] = {}
            async for which, event in answers:
                if event.output is not None:
                    outputs[which] = event.output
            return dump(form.whole([outputs[which] for which in sorted(outputs)]))
        except Unavailable as error:
            raise unavailable(str(error)) from None
        finally:
            answers.close()

    async def stream(self, body: Body) -> EventStream:
        """The answer as server-sent events; accepted once this returns."""
        return EventStream(*await self._begin(body, counted=True))

    async def _begin(self, body: Body, counted: bool) -> tuple[Form, Answers]:
        self.check_model(body.model)
        self.check_ready()
        params = sampling_params(body)
        if body.priority and self._ignores_priority:
            raise refused(
                f"priority={body.priority} would change nothing: this server's scheduling policy does not look at it; leave it "
                "out, or serve with --scheduling-policy priority (or chat-first)",
                "priority",
            )
        form: Form
        if isinstance(body, ChatCompletionRequest):
            prompts = [await asyncio.to_thread(self.prompts.chat, body, params.max_tokens)]
            form = ChatForm(body, self.names[0], self.prompts.tool_use(body))
        else:
            # 16 where nobody says how many is no wish that must be met in full
            prompts = await asyncio.to_thread(self.prompts.completion, body)
            form = CompletionForm(body, self.names[0], prompts, self.prompts.decode)
        return form, await self._submit(prompts, params, body.priority, counted)

    async def _submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, priority: int, counted: bool
    ) -> Answers:
        try:
            return await self.engine.submit(prompts, params, priority=priority, counted=counted)
        except UserError as error:
            raise of_user_error(error) from None
        except Unavailable as error:
            raise unavailable(str(error)) from None
        except TooMany as error:
            raise ApiError(429, str(error), type="rate_limit_error", code="rate_limit_exceeded") from None


class EventStream:
    """Server-sent events of one answer, text already. `close` in any case, also where nothing was read."""

    def __init__(self, form: Form, answers: Answers) -> None:
        self._form, self._answers = form, answers

    def close(self) -> None:
        self._answers.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        form = self._form
        for chunk in form.opening():
            yield _event(dump(chunk))
        try:
            async for which, event in self._answers:
                for chunk in form.chunks(which, event):
                    yield _event(dump(chunk))
        except Unavailable as error:
            yield _event(unavailable(str(error)).body())
        else:
            for chunk in form.closing():
                yield _event(dump(chunk))
        yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n"
