"""What a compiled program sends and receives, in order, and whether the programs of all ranks fit together.

Reads the text of scheduled HLO (``compiled.as_text()``). Pure text in, plain data out: knows no JAX, no
device and nothing of what is sent. The lists are compared before the first run, since a rank whose partner
sends something else, or nothing, waits for ever: XLA deletes a collective whose result nothing uses, and
orders by data, not by program text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports.hlo import Instruction, Module, read_module
from jaxlamina.transports.scopes import Scope, scope_in
from pallas_kernels.gpu.mail import Ring

_TRIP_COUNT = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)')
OURS = "jaxlamina_"
"""Before mpi4jax's name of a call whose addresses are places (`mpi_places`)."""
_TARGET = re.compile(rf'custom_call_target="(?:{OURS})?mpi_(\w+?)_ffi"')
# A kernel that writes a message into another GPU's memory, or waits for one there: by the scope it was traced
# in.
_BY_MEMORY = re.compile(r".*exchange/(put|take|sum)\.([\d-]+)/")
_PAIR = re.compile(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_AXES = re.compile(r"replica_groups=\S*mesh\S*\[(.*?)\]\s*\{(.*?)\}")

# Their operands go to every rank; the last is listed by its rows, as ranks may hold different numbers of
# them.
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-broadcast"}
_RAGGED = "ragged-all-to-all"

# An instruction and its computation's, by name -> what it exchanges.
_Reader = Callable[[Instruction, Mapping[str, Instruction]], Sequence[Any]]


def mpi_exchanges(hlo: str, rank: int, world: int | None = None) -> tuple[Exchange, ...]:
    """What a program sends and receives by mpi4jax as ``rank``, in the order in which it does; of what falls
    together (sendrecv) the lower rank's message first.

    hlo: text of the scheduled module. Types MPI lacks are listed as the bits that travel (uint16 for
    bfloat16). world: handle of the communicator of all ranks. Given, other communicators' calls are left out
    and collectives are listed; else only sends and receives are: a collective may be of this rank alone, and
    meet nobody. Raises ValueError where the list cannot be known: a loop of unknown length, branches that
    differ.
    """
    return _expand(_scheduled(hlo), lambda i, others: _mpi(i, others, rank, world))


def xla_exchanges(hlo: str, rank: int) -> tuple[Exchange, ...]:
    """What a program sends and receives by XLA's collectives, in order, as partition ``rank`` of it.

    A permute's pairs are exchanges of the ranks they name, lower senders first; all other collectives are
    "all". Raises ValueError as `mpi_exchanges`, for a collective of some of the ranks, and for an array that
    does not lie in memory row by row.
    """
    return _expand(_scheduled(hlo), lambda i, others: _xla(i, others, rank))


def in_order(hlo: str, rank: int) -> tuple[Exchange | Scope, ...]:
    """A program's exchanges as `xla_exchanges`, and between them the scopes of what is computed, in the order
    of execution."""

    def read(i: Instruction, others: Mapping[str, Instruction]) -> Sequence[Exchange | Scope]:
        scope = scope_in(i.op_name or "")
        return _xla(i, others, rank) or ([] if scope is None else [scope])

    return _expand(_scheduled(hlo), read)


def by_instruction(hlo: str, rank: int | None) -> dict[str, list[Exchange]]:
    """Instruction -> what it exchanges: by XLA's collectives as partition ``rank``, or by mpi4jax (None)."""
    every = {i.name: i for i in _scheduled(hlo).instructions()}
    found = {
        name: _mpi(i, every, None, None) if rank is None else _xla(i, every, rank)
        for name, i in every.items()
    }
    return {name: list(exchanges) for name, exchanges in found.items() if exchanges}


def first_difference(
    lists: Mapping[int, Sequence[Exchange]], describe: Callable[[int], str] = lambda rank: f"rank {rank}"
) -> str | None:
    """One line on the first exchange, by rank and index, that has no partner; None if the programs fit
    together.

    lists: each rank's exchanges. What two ranks list of each other must mirror, one's sends the other's
    receives of the same shape and dtype, and the orders of all ranks must not wait for one another in a
    circle.
    """
    ranks = sorted(lists)
    for rank in ranks:
        for i, found in enumerate(lists[rank]):
            if found.op != "all" and (found.peer == rank or found.peer not in lists):
                return f"{_place(lists, rank, i, describe)}, which is not another rank of this job"
    for n, rank in enumerate(ranks):
        for peer in ranks[n + 1 :]:
            line = _difference(lists, rank, peer, describe)
            if line:
                return line
    return _circle(lists, describe)


# ---- the lists of several ranks


# What meets what; puts and takes are in the order of their own kind only, since a put does not wait.
_MEETING = ({"send", "recv", "all"}, {"send", "recv", "all"}), ({"put"}, {"take"}), ({"take"}, {"put"})


def _difference(
    lists: Mapping[int, Sequence[Exchange]], rank: int, peer: int, describe: Callable[[int], str]
) -> str | None:
    for our_ops, their_ops in _MEETING:
        ours = [i for i, e in enumerate(lists[rank]) if e.op in our_ops and e.peer in (peer, -1)]
        theirs = [i for i, e in enumerate(lists[peer]) if e.op in their_ops and e.peer in (rank, -1)]
        for i, j in zip(ours, theirs, strict=False):
            if not _fit(lists[rank][i], lists[peer][j]):
                return f"{_place(lists, rank, i, describe)}, but {_place(lists, peer, j, describe)}"
        common = min(len(ours), len(theirs))
        if len(ours) != len(theirs):
            one, other, more = (rank, peer, ours) if len(ours) > common else (peer, rank, theirs)
            return (
                f"{_place(lists, one, more[common], describe)}, but {describe(other)} has no more exchanges "
                f"with {describe(one)} after {common}"
            )
    return None


def _fit(ours: Exchange, theirs: Exchange) -> bool:
    ops = {ours.op, theirs.op}
    return ops in ({"send", "recv"}, {"put", "take"}, {"all"}) and (
        tuple(ours.shape) == tuple(theirs.shape) and ours.dtype == theirs.dtype
    )


def _circle(lists: Mapping[int, Sequence[Exchange]], describe: Callable[[int], str]) -> str | None:
    """Runs the lists with sends that wait for their receive, as large ones do; a line on who waits for whom
    for ever."""
    at = dict.fromkeys(lists, 0)
    waiting = set(lists)
    needs = _needs(lists)
    while waiting:
        rank = waiting.pop()
        while at[rank] < len(lists[rank]):
            peer = lists[rank][at[rank]].peer
            met = _partners(lists, at, rank, needs)
            if not met:
                break
            for one in met:
                at[one] += 1
            waiting.update(met if peer < 0 else {*met, peer})
    stuck = [rank for rank in sorted(lists) if at[rank] < len(lists[rank])]
    if not stuck:
        return None
    found = "; ".join(_place(lists, rank, at[rank], describe) for rank in stuck[:3])
    return f"ranks would wait for one another for ever: {found}"


def _needs(lists: Mapping[int, Sequence[Exchange]]) -> dict[tuple[int, int], int]:
    """(rank, index) of a take or a put -> the index in its peer's list of what must be over first: of a take
    its put, of a put the take that makes room for it in the ring, if there is one."""
    found: dict[tuple[int, int], int] = {}
    for rank, exchanges in lists.items():
        for sender in {e.peer for e in exchanges if e.op == "take"}:
            takes = [i for i, e in enumerate(exchanges) if (e.op, e.peer) == ("take", sender)]
            puts = [i for i, e in enumerate(lists[sender]) if (e.op, e.peer) == ("put", rank)]
            found |= {(rank, i): j for i, j in zip(takes, puts, strict=True)}
            found |= {(sender, j): i for i, j in zip(takes, puts[Ring().n_ahead :], strict=False)}
    return found


def _partners(
    lists: Mapping[int, Sequence[Exchange]],
    at: Mapping[int, int],
    rank: int,
    needs: Mapping[tuple[int, int], int],
) -> list[int]:
    """All ranks of the exchange that ``rank`` is at, if each of them is at it too; else none. A put and a
    take are one rank's alone, once what they need is over."""
    here = lists[rank][at[rank]]
    if here.op in ("put", "take"):
        return [rank] if needs.get((rank, at[rank]), -1) < at[here.peer] else []
    ranks = sorted(lists) if here.op == "all" else [rank, here.peer]
    for other in ranks:
        if at[other] >= len(lists[other]):
            return []
        there = lists[other][at[other]]
        meets = there.op == "all" if here.op == "all" else there.op in ("send", "recv") and there.peer == rank
        if other != rank and not meets:
            return []
    return ranks


def _place(lists: Mapping[int, Sequence[Exchange]], rank: int, i: int, describe: Callable[[int], str]) -> str:
    e = lists[rank][i]
    what = f"{e.dtype}[{', '.join(map(str, e.shape))}]"
    peer = describe(e.peer) if e.peer in lists else f"rank {e.peer}"
    sends, receives = f"sends {what} to {peer}", f"receives {what} from {peer}"
    does = {"send": sends, "put": sends, "recv": receives, "take": receives}
    told = does.get(e.op, f"a collective of {what}")
    return f"{describe(rank)}, exchange {i + 1} of {len(lists[rank])}: {told}"


# ---- the list of one rank


def _scheduled(hlo: str) -> Module:
    module = read_module(hlo)
    if not module.is_scheduled:
        raise ValueError("the text must be of a scheduled module: compiled.as_text() of a jitted function")
    return module


def _expand(module: Module, reader: _Reader) -> tuple[Any, ...]:
    """What ``reader`` finds from the entry on, in the order of execution."""
    known: dict[str, tuple[Any, ...]] = {}

    def computation(name: str) -> tuple[Any, ...]:
        if name not in known:
            here = {i.name: i for i in module.computations[name]}
            known[name] = tuple(
                x for i in here.values() for x in (*reader(i, here), *_called(i, computation))
            )
        return known[name]

    return computation(module.entry)


def _called(i: Instruction, computation: Callable[[str], tuple[Any, ...]]) -> Sequence[Any]:
    if i.opcode == "while":
        (body,), (condition,) = i.called("body"), i.called("condition")
        once = computation(condition) + computation(body)
        count = _TRIP_COUNT.search(i.attributes)
        if any(isinstance(e, Exchange) for e in once) and not count:
            raise ValueError(
                f"the loop {i.name!r} has exchanges in it and no fixed number of turns: give it a static "
                "bound"
            )
        return once * int(count[1]) if count else ()
    if i.opcode == "conditional":
        names = i.called("branch_computations", "true_computation", "false_computation")
        branches = [computation(name) for name in names]
        exchanged = [[e for e in b if isinstance(e, Exchange)] for b in branches]
        if any(b != exchanged[0] for b in exchanged):
            raise ValueError(f"the branches of {i.name!r} have different exchanges")
        return branches[0]
    if i.opcode in ("call", "fusion", "async-start", "custom-call"):
        return [e for name in i.called("to_apply", "calls", "called_computations") for e in computation(name)]
    return ()


def _mpi(
    i: Instruction, others: Mapping[str, Instruction], rank: int | None, world: int | None
) -> Sequence[Exchange]:
    """``rank``: None where the order of what falls together does not matter."""
    target = _TARGET.search(i.attributes) if i.opcode == "custom-call" else None
    if not target:
        return ()
    call = target[1]
    if world is not None and _integer(i, "comm") != world:
        return ()
    operands = [array for name in i.operands for array in others[name].arrays]
    if call in ("send", "recv", "sendrecv"):
        found = []
        if call != "recv":
            ((shape, dtype),) = operands
            found.append(Exchange("send", _integer(i, "dest"), shape, dtype))
        if call != "send":
            ((shape, dtype),) = i.arrays
            found.append(Exchange("recv", _integer(i, "source"), shape, dtype))
        return found if rank is None or rank < found[0].peer else found[::-1]
    if world is None:
        return ()
    return tuple(Exchange("all", -1, shape, dtype) for shape, dtype in operands or [((), "bool")])


def _integer(i: Instruction, name: str) -> int:
    found = re.search(rf"[{{\s,]{name} = (-?\d+) : i(?:32|64)", i.attributes)
    if not found:
        raise ValueError(
            f"no {name} in the MPI call {i.name!r}: this version of mpi4jax writes it differently"
        )
    return int(found[1])


def _xla(i: Instruction, others: Mapping[str, Instruction], rank: int) -> Sequence[Exchange]:
    if i.opcode == "custom-call":
        return _by_memory(i, others)
    opcode = i.opcode.removesuffix("-start")
    if opcode in ("send", "recv"):
        raise ValueError(f"{i.name!r} is a {opcode} made from a permute, which is not understood here")
    if opcode not in _COLLECTIVES | {_RAGGED, "collective-permute"}:
        return ()
    if any(order != sorted(order, reverse=True) for order in i.layouts):
        raise ValueError(
            f"{i.name!r} sends an array whose dimensions lie in memory in an order that XLA chose on this "
            f"rank alone, {i.shape}: send it in one dimension"
        )
    operands = [array for name in i.operands for array in others[name].arrays]
    if opcode == "collective-permute":
        text = re.search(r"source_target_pairs=\{(.*?\})?\}", i.attributes)
        assert text, i.attributes
        pairs = sorted((int(a), int(b)) for a, b in _PAIR.findall(text[0]))
        return [
            Exchange("send", to, shape, dtype) if source == rank else Exchange("recv", source, shape, dtype)
            for shape, dtype in operands
            for source, to in pairs
            if rank in (source, to) and source != to
        ]
    if not _takes_part(i, rank):
        return ()
    if opcode == _RAGGED:
        operands = [(shape[1:], dtype) for shape, dtype in operands[:1]]
    if opcode == "all-to-all":  # on CPU it has an operand a rank
        operands = operands[:1]
    return [Exchange("all", -1, shape, dtype) for shape, dtype in operands]


def _by_memory(i: Instruction, others: Mapping[str, Instruction]) -> Sequence[Exchange]:
    found = _BY_MEMORY.match(i.op_name or "")
    if not found:
        return ()
    ((shape, dtype),) = (others[i.operands[0]] if found[1] == "put" else i).arrays
    peers = [int(peer) for peer in found[2].split("-")]
    ops: Sequence[Literal["put", "take"]] = [op for op in ("put", "take") if found[1] in (op, "sum")]
    return [Exchange(op, peer, shape, dtype) for op in ops for peer in peers]


def _takes_part(i: Instruction, rank: int) -> bool:
    """Whether a collective is of all ranks; False if it is of ``rank`` alone, or not of it."""
    if axes := _AXES.search(i.attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", axes[1])}
        within = math.prod(sizes[name] for name in re.findall(r"'([^']+)'", axes[2]))
        n_mine, n_ranks = within, math.prod(sizes.values())
    else:
        groups = _groups(i)
        if not groups:
            return True
        n_ranks = sum(len(group) for group in groups)
        n_mine = max((len(group) for group in groups if rank in group), default=0)
    if 1 < n_mine < n_ranks:
        raise ValueError(f"{i.name!r} is a collective of {n_mine} of {n_ranks} ranks; it must be of all")
    return n_mine > 1


def _groups(i: Instruction) -> list[list[int]]:
    """The ranks of each group of a collective; none where all ranks are one."""
    found = _GROUPS.search(i.attributes)
    if not found:
        raise ValueError(
            f"the groups of {i.name!r} are written in a way that is not understood here: {i.attributes}"
        )
    if found[1] == "{}":
        return []
    if found[1].startswith("{"):
        return [
            [int(n) for n in group.split(",") if n.strip()]
            for group in re.findall(r"\{([\d,\s]*)\}", found[1])
        ]
    return _iota(found[1])


def _iota(text: str) -> list[list[int]]:
    """``[2,2]<=[2,2]T(1,0)``: the numbers from 0 in the second shape, transposed, read as rows of the
    first."""
    numbers = [[int(n) for n in part.split(",")] for part in re.findall(r"[\[(]([\d,]+)[\])]", text)]
    (n_groups, size), dims = numbers[0], numbers[1]
    order = numbers[2] if len(numbers) > 2 else list(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    flat = [0]
    for axis in order:
        flat = [base + k * strides[axis] for base in flat for k in range(dims[axis])]
    return [flat[g * size : (g + 1) * size] for g in range(n_groups)]
