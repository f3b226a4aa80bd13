"""Whether a process that says Hello may be a rank of the group; if not, the line that says why.

Plain functions of plain data; knows nothing of sockets, of seals or of who else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxlamina.job.control.messages import PROTOCOL, AnyHello, Hello, MessageError, decode
from jaxlamina.job.secret import SAME_SECRET

Config = Mapping[str, str | int | float | bool | None]


class Refusal(NamedTuple):
    """``told``: to whoever came, with no value of the configuration in it; ``known``: on rank 0."""

    told: str
    known: str


def why_no_rank(
    claimed: AnyHello, n_ranks: int, is_proven: bool, describe: Callable[[int], str]
) -> Refusal | None:
    """What is wrong with the protocol, the job or the rank that a Hello of any protocol claims, or None.
    ``is_proven``: whoever says it knows the job's secret."""
    if claimed.protocol != PROTOCOL:
        line = (
            f"rank {claimed.rank} speaks control protocol {claimed.protocol}, {describe(0)} speaks "
            f"{PROTOCOL}: install the same version of jaxlamina on all hosts"
        )
        return Refusal(line, line)
    if not is_proven:
        line = (
            f"a process that was started as rank {claimed.rank} is of another job than {describe(0)}, or has "
            f"another secret: {SAME_SECRET}"
        )
        return Refusal(line, line)
    if not 1 <= claimed.rank < n_ranks:
        start = f"a process was started as rank {claimed.rank}, "
        end = ": start as many processes as the DOP has ranks"
        return Refusal(
            f"{start}which is none of the group of {describe(0)}{end}",
            f"{start}but beside {describe(0)} this group has ranks 1 to {n_ranks - 1}{end}",
        )
    return None


def read_hello(body: bytes | bytearray, who: str) -> Hello | Refusal:
    """The Hello of `who`, or why it is none."""
    try:
        message = decode(body)
    except MessageError as error:
        line = f"{who} said what cannot be read: {error}: install the same version of jaxlamina on all hosts"
        return Refusal(line, line)
    if isinstance(message, Hello):
        return message
    line = f"{who} said {type(message).__name__} instead of Hello"
    return Refusal(line, line)


def first_difference(
    hello: Hello, config: Config, versions: Mapping[str, str], describe: Callable[[int], str]
) -> Refusal | None:
    """The first key of ``config``, then of ``versions``, that differs from rank 0's, with both values for
    rank 0; or None."""
    who, here = f"{describe(hello.rank)} on {hello.host}", describe(0)
    for what, end, theirs, ours in (
        ("was started with another configuration", "start all ranks with the same", hello.config, config),
        ("has another version", "install the same on all hosts", hello.versions, versions),
    ):
        for key, there, value in _differences(theirs, ours):
            return Refusal(
                f"{who} {what}: {key} is not the same on {here}, which has written both; {end}",
                f"{who} {what}: {key} is {there} there and {value} on {here}; {end}",
            )
    return None


def _differences(theirs: Mapping, ours: Mapping) -> list[tuple[str, str, str]]:
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return [
        (key, _show(theirs, key), _show(ours, key)) for key in keys if _show(theirs, key) != _show(ours, key)
    ]


def _show(values: Mapping, key: str) -> str:
    return repr(values[key]) if key in values else "not set"
