"""How far a program's exchanges have come, from how many messages went each way, and which layer and batch
that is.

Pure text and numbers. What is counted is what goes by memory (`mailbox`); a collective or a call of MPI
leaves no mark on the host, and is known to be over only by what comes after it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports import Program
from jaxlamina.transports.exchanges import in_order
from jaxlamina.transports.scopes import Scope, by_stretch

Way = tuple[str, int]
"""(op, peer), as of an `Exchange`: "put" or "take"."""
Counts = Mapping[Way, int]

_KEPT = 64  # launches; an engine is two ahead at most


class _Launch(NamedTuple):
    program: Program
    before: Counts  # messages of all programs launched before it


class Launches:
    """The programs that were launched last, in the order in which the device runs them."""

    def __init__(self) -> None:
        self._total: Counter[Way] = Counter()
        self._last: deque[_Launch] = deque(maxlen=_KEPT)

    def add(self, program: Program, messages: Counts) -> None:
        """``messages``: `messages_of` its exchanges."""
        self._last.append(_Launch(program, self._total.copy()))
        self._total.update(messages)

    def where(self, counts: Counts, rank: int) -> str:
        """How far the device is, by the messages that it has put and taken so far (32 bits, which may have
        wrapped); "" if all is done."""
        for program, before in tuple(self._last):
            exchanges = program.exchanges()
            n = n_done(exchanges, {way: _ahead(counts.get(way, 0), before.get(way, 0)) for way in counts})
            if n < len(exchanges):
                rest = exchanges[n]
                last = f"last completed exchange {n} of {len(exchanges)}"
                return f"{last}; the next, {rest}, is {place_of(program.hlo(), rank, n)}"
        return ""


def messages_of(exchanges: Sequence[Exchange]) -> Counter[Way]:
    """Those that go by memory."""
    return Counter((e.op, e.peer) for e in exchanges if e.op in ("put", "take"))


def n_done(exchanges: Sequence[Exchange], done: Counts) -> int:
    """How many of a program's exchanges are over, as far as is known; all, where none of them goes by
    memory."""
    left = dict(done)
    n = 0
    for i, e in enumerate(exchanges, start=1):
        if e.op in ("put", "take"):
            left[e.op, e.peer] = left.get((e.op, e.peer), 0) - 1
            if left[e.op, e.peer] < 0:
                return n
            n = i
    return len(exchanges)


def place_of(hlo: str, rank: int, index: int) -> str:
    """Which layer's the exchange of that index is, and which batch's, from the scopes of what is computed
    around it."""
    items = [(str(i), item) for i, item in enumerate(in_order(hlo, rank))]
    at = [i for i, (_, item) in enumerate(items) if isinstance(item, Exchange)]
    scopes = {name: item for name, item in items if isinstance(item, Scope) and item.number >= 0}
    put_right = by_stretch([name for name, _ in items], scopes, {items[i][0] for i in at})
    here = at[index]
    before = next((put_right[name] for name, _ in reversed(items[:here]) if name in put_right), None)
    after = next((put_right[name] for name, _ in items[here:] if name in put_right), None)
    op = items[here][1].op  # type: ignore[union-attr]
    # An attention rank takes a layer's q before it attends; a model rank takes the layer's answer after its
    # slice.
    comes_before = op in ("take", "recv") and "attention" in {
        s.kind for s in (before, after) if s is not None
    }
    found = (after or before) if comes_before else (before or after)
    return "of no layer" if found is None else f"of layer {found.number}, batch {found.batch}"


def _ahead(count: int, of: int) -> int:
    """By how much one 32-bit number is ahead of another."""
    return (count - of + (1 << 31)) % (1 << 32) - (1 << 31)
