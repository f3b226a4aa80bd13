"""What operators ask of a supervised job: how it is, and changes of it.

Knows the job and its server's paths; what runs the job says (`SupervisedJob.command`). The names of its
questions are vLLM's and SGLang's (fault_tolerance: status, apply; pause, resume, update_weights).
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import msgspec

from jaxlamina.server.errors import ApiError, unavailable
from jaxlamina.supervisor.changes import Change, JobCommand
from jaxlamina.supervisor.child import GivenUp, NotChanged, Running, SupervisedJob
from jaxlamina.supervisor.job_client import NoAnswer, Said

_PASS_ON_S = 5.0  # for a job that takes requests
_SOON_S = 0.2
_changes = msgspec.json.Decoder(Change)


class Operating:
    """Of one job."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job

    def status(self) -> dict[str, Any]:
        job, workers = self._job, self._job.command.workers
        return {
            "status": job.state,
            "job": "one process" if workers is None else str(workers),
            "workers": None if workers is None else vars(workers),
            "starts": job.n_starts,
            "spare": job.spare_state,
            "recoveries": [{"cause": cause.kind, "reason": cause.text} for cause in job.causes[-20:]],
            "last_start_seconds": job.last_start_s,
        }

    async def pass_on(self, path: str, query: str, body: bytes) -> Said:
        """What the job says to one of `jaxlamina.server.gate.OPERATED`. What it changes, later starts of the
        job have, too: a pause, and other weights. `ApiError` where nobody says."""
        try:
            if path == "/update_weights":
                return await self._update_weights(path, query, body)
            running = await self._job.ready(_PASS_ON_S)
            asked = asyncio.ensure_future(running.client.ask("POST", path, query, body=body))
            try:
                await asyncio.wait([asked], timeout=_SOON_S)
                if not asked.done():  # a pause that waits for requests takes none meanwhile
                    with suppress(NoAnswer, ValueError, KeyError):
                        await self._note_pause(running)
                found = await asked
            finally:
                asked.cancel()
            await self._note_pause(running)
            return found
        except NotChanged as error:
            raise ApiError(409, str(error), code="not_changed") from None
        except GivenUp as error:
            raise unavailable(str(error)) from None
        except TimeoutError:
            raise unavailable("the job is being started again: try again later") from None
        except (NoAnswer, ValueError, KeyError):
            raise unavailable("the job ended while it answered; whether it was done is not known") from None

    async def _note_pause(self, running: Running) -> None:
        said = await running.client.ask("GET", "/is_paused", timeout_s=_PASS_ON_S)
        self._job.is_paused = bool(json.loads(said.content)["is_paused"])

    async def _update_weights(self, path: str, query: str, body: bytes) -> Said:
        found: Said | None = None

        async def ask(running: Running) -> JobCommand | None:
            nonlocal found
            found = await running.client.ask("POST", path, query, body=body)
            if found.status != 200:
                return None
            said = msgspec.json.decode(found.content)
            return self._job.command.of_weights(said["model"], said["revision"])

        await self._job.update(ask, _PASS_ON_S)
        assert found is not None
        return found

    async def apply(self, body: bytes) -> dict[str, Any]:
        """A `Change`, as JSON; returns once the changed job answers. `ApiError` where it does not, and what
        runs then, or that it is not known yet."""
        try:
            change = _changes.decode(body)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the body is no change: {error}") from None
        if (why := change.why_not()) is not None:
            raise ApiError(400, why)
        try:
            old = self._job.command
            new = old.after(change)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        why = "restarted, as asked" if new.workers == old.workers else f"scaled to {new.workers}"
        try:
            await self._job.change(new, why, stop_first=change.stop_first, deadline_s=change.timeout)
        except NotChanged as error:
            raise ApiError(409, str(error), code="not_changed") from None
        except GivenUp as error:
            raise unavailable(str(error)) from None
        except TimeoutError:
            reason = (
                f"the job was not ready within {change.timeout:g} s, and the change is still under way: "
                f"/v1/fault_tolerance/status says later what runs"
            )
            raise ApiError(503, reason, type="service_unavailable", code="still_changing") from None
        return self.status()
