"""Who goes first among requests that wait, and who gives way first among those that run.

Policy on plain data: a request gets a rank. What follows from ranks is the scheduler's business; a policy
knows no slots, no clock and no device.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from jaxlamina.errors import UserError
from jaxlamina.options import POLICY_NAMES, check_policy_name
from jaxlamina.process.user_code import current_folder

if TYPE_CHECKING:
    from jaxlamina.engine.request import Request


class Policy(Protocol):
    """The order of requests: the lowest rank is admitted first, the greatest gives way first when slots run
    out.

    Of equal ranks whoever's turn it is goes first (`Turns`), then whoever came first. ``preemptive``: running
    requests of a greater rank give way to a waiting one, even while there is room for those that run. One
    that never looks at a request's ``priority`` may say so by a true ``ignores_priority``: a server then
    refuses requests that have one.
    """

    preemptive: bool

    def rank(self, request: Request) -> Any:
        """Anything that can be compared with the other ranks. It must stay the same while a request waits,
        and be the same for sequences in lockstep."""
        ...


class Fifo:
    """First come, first served: the oldest always finish, and nobody starves."""

    preemptive = False
    ignores_priority = True

    def rank(self, request: Request) -> int:
        return 0


class Priority:
    """Lower ``priority`` first, as vLLM's policy of this name. Who runs is left alone while there is room;
    what has a high number starves for as long as lower ones come fast enough to fill the pool."""

    preemptive = False

    def rank(self, request: Request) -> int:
        return request.priority


class ChatFirst:
    """Chats (``priority`` 0, the default, or below) before batch work (above 0), each first come, first
    served.

    FineInfer (§3.2, §3.3) queues chats before batches, so that an answer somebody waits for is not held up by
    them. It bounds what batch work may have to wait by nothing but that a user has one chat under way at a
    time; nor is there a bound here. Here batch work also gives its slots and rows to chats that wait; its
    tokens are kept.
    """

    preemptive = True

    def rank(self, request: Request) -> bool:
        return request.priority > 0


class ShortestRemaining:
    """Fewest tokens left to write first, by ``max_tokens``: the mean wait is short, and long requests starve
    for as long as short ones come fast enough to fill the pool."""

    preemptive = False
    ignores_priority = True

    def rank(self, request: Request) -> int:
        return request.n_tokens_left


class Turns:
    """Whose turn it is among callers: one caller's many requests let the others' in between.

    A request's turn is one after that of its caller's request before it, and at least one after the latest
    turn that came; the lowest goes first. So callers who wait are served in rounds, a request each, and one
    that comes anew is in the coming round (start-time fair queueing, Goyal et al. 1996, all requests counted
    alike). Nobody starves: a turn stays the same while a request waits, and later ones are higher than every
    turn that has come. A request without a caller has turn 0.
    """

    def __init__(self) -> None:
        self._now = 0  # the latest turn that came
        self._last: dict[Hashable, int] = {}  # turns that callers have taken and that have not come

    def take(self, caller: Hashable | None) -> int:
        if caller is None:
            return 0
        turn = 1 + max(self._now, self._last.get(caller, 0))
        self._last[caller] = turn
        return turn

    def came(self, turn: int) -> None:
        """A request of this turn is served."""
        if turn > self._now:
            self._now = turn
            self._last = {caller: last for caller, last in self._last.items() if last > turn}


POLICIES: dict[str, type[Policy]] = dict(
    zip(POLICY_NAMES, (Fifo, Fifo, Priority, ChatFirst, ShortestRemaining), strict=True)
)
BATCH_PRIORITY = 1  # of a batch's line that says none: above 0, which is a chat's


def load_policy(name: str) -> Policy:
    """The policy of this name, or an instance of the class "package.module:Class", which may be in the
    current folder.

    ``UserError`` if there is none, it cannot be imported or made, or it is not a `Policy`.
    """
    if name in POLICIES:
        return POLICIES[name]()
    check_policy_name(name)
    where = f"scheduling_policy={name!r}"
    module, _, cls = name.partition(":")
    try:
        with current_folder():
            policy = getattr(importlib.import_module(module), cls)()
    except Exception as error:  # whatever the user's own code raises
        raise UserError(
            f"{where} cannot be loaded ({type(error).__name__}: {error}): check it; modules are looked for "
            "in PYTHONPATH, among what is installed, and in the current folder"
        ) from error
    _check(where, policy)
    found: Policy = policy
    return found


def _check(where: str, policy: Any) -> None:
    from jaxlamina.engine.request import Request  # loads numpy, which the names alone do not need

    if not isinstance(getattr(policy, "preemptive", None), bool):
        raise UserError(f"{where} has no attribute preemptive, True or False: add it")
    try:
        bool(policy.rank(Request("one", (0,), 1)) < policy.rank(Request("another", (0,), 1)))
    except Exception as error:
        raise UserError(
            f"{where} gives no rank that can be compared ({type(error).__name__}: {error}): give it "
            "rank(self, request), returning a number or a tuple of numbers"
        ) from error
