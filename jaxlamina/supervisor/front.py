"""What clients of a supervised server see: completions that outlive the job, the requests by their keys, and
all else passed on to the job as it is.

Plain Starlette: what is asked and answered is checked and made by the job. Knows HTTP; how answers go on is
`requests`' affair.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from jaxlamina.process.memory_reserve import MemoryReserve
from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.server.dashboard import RECORD, STATE, WATCH
from jaxlamina.server.dashboard.page import page_routes
from jaxlamina.server.errors import ApiError, JsonResponse, of_status, response, unavailable
from jaxlamina.server.gate import OPERATED, Gate, check_may_operate
from jaxlamina.server.pieces import FOLLOWED, PATH
from jaxlamina.server.waiting import EndingStream, unless_gone
from jaxlamina.supervisor.child import GivenUp, SupervisedJob
from jaxlamina.supervisor.job_client import OF_JOB, JobAnswer, NoAnswer, NotReached
from jaxlamina.supervisor.journal import Journal
from jaxlamina.supervisor.operating import Operating
from jaxlamina.supervisor.requests import AGAIN_S, LEAST_TO_ACCEPT, FollowedRequest, FollowedRequests

_PASS_ON_S = 5.0  # for a job that takes requests
_DASHBOARD_S = 2.0  # longer than a job waits for the end of a step there
_OF_ONE_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "host",
    "date",
    "server",
    "te",
    "expect",
}
_NO_MEMORY = "the server's supervisor gets no more memory: try again later"
_STALLS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_log = logging.getLogger("uvicorn.error")


class Front:
    """`app` serves it. ``keys`` and ``max_body_bytes``: as of the server's settings. ``of_this_host``: nobody
    else reaches it."""

    def __init__(
        self,
        job: SupervisedJob,
        requests: FollowedRequests,
        journal: Journal,
        memory: MemoryReserve,
        operating: Operating,
        keys: ApiKeys,
        *,
        of_this_host: bool,
    ) -> None:
        self._operating, self._keys, self._of_this_host = operating, keys, of_this_host
        self._job, self._requests, self._journal, self._memory = job, requests, journal, memory
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry}
        self._recoveries = Counter(
            "jaxlamina:recoveries", "Starts of the job after it had ended, by why it had.", ["cause"], **made
        )
        self._stalls = Histogram(
            "jaxlamina:recovery_stall_seconds",
            "How long a stream stood still over a recovery.",
            buckets=_STALLS_S,
            **made,
        )
        self._recomputed = Counter(
            "jaxlamina:recomputed_tokens", "Tokens whose KV was computed again after a recovery.", **made
        )
        self._resumed = Counter(
            "jaxlamina:resumed_requests", "Requests that went on after a recovery.", **made
        )
        self._failures = Counter(
            "jaxlamina:journal_failures", "Commits that the journal did not take.", **made
        )
        self._last = Gauge(
            "jaxlamina:last_start_seconds", "From the job's last start until it was ready.", **made
        )

    def app(
        self,
        lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
        *,
        max_body_bytes: int,
        dashboard: bool,
    ) -> Starlette:
        gate = Middleware(Gate, keys=self._keys, max_body_bytes=max_body_bytes, why_not=self._why_not)
        every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        return Starlette(
            routes=[
                *(Route(path, self._complete, methods=["POST"]) for path in FOLLOWED),
                Route("/v1/requests/{key}", self._request),
                Route("/v1/requests/{key}/stream", self._stream),
                Route("/v1/fault_tolerance/status", self._status),
                Route("/v1/fault_tolerance/apply", self._apply, methods=["POST"]),
                *(Route(path, self._operate, methods=["POST"]) for path in OPERATED),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/metrics", self._metrics),
                *(self._of_dashboard() if dashboard else ()),
                Route("/{path:path}", self._pass_on, methods=every),
            ],
            middleware=[gate],
            exception_handlers={
                ApiError: lambda _, error: response(error),
                MemoryError: lambda _, error: response(unavailable(_NO_MEMORY)),
                ClientDisconnect: lambda _, error: Response(status_code=499),
                404: lambda _, error: response(of_status(404, error.detail)),
                413: lambda _, error: response(of_status(413, error.detail)),
            },  # type: ignore[dict-item]
            lifespan=lifespan,
        )

    def _why_not(self) -> str | None:
        """Why no request is taken; while the job recovers they are, and wait."""
        if self._job.given_up:
            return self._job.given_up
        if self._job.ends():
            return "the server is shutting down"
        if not self._memory.has(LEAST_TO_ACCEPT):
            return _NO_MEMORY
        return None if self._job.was_ready else "the job has not been ready yet: try again later"

    async def _complete(self, request: Request) -> Response:
        answer = await self._requests.accept(request.scope["path"], await request.body())
        try:
            await unless_gone(request, answer.begun())
            if answer.is_stream:
                abandon = partial(self._requests.abandon, answer)
                kind = "text/event-stream"
                return EndingStream(self._sent(answer), abandon, media_type=kind, headers=_named(answer))
            await unless_gone(request, answer.over())
        except BaseException:
            self._requests.abandon(answer)
            raise
        return _whole(answer)

    @staticmethod
    async def _sent(answer: FollowedRequest) -> AsyncIterator[str]:
        async for _, event in answer.events_from(0):
            yield event

    async def _request(self, request: Request) -> Response:
        answer = self._found(request)
        entry = answer.entry
        found: dict[str, Any] = {
            "id": answer.key, "object": "request", "status": answer.state, "created": entry.created,
            "path": entry.path, "n_events": len(answer.events),
            "n_tokens": answer.n_tokens,
        }  # fmt: skip
        if answer.status and not answer.is_stream:
            found["response"] = json.loads(answer.content)
        return JsonResponse(found)

    async def _stream(self, request: Request) -> Response:
        """Events after those that ``from``, or `Last-Event-ID`, says; of an answer in one piece, that."""
        answer = self._found(request)
        asked = request.query_params.get("from", request.headers.get("last-event-id", "0"))
        if not all(word.isdecimal() for word in asked.split(",")):
            reason = f"from={asked!r:.40} must be how many events there were already; of several choices"
            raise ApiError(400, f"{reason} how many of each, as 12,11", param="from")
        had = [int(word) for word in asked.split(",")]
        self._requests.reads(answer)
        over = partial(self._requests.reads_no_more, answer)
        try:
            await unless_gone(request, answer.begun())
            if answer.is_stream:
                events = _events_after(answer, had)
                return EndingStream(events, over, media_type="text/event-stream", headers=_named(answer))
            await unless_gone(request, answer.over())
        except BaseException:
            over()
            raise
        over()
        return _whole(answer)

    def _found(self, request: Request) -> FollowedRequest:
        key = request.path_params["key"]
        answer = self._requests.find(key)
        if answer is None and self._requests.is_to_come(key):
            raise unavailable("the request goes on once the job is ready: ask again later")
        if answer is None:
            raise ApiError(
                404, f"there is no request {key!r:.80}, or it ended long ago", type="not_found_error"
            )
        return answer

    async def _status(self, _: Request) -> Response:
        return JsonResponse(self._operating.status())

    def _check_may_operate(self, request: Request) -> None:
        check_may_operate(request, self._keys, by_socket=self._of_this_host)

    async def _apply(self, request: Request) -> Response:
        """Without a key, of this host alone: it makes everybody wait."""
        self._check_may_operate(request)
        return JsonResponse(await self._operating.apply(await request.body()))

    async def _operate(self, request: Request) -> Response:
        self._check_may_operate(request)
        asked = *_asked(request), await request.body()
        found = await self._operating.pass_on(*asked)
        return Response(found.content, found.status, media_type="application/json")

    async def _health(self, _: Request) -> Response:
        job = self._job
        if job.state == "ready":
            paused = {"paused": True} if job.is_paused else {}
            return JsonResponse({"status": "ready", "recoveries": len(job.causes)} | paused)
        reason = job.given_up or job.why_not_ready
        found = {"status": job.state, "reason": reason, "recoveries": len(job.causes)}
        return JsonResponse(found, 503)

    async def _metrics(self, request: Request) -> Response:
        try:
            running = await self._job.ready(_PASS_ON_S)
            of_job = (await running.client.ask("GET", "/metrics", timeout_s=2 * _PASS_ON_S)).content
        except (TimeoutError, GivenUp, NoAnswer):
            of_job = b""
        return Response(of_job + self._own_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _of_dashboard(self) -> list[Route]:
        return [
            *page_routes(),
            Route(STATE, self._dashboard_state),
            *(Route(path, self._pass_on_operating, methods=["POST"]) for path in (RECORD, WATCH)),
        ]

    async def _dashboard_state(self, request: Request) -> Response:
        """The job's, where it answers, and ``supervisor``: how the job is (`Operating.status`)."""
        try:
            running = await self._job.ready(_DASHBOARD_S)
            of_job = await running.client.ask("GET", *_asked(request), timeout_s=_DASHBOARD_S)
            if of_job.status != 200:
                return Response(of_job.content, of_job.status, media_type="application/json")
            found: dict[str, Any] = json.loads(of_job.content)
        except (TimeoutError, GivenUp, NoAnswer, ValueError):
            found = {"now": time.time()}
        found["supervisor"] = self._operating.status()
        return JsonResponse(found, headers={"Cache-Control": "no-store"})

    async def _pass_on_operating(self, request: Request) -> Response:
        self._check_may_operate(request)
        return await self._pass_on(request)

    def _own_metrics(self) -> bytes:
        job, requests = self._job, self._requests
        for cause in job.causes[self._n_counted(self._recoveries) :]:
            self._recoveries.labels(cause=cause.kind).inc()
        while requests.stalls_s:
            self._stalls.observe(requests.stalls_s.pop())
        for counter, n in (
            (self._recomputed, requests.n_recomputed_tokens),
            (self._resumed, requests.n_resumed),
            (self._failures, self._journal.n_failures),
        ):
            counter.inc(n - self._n_counted(counter))
        self._last.set(job.last_start_s)
        return generate_latest(self._registry)

    @staticmethod
    def _n_counted(counter: Counter) -> int:
        [family] = counter.collect()
        return int(sum(sample.value for sample in family.samples if sample.name.endswith("_total")))

    async def _pass_on(self, request: Request) -> Response:
        """To the job, as it is."""
        if request.scope["path"].startswith(PATH):
            raise ApiError(404, "there is no such route", type="not_found_error")
        try:
            answer = await self._of_job(request)
        except TimeoutError:
            raise unavailable("the job is being started again: try again later") from None
        except GivenUp as error:
            raise unavailable(str(error)) from None
        kept = {name: v for k, v in answer.headers.items() if (name := k.lower()) not in _OF_ONE_HOP}
        if (length := answer.headers.get("content-length")) is not None:
            kept["content-length"] = length
        if (where := answer.headers.get("location")) is not None:
            kept["location"] = where.removeprefix(OF_JOB)
        return _PassedOn(answer.parts(), answer.close, status_code=answer.status, headers=kept)

    async def _of_job(self, request: Request) -> JobAnswer:
        """A job that is about to end, or loses a connection, is asked again. What breaks off is not, where it
        may have been done. `TimeoutError`, `GivenUp`."""
        headers = [(k, v) for k, v in _texts(request.headers.raw) if k not in _OF_ONE_HOP]
        only_asks = request.method in ("GET", "HEAD", "OPTIONS")
        body = None if only_asks else request.stream()
        until = time.monotonic() + _PASS_ON_S
        running = await self._job.ready(_PASS_ON_S)
        while True:
            try:
                return await running.client.open(request.method, *_asked(request), body=body, headers=headers)
            except NoAnswer as error:
                if (of_client := _of_client(error)) is not None:
                    raise of_client from None
                if not (only_asks or isinstance(error, NotReached)):
                    reason = "the job ended while it answered; whether it was done is not known"
                    raise unavailable(reason) from None
            with suppress(TimeoutError):  # it may be the same job, and well
                running = await self._job.ready(AGAIN_S, after=running.n)
            if time.monotonic() >= until:
                raise TimeoutError


