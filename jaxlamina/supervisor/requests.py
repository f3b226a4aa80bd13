"""A request through all the processes that work at it: what it wrote, what its client has had, and how it
goes on.

An answer is asked for anew of each start of the job, with the tokens that it has. The job repeats them, and
what has gone out already does not go out again; a repeated token that is another one ends the request with an
error, as its text would be another's. Knows the job's server and the journal; nothing of HTTP on the client's
side.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import msgspec

from jaxlamina.process.memory_reserve import MemoryReserve
from jaxlamina.server.errors import ApiError, JsonResponse, unavailable
from jaxlamina.server.pieces import PATH, Follow, Piece
from jaxlamina.server.settings import MOST_TRIES
from jaxlamina.supervisor.child import GivenUp, Running, SupervisedJob
from jaxlamina.supervisor.job_client import JobAnswer, NoAnswer, NotReached
from jaxlamina.supervisor.journal import KEEP_S, Entry, Journal
from jaxlamina.supervisor.unwritten import Of

_SUSPECT = 2
"""Times (as of `MOST_TRIES`) from which a request is asked for alone, so that it takes no others with it."""
_ALONE_S, _LOOK_S = 60.0, 1.0  # that it waits for the others at most, once a job is ready
LEAST_TO_ACCEPT = 0.5
"""Of the memory's reserve: with less, what is left is for requests that are there already."""
_MOST_KEPT_BYTES = 64 * 2**20  # of answers that have ended
_EVENT_BYTES = 64  # of a Python string, beside its letters
_TOKEN_BYTES, _REQUEST_BYTES = 40, 3000  # of a number in a list, and of all that holds a request together
_KEPT_OF_A_REFUSAL = ("content-type", "retry-after")  # its headers
AGAIN_S = 0.2  # after a connection that broke alone
_pieces = msgspec.json.Decoder(Piece)
_log = logging.getLogger("uvicorn.error")


class _Gone(Exception):
    """The job went away before the answer's end."""


class _NotTaken(_Gone):
    """And had not begun it, or has no room for it now."""


@dataclass(eq=False)
class FollowedRequest:
    """``events``: of a stream, as they went out; ``status`` and ``content``: of its end, where it has come.
    ``is_stream``: None until a job has accepted it."""

    entry: Entry
    is_of_before: bool = False  # an earlier supervisor accepted it, and may have given it some events
    events: list[str] = field(default_factory=list)
    is_stream: bool | None = None
    n_choices: int = 1
    status: int = 0
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    tokens: defaultdict[Of, list[int]] = field(default_factory=lambda: defaultdict(list))
    n_given: Counter[Of] = field(default_factory=Counter)  # tokens whose text has gone out, the first ones
    is_open: bool = False  # what comes before the first token has gone out
    n_cached: dict[int, int] = field(default_factory=dict)  # by prompt, when it was first computed
    to_compute: dict[Of, int] = field(default_factory=dict)  # tokens of what goes on, not begun yet
    ended_at: float = 0.0
    n_bytes: int = 0  # that it takes once it has ended
    n_readers: int = 0  # clients that have asked for it by its key, and read
    is_left: bool = False  # who sent it has gone, while others read
    last_token_at: float = 0.0
    waits_since: float = 0.0  # its job went away
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        return self.entry.key

    @property
    def state(self) -> str:
        if self.status:
            return "finished" if self.status == 200 else "failed"
        return "running" if self.is_open else "waiting"

    @property
    def error(self) -> tuple[int, bytes] | None:
        """As of `Entry`: the request's own, and not that there was no job for it."""
        return (self.status, self.content) if self.status not in (0, 200, 503) else None

    @property
    def was_taken(self) -> bool:
        """Whether a job has accepted it, this one's or an earlier supervisor's."""
        return self.is_stream is not None or self.is_of_before

    @property
    def n_tokens(self) -> int:
        """That it has got."""
        return sum(map(len, self.tokens.values()))

    def note(self) -> None:
        """Wakes whoever waits for more of it."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def begun(self) -> None:
        """Waits until it is accepted, or has ended."""
        while self.is_stream is None and not self.status:
            await self.changed.wait()

    async def over(self) -> None:
        while not self.status:
            await self.changed.wait()

    async def events_from(self, n: int) -> AsyncIterator[tuple[int, str]]:
        """Its events after the first ``n``, each with how many there are with it, until its end."""
        while True:
            while n < len(self.events):
                n += 1
                yield n, self.events[n - 1]
            if self.status:
                return
            await self.changed.wait()

    def end(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.status, self.content, self.headers = status, content, headers or {}
        of_events = sum(map(len, self.events)) + _EVENT_BYTES * len(self.events)
        of_tokens = _TOKEN_BYTES * self.n_tokens + _REQUEST_BYTES
        self.n_bytes = len(content) + len(self.entry.body) + of_events + of_tokens
        self.ended_at = time.monotonic()
        self.note()

    def refuse(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        """Ends it with an error, JSON ``content``: as a stream's last event, where events have gone out."""
        if self.is_open and self.is_stream:
            is_typed = self.entry.path.endswith("/responses")
            kind = "event: error\n" if is_typed else ""
            self.events.append(f"{kind}data: {content.decode('utf-8', 'replace')}\n\n")
            self.events += [] if is_typed else ["data: [DONE]\n\n"]
        self.end(status, content, headers)

    def fail(self, error: ApiError) -> None:
        """Where no job has said how."""
        self.refuse(error.status, bytes(JsonResponse(error.body()).body))


