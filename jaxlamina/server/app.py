"""The FastAPI application: every route, and every error in OpenAI's form.

Knows HTTP; what is answered is the service's, the files' and the batches' affair.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Form, Query, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

import jaxlamina
from jaxlamina.server.async_engine import AsyncEngine, Unavailable
from jaxlamina.server.batches import Batches
from jaxlamina.server.errors import ApiError, JsonResponse, of_status, of_validation, response
from jaxlamina.server.files import Files, page
from jaxlamina.server.gate import Gate
from jaxlamina.server.metrics import Metrics, snapshot
from jaxlamina.server.protocol import (
    BatchRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxlamina.server.service import Body, EventStream, Service
from jaxlamina.server.settings import Settings

T = TypeVar("T")
_METRICS_DEADLINE_S = 5.0
_CLIENT_GONE = 499  # nobody reads it; the access log shows it
Page = Annotated[int, Query(ge=1, le=10_000)]


@dataclass
class Parts:
    """What routes answer with. ``progress``: programs compiled and all there are."""

    settings: Settings
    engine: AsyncEngine
    service: Service
    metrics: Metrics
    files: Files
    batches: Batches
    progress: Callable[[], tuple[int, int]]


def make_app(parts: Parts, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    app = FastAPI(title="JaxLamina", version=jaxlamina.__version__, lifespan=lifespan)
    app.add_middleware(
        Gate,
        api_key=parts.settings.api_key,
        max_body_bytes=parts.settings.max_body_bytes,
        why_not=lambda: _why_not(parts.engine),
    )
    _add_error_handlers(app)
    _add_completions(app, parts)
    _add_models(app, parts)
    _add_files(app, parts)
    _add_batches(app, parts)
    _add_status(app, parts)
    return app


def _why_not(engine: AsyncEngine) -> str | None:
    try:
        engine.check_ready()
    except Unavailable as error:
        return str(error)
    return None


# -- errors -----------------------------------------------------------------------------------------------------------


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        return response(of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return response(of_status(error.status_code, error.detail), dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        return response(ApiError(500, f"internal error ({type(error).__name__})", type="internal_error"))


# -- completions ------------------------------------------------------------------------------------------------------


class _EventResponse(StreamingResponse):
    """Ends its request also where the client went away before the first event was asked for."""

    def __init__(self, events: EventStream) -> None:
        super().__init__(
            events.__aiter__(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._events.close()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What ``work`` gives; it is cancelled, and `ClientDisconnect` raised, when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_completions(app: FastAPI, parts: Parts) -> None:
    async def answer(request: Request, body: Body) -> Response:
        if body.stream:
            return _EventResponse(await _unless_gone(request, parts.service.stream(body)))
        return JsonResponse(await _unless_gone(request, parts.service.whole(body)))

    @app.post("/v1/completions", response_model=CompletionResponse)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    @app.post("/v1/chat/completions", response_model=ChatCompletionResponse)
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        return await answer(request, body)

    @app.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        parts.service.check_model(body.model)
        tokens = await asyncio.to_thread(parts.service.prompts.tokenize, body)
        length = parts.service.prompts.max_model_len
        return JsonResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    @app.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest) -> Response:
        parts.service.check_model(body.model)
        return JsonResponse({"prompt": await asyncio.to_thread(parts.service.prompts.detokenize, body)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return JsonResponse(parts.service.prompts.tokenizer_info())


# -- models, files, batches -------------------------------------------------------------------------------------------


def _add_models(app: FastAPI, parts: Parts) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        length = parts.service.prompts.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "jaxlamina",
            "root": parts.service.names[0],
            "parent": None,
            "max_model_len": length,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card(name) for name in parts.service.names]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        parts.service.check_model(model)
        return JsonResponse(card(model))


def _add_files(app: FastAPI, parts: Parts) -> None:
    files = parts.files

    @app.post("/v1/files")
    async def upload(file: UploadFile, purpose: Annotated[str, Form()]) -> Response:
        return JsonResponse(await asyncio.to_thread(files.add, file.file, file.filename or "", purpose))

    @app.get("/v1/files")
    async def listed(purpose: str | None = None, limit: Page = 10_000, after: str | None = None) -> Response:
        found = [facts for facts in files.all() if purpose is None or facts["purpose"] == purpose]
        return JsonResponse(page(found, limit, after))

    @app.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        return JsonResponse(files.find(file_id))

    @app.get("/v1/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        files.find(file_id)
        return FileResponse(files.path(file_id), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete(file_id: str) -> Response:
        files.delete(file_id)
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})


def _add_batches(app: FastAPI, parts: Parts) -> None:
    @app.post("/v1/batches")
    async def create(body: BatchRequest) -> Response:
        return JsonResponse(parts.batches.create(body))

    @app.get("/v1/batches")
    async def listed(limit: Page = 20, after: str | None = None) -> Response:
        return JsonResponse(page(parts.batches.all(), limit, after))

    @app.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> Response:
        return JsonResponse(parts.batches.find(batch_id))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        return JsonResponse(parts.batches.cancel(batch_id))


# -- the server itself ------------------------------------------------------------------------------------------------


def _add_status(app: FastAPI, parts: Parts) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 once requests are taken; 503, with the reason, before that, while shutting down and after a failure."""
        reason = _why_not(parts.engine)
        if reason is None:
            return JsonResponse({"status": "ready"})
        found: dict[str, Any] = {"status": parts.engine.state, "reason": reason}
        if parts.engine.state == "starting":
            found["compiled"], found["of"] = parts.progress()
        return JsonResponse(found, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        try:
            numbers = await parts.engine.ask(snapshot, _METRICS_DEADLINE_S)
        except (TimeoutError, Unavailable):  # in a long step, or over: the numbers from before
            numbers = None
        return Response(parts.metrics.text(numbers), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": jaxlamina.__version__})