class _PassedOn(EndingStream):
    """Where its parts break off it has no end, so that the client's connection is closed."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except NoAnswer as error:
            _log.warning("an answer that was passed on broke off: %s", error)


def _asked(request: Request) -> tuple[str, str]:
    """Path and query, as the gate and the routes have seen them: `Request.url` is made of the Host header,
    too."""
    return request.scope["path"], request.scope["query_string"].decode("latin-1")


def _of_client(error: BaseException | None) -> HTTPException | ClientDisconnect | None:
    """What a request's body ended with before its end, where ``error`` is because of that."""
    while error is not None and not isinstance(error, HTTPException | ClientDisconnect):
        error = error.__cause__
    return error


def _texts(headers: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """They go on as UTF-8. Bytes that are none are replaced: no header means anything by them."""
    for name, value in headers:
        yield name.decode("latin-1"), value.decode("utf-8", "replace")


class _Choice(msgspec.Struct):
    index: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


def _choice_of(event: str) -> int | None:
    """Whose it is; None: of all, as usage and the stream's end."""
    try:
        choices = msgspec.json.decode(event.removeprefix("data: "), type=_Chunk).choices
    except msgspec.MsgspecError:
        return None
    return choices[0].index if choices else None


def _events_after(answer: FollowedRequest, had: Sequence[int]) -> AsyncIterator[str]:
    """A stream's events but those that a client ``had``, in all or of each choice, with ids. `ApiError`."""
    n = answer.n_choices
    if len(had) not in (1, n) or (n > 1 and answer.is_of_before and len(had) == 1 and had[0]):
        # Choices' events come among each other otherwise in another process.
        example = ",".join(["12"] * min(n, 3) + ["…"] * (n > 3))
        reason = f"the answer has {n} choices: say how many events there were of each, as from={example}"
        raise ApiError(400, reason, param="from")
    if n > 1 and list(had) == [0]:
        had = [0] * n
    return _after_each(answer, had) if len(had) > 1 else _after(answer, had[0])


async def _after(answer: FollowedRequest, n: int) -> AsyncIterator[str]:
    """A stream's events after the first ``n``, each with how many there are with it as its id."""
    async for at, event in answer.events_from(n):
        yield f"id: {at}\n{event}"


async def _after_each(answer: FollowedRequest, had: Sequence[int]) -> AsyncIterator[str]:
    """The same of several choices: events after the first ``had`` of each, and those of no choice."""
    n = [0] * len(had)
    async for _, event in answer.events_from(0):
        choice = _choice_of(event)
        if choice is not None:
            n[choice] += 1
        if choice is None or n[choice] > had[choice]:
            yield f"id: {','.join(str(max(*x)) for x in zip(n, had, strict=True))}\n{event}"


def _named(answer: FollowedRequest) -> dict[str, str]:
    return {"x-request-id": answer.key, "cache-control": "no-cache"}


def _whole(answer: FollowedRequest) -> Response:
    headers = _named(answer) | {"content-type": "application/json"} | answer.headers
    return Response(answer.content, answer.status, headers)