class FollowedRequests:
    """All requests of a supervisor. ``recovery_s``: how long a request waits for a job that takes it."""

    def __init__(
        self, job: SupervisedJob, journal: Journal, memory: MemoryReserve, *, recovery_s: float
    ) -> None:
        self._job, self._journal, self._recovery_s = job, journal, recovery_s
        self._memory = memory
        self._all: dict[str, FollowedRequest] = {}
        # Their job went away, they have no token since, and it need not be because of them.
        self._waiting: set[FollowedRequest] = set()
        self._tried: FollowedRequest | None = None  # a suspect that the job works at
        self._turns = asyncio.Event()  # set where a suspect may be asked for
        self._ended: deque[FollowedRequest] = deque()  # as they ended, and
        self._ended_bytes = 0  # what they take
        # Of an earlier supervisor.
        self._before, self._model_before = list(journal.entries()), journal.model()
        self._ended_before: dict[str, Entry] = {}
        self.stalls_s: list[float] = []  # from one token to the next, over a recovery; not read yet
        self.n_recomputed_tokens = 0
        self.n_resumed = 0

    def take_up(self, model: str) -> tuple[int, int]:
        """What an earlier supervisor has left goes on, if it is of the same ``model``: how many requests do,
        and how many do not."""
        entries, self._before = self._before, []
        left = [entry for entry in entries if not entry.has_ended]
        self._journal.be_of(model)
        if self._model_before in (model, None):
            self._ended_before = {entry.key: entry for entry in entries if entry.has_ended}
            asyncio.get_running_loop().call_later(KEEP_S, self._forget_before)
            for entry in left:
                self._waiting.add(self._begin(entry, is_of_before=True))
            return len(left), 0
        for entry in entries:
            request = self._all[entry.key] = FollowedRequest(entry)
            reason = (
                "the server has another model now than the one that worked at this request: send it again"
            )
            request.fail(ApiError(410, reason, code="other_model"))
            self._has_ended(request)
            self._journal.ended(entry.key, request.error)
        return 0, len(left)

    async def accept(self, path: str, body: bytes) -> FollowedRequest:
        """A new request, once it is in the journal."""
        entry = Entry(secrets.token_hex(16), path, body, int(time.time()), secrets.randbits(62))
        await self._journal.accept(entry)
        return self._begin(entry)

    def find(self, key: str) -> FollowedRequest | None:
        """One that runs or has ended lately; an answer that an earlier supervisor has seen ended is made
        again of its tokens, an error is what it was."""
        if (entry := self._ended_before.pop(key, None)) is not None:
            if entry.error is None:
                return self._begin(entry, is_of_before=True)
            request = self._all[key] = FollowedRequest(entry, is_of_before=True)
            request.end(*entry.error)
            self._has_ended(request)
        return self._all.get(key)

    def _forget_before(self) -> None:
        """Those that had ended before this supervisor began, and that nobody has asked for."""
        for key in self._ended_before:
            self._journal.forget(key)
        self._ended_before = {}

    def is_to_come(self, key: str) -> bool:
        """Whether it is one of an earlier supervisor, which goes on once a job is ready."""
        return any(entry.key == key for entry in self._before)

    def reads(self, request: FollowedRequest) -> None:
        """A client reads it by its key: until `reads_no_more` it is not ended because who sent it has gone.
        They may be one."""
        request.n_readers += 1

    def reads_no_more(self, request: FollowedRequest) -> None:
        request.n_readers -= 1
        if request.is_left:
            self.abandon(request)

    def abandon(self, request: FollowedRequest) -> None:
        """Who sent it has gone; or without memory the connection may have: then it can be asked for. It
        goes on while others read it."""
        if request.status or self._job.ends() or not self._memory.has(LEAST_TO_ACCEPT):
            return
        request.is_left = True
        if request.n_readers:
            return
        if request.task is not None:
            request.task.cancel()
        self._all.pop(request.key, None)
        self._waits_no_more(request)
        self._journal.forget(request.key)
        request.fail(ApiError(410, "who sent this request went away before it was finished", code="gone"))

    async def settle(self) -> None:
        """Waits until nothing is open."""
        while tasks := [a.task for a in self._all.values() if a.task is not None and not a.task.done()]:
            await asyncio.wait(tasks)

    def _begin(self, entry: Entry, *, is_of_before: bool = False) -> FollowedRequest:
        request = FollowedRequest(entry, is_of_before)
        for of, tokens in entry.wrote.items():
            request.tokens[of] = list(tokens)
        request.n_cached = dict(entry.n_cached)
        self._all[entry.key] = request
        request.task = asyncio.create_task(self._answer(request))
        self._forget_old()
        return request

    def _has_ended(self, request: FollowedRequest) -> None:
        self._ended.append(request)
        self._ended_bytes += request.n_bytes

    def _forget_old(self) -> None:
        late = time.monotonic() - KEEP_S
        while self._ended and (self._ended[0].ended_at <= late or self._ended_bytes >= _MOST_KEPT_BYTES):
            request = self._ended.popleft()
            self._ended_bytes -= request.n_bytes
            self._all.pop(request.key, None)
            self._journal.forget(request.key)

    async def _answer(self, request: FollowedRequest) -> None:
        n_tries, n_tokens = 0, request.n_tokens
        try:
            while not request.status:
                if n_tries >= _SUSPECT:
                    await self._turn(request)
                running = await self._job.ready(self._recovery_s)
                try:
                    await self._ask(running, request)
                except (_Gone, NoAnswer, OSError, MemoryError) as error:
                    now = time.monotonic()
                    is_news = not request.waits_since
                    request.waits_since = request.waits_since or now
                    self._waits_no_more(request)
                    self._waiting.add(request)
                    if request.n_tokens > n_tokens:  # so it is not this one that the job dies of
                        n_tries, n_tokens = 0, request.n_tokens
                    not_begun = isinstance(error, _NotTaken | NotReached)
                    # One that is ended on purpose, or may not give any token, died of nobody.
                    is_wanted = running.n in self._job.planned or self._job.is_paused
                    n_tries += not (not_begun or is_wanted)
                    if not_begun and now - request.waits_since > self._recovery_s:
                        raise TimeoutError from error
                    if self._job.ends():
                        request.fail(unavailable("the server has shut down before this request was finished"))
                    elif n_tries >= MOST_TRIES:
                        reason = (
                            f"the job went away {MOST_TRIES} times while it worked at this request, and "
                            f"found it no token"
                        )
                        request.fail(ApiError(500, reason, type="internal_error", code="job_ended"))
                    else:
                        if is_news or not not_begun:  # it asks one that has failed until that has ended
                            _log.info("request %s waits: %s", request.key, error or type(error).__name__)
                        with suppress(TimeoutError):  # a later start; or the same, if that is well
                            await self._job.ready(AGAIN_S, after=running.n)
        except GivenUp as error:
            request.fail(unavailable(str(error)))
        except TimeoutError:
            reason = f"the job did not take requests again within {self._recovery_s:g} s"
            request.fail(unavailable(reason))
        except Exception as error:  # noqa: BLE001 (a fault of ours is this request's alone)
            _log.error("request %s failed", request.key, exc_info=error)
            request.fail(ApiError(500, f"internal error ({type(error).__name__})", type="internal_error"))
        self._waits_no_more(request)
        self._has_ended(request)
        self._journal.ended(request.key, request.error)
        if request.was_taken and request.error is not None:
            said = request.content.decode("utf-8", "replace")
            _log.warning(
                "request %s, which was accepted, ended with %d: %.300s", request.key, request.status, said
            )

    async def _turn(self, request: FollowedRequest) -> None:
        """Waits until the others have tokens again, and no other suspect is without. Some may wait for room
        in the job, so it goes on a minute after that is ready."""
        self._waits_no_more(request)
        n, until = 0, 0.0
        while self._tried or self._waiting:
            running = await self._job.ready(self._recovery_s)
            if running.n != n:  # a start of its own
                n, until = running.n, time.monotonic() + _ALONE_S
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            self._turns.clear()
            with suppress(TimeoutError):
                # and now and then whether there is another start
                await asyncio.wait_for(self._turns.wait(), min(left_s, _LOOK_S))
        self._tried = request

    def _waits_no_more(self, request: FollowedRequest) -> None:
        self._waiting.discard(request)
        if self._tried is request:
            self._tried = None
        if not self._waiting and self._tried is None:
            self._turns.set()

    async def _ask(self, running: Running, request: FollowedRequest) -> None:
        """Follows the answer to its end in one start of the job."""
        entry = request.entry
        follow = Follow(
            entry.key,
            entry.created,
            entry.seed,
            tuple((*of, tuple(ids)) for of, ids in request.tokens.items()),
            tuple((*of, n) for of, n in request.n_given.items()),
            tuple(request.n_cached.items()),
            len(self._waiting) if request in self._waiting else 0,
            request.was_taken,
        )
        content = msgspec.json.encode(follow) + b"\n" + entry.body
        headers = {"content-type": "application/json"}
        answer = await running.client.open("POST", PATH + entry.path, body=content, headers=headers)
        with closing(answer):
            if answer.status != 200:
                said = await answer.read()
                if answer.status == 503 or (answer.status == 429 and request.was_taken):
                    raise _NotTaken("it takes no requests")
                kept = {k: v for k, v in answer.headers.items() if k.lower() in _KEPT_OF_A_REFUSAL}
                request.refuse(answer.status, said, kept)
                return
            async for line in _lines(answer):
                if self._take(request, _pieces.decode(line)):
                    return
        raise _Gone("its answer broke off")

    def _take(self, request: FollowedRequest, piece: Piece) -> bool:
        """Whether the answer has ended with it."""
        if piece.gone is not None:
            raise _Gone(piece.gone)
        if piece.opening is not None:
            self._opened(request, piece)
        elif piece.of is not None:
            return not self._token(request, piece)
        elif piece.status:
            self._give(request, piece.text)
            request.end(piece.status, piece.answer.encode("ascii"))
            return True
        return False

    def _opened(self, request: FollowedRequest, piece: Piece) -> None:
        assert piece.opening is not None
        request.is_stream, request.n_choices = piece.opening.is_stream, piece.opening.n_choices
        if not request.is_open:
            self._give(request, piece.text)  # first, as in `_token`
            request.is_open = True
        if request.waits_since or request.tokens:
            self.n_resumed += 1
            n_prompt = piece.opening.n_prompt_tokens
            first = ((which, 0) for which in range(len(n_prompt)))
            request.to_compute = {
                of: n_prompt[of[0]] + len(request.tokens.get(of, ())) for of in {*first, *request.tokens}
            }
        request.note()

    def _token(self, request: FollowedRequest, piece: Piece) -> bool:
        """Whether the answer can go on after it."""
        assert piece.of is not None and piece.token is not None
        of, at = piece.of, piece.at
        tokens = request.tokens[of]
        if at < len(tokens) and tokens[at] != piece.token:
            if request.is_stream or request.entry.has_ended:  # somebody may have had it
                reason = f"token {at} came out otherwise after a recovery, so the text cannot go on"
                request.fail(ApiError(500, reason, type="internal_error", code="not_repeated"))
                return False
            del tokens[at:]
            self._journal.cut(request.key, of, tokens)
        if piece.n_found is not None:
            self._began(request, of, piece.n_found)
        if at == len(tokens):
            tokens.append(piece.token)
            self._journal.wrote(request.key, of, piece.token)
            self._stood_still(request)
        if at >= request.n_given[of]:
            self._give(request, piece.text)  # first: without memory for it, it is given when it is repeated
            request.n_given[of] += 1
            request.note()
        return True

    def _began(self, request: FollowedRequest, of: Of, n_found: int) -> None:
        which, index = of
        if not index and which not in request.n_cached:
            request.n_cached[which] = n_found
            self._journal.cached(request.key, which, n_found)
        self.n_recomputed_tokens += max(0, request.to_compute.pop(of, 0) - n_found)

    def _stood_still(self, request: FollowedRequest) -> None:
        now = time.monotonic()
        self._waits_no_more(request)
        if request.waits_since:
            self.stalls_s.append(now - (request.last_token_at or request.waits_since))
            request.waits_since = 0.0
        request.last_token_at = now

    @staticmethod
    def _give(request: FollowedRequest, text: str) -> None:
        if text:
            request.events += [event + "\n\n" for event in text.split("\n\n")[:-1]]


async def _lines(answer: JobAnswer) -> AsyncIterator[bytes]:
    begun: list[bytes] = []  # of one line
    async for part in answer.parts():
        of_it, *others = part.split(b"\n")
        begun.append(of_it)
        for other in others:
            yield b"".join(begun)
            begun = [other]
