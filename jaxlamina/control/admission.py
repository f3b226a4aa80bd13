"""Whether a process that says Hello may be a rank of the group; if not, the line that says why.

Plain functions of plain data; knows nothing of sockets or of who else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxlamina.control.messages import PROTOCOL, AnyHello, Hello, MessageError, decode

Config = Mapping[str, str | int | float | bool | None]


def why_no_rank(claimed: AnyHello, n_ranks: int, describe: Callable[[int], str]) -> str | None:
    """What is wrong with the protocol or the rank that a Hello of any protocol claims, or None."""
    if claimed.protocol != PROTOCOL:
        return (
            f"rank {claimed.rank} speaks control protocol {claimed.protocol}, {describe(0)} speaks {PROTOCOL}: "
            "install the same version of jaxlamina on all hosts"
        )
    if not 1 <= claimed.rank < n_ranks:
        return (
            f"a process was started as rank {claimed.rank}, but beside {describe(0)} this group has ranks "
            f"1 to {n_ranks - 1}: start as many processes as the DOP has ranks"
        )
    return None


def read_hello(body: bytes | bytearray, who: str) -> Hello | str:
    """The Hello of `who`, or the line that says why it is none."""
    try:
        message = decode(body)
    except MessageError as error:
        return f"{who} said what cannot be read: {error}: install the same version of jaxlamina on all hosts"
    return message if isinstance(message, Hello) else f"{who} said {type(message).__name__} instead of Hello"


def first_difference(
    hello: Hello, config: Config, versions: Mapping[str, str], describe: Callable[[int], str]
) -> str | None:
    """The first key of ``config``, then of ``versions``, that differs from rank 0's, with both values; or None."""
    who, here = f"{describe(hello.rank)} on {hello.host}", describe(0)
    for key, theirs, ours in _differences(hello.config, config):
        return (
            f"{who} was started with another configuration: {key} is {theirs} there and {ours} on {here}; start all "
            "ranks with the same"
        )
    for key, theirs, ours in _differences(hello.versions, versions):
        return f"{who} has another version: {key} is {theirs} there and {ours} on {here}; install the same on all hosts"
    return None


def _differences(theirs: Mapping, ours: Mapping) -> list[tuple[str, str, str]]:
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return [
        (key, _show(theirs, key), _show(ours, key)) for key in keys if _show(theirs, key) != _show(ours, key)
    ]


def _show(values: Mapping, key: str) -> str:
    return repr(values[key]) if key in values else "not set"
