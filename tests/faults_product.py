"""Faults by who × what × when × how many ranks × transport: each combination is a scenario, or a line that says
why it cannot be.

Pure: knows no processes. tests/test_faults_product.py runs a cover of all pairs, or what `FAULTS` says.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import NamedTuple

from fault_scenarios import Check, Event, Scenario

AXES = {
    "who": ("model0", "model1", "attention", "prefill", "front", "supervisor"),
    "what": ("kill", "stop", "spin", "packets", "disk", "memory"),
    "when": ("prefill", "chunk", "decode", "between", "recovery", "compile", "scale"),
    "dop": ("1x1", "1x2", "2x1", "2x2"),
    "transport": ("xla", "mpi"),
}
STANDS_S = 15  # a supervisor that is stopped, longer than it waits for an answer
# A rank that stands still is found in a step by its deadline, in a start by another, and while nothing runs by
# heartbeats. Compiling counts as a part of the step.
DEADLINES = {"step_deadline_s": 20, "start_deadline_s": 30, "heartbeat_s": 2}
OPTIONS = ("--stuck-after", "10", "--step-timeout", "20", "--start-timeout", "60")


class Fault(NamedTuple):
    """A combination. ``who`` it strikes, ``what`` it is, ``when`` it comes."""

    who: str
    what: str
    when: str
    dop: str
    transport: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def n_model(self) -> int:
        return int(self.dop[0])

    @property
    def n_ranks(self) -> int:
        return self.n_model + int(self.dop[2]) + (self.who == "prefill")

    @property
    def whom(self) -> str:
        """The process, as scenarios name it."""
        if self.who == "supervisor":
            return "supervisor"
        ranks = {"model1": 1, "attention": self.n_model, "prefill": self.n_ranks - 1}
        return f"rank {ranks.get(self.who, 0)}"

    @property
    def pairs(self) -> set[tuple[tuple[str, str], ...]]:
        return set(combinations(zip(self._fields, self, strict=True), 2))


def every() -> list[Fault]:
    return [Fault(*values) for values in product(*AXES.values())]


def why_not(fault: Fault) -> str | None:
    """In one line; None: it can be."""
    who, what = fault.who, fault.what
    if who == "model1" and fault.n_model == 1:
        return f"DOP {fault.dop} has one model worker"
    if what == "disk" and who != "supervisor":
        return "the journal is the supervisor's: nobody else writes to its disk"
    if who == "front" and what != "spin":
        return "the front end is rank 0's main thread: the process is model worker 0's, see who=model0"
    if what == "packets":
        if who == "supervisor":
            return "the supervisor reaches the job by a Unix socket on its own host: no packets"
        if fault.when == "scale":
            return "ranks on two hosts are a starter's, and scale does not go with --starter"
        if fault.transport == "xla":
            return "Gloo looks up the name of its host, and nothing here knows that of a namespace"
    return None


def scenario(fault: Fault) -> Scenario:
    """`ValueError` for one that cannot be, with the reason."""
    if (reason := why_not(fault)) is not None:
        raise ValueError(f"{fault}: {reason}")
    return Scenario(
        job=_job(fault),
        options=(*OPTIONS, *_options(fault)),
        events=(*_before(fault), *_struck(fault), *_after(fault)),
        check=_check(fault),
        slow=True,
        mpi=fault.transport == "mpi",
        hosts=_hosts(fault),
        compiles=fault.when == "compile",
        full_disk=fault.what == "disk",
    )


def cover() -> list[Fault]:
    """Few of those that can be, with every pair of values that any of them has: the next is always the first
    of those with most pairs that are new."""
    left = [fault for fault in every() if why_not(fault) is None]
    wanted = set().union(*(fault.pairs for fault in left))
    chosen = []
    while wanted:
        best = max(left, key=lambda fault: len(fault.pairs & wanted))
        chosen.append(best)
        wanted -= best.pairs
    return chosen


def selected(asked: str) -> list[Fault]:
    """Those that can be: "" or "cover" for the cover, "all", a fault's name, or values such as "who=prefill
    what=stop,kill". `ValueError` for what is none of these, or where there is no such fault."""
    if asked in ("", "cover"):
        return cover()
    left = [fault for fault in every() if why_not(fault) is None]
    if asked == "all":
        return left
    if named := [fault for fault in left if str(fault) == asked]:
        return named
    for word in asked.split():
        axis, _, text = word.partition("=")
        values = text.split(",")
        if axis not in AXES or not set(values) <= set(AXES[axis]):
            raise ValueError(f"{word!r}: take all, a name, or axes with values of {AXES}")
        left = [fault for fault in left if getattr(fault, axis) in values]
    if not left:
        raise ValueError(f"{asked!r}: no such fault can be")
    return left


def _job(fault: Fault) -> tuple[str, ...]:
    settings: dict[str, object] = dict(DEADLINES)
    if fault.dop == "2x1":
        settings["pipelining"] = '"rotational"'
    if fault.who == "prefill":
        settings["prefill_workers"] = 1
    if fault.what == "packets" and fault.n_ranks < 4:  # more of them take longer on few cores
        settings["start_deadline_s"] = 15  # finds sooner that the cable is whole again
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    of_ranks = (
        "--dop",
        fault.dop.replace("x", ","),
        "--transport",
        fault.transport,
        "--local-attention",
        "0",
    )
    return ("launch", *of_ranks, *words)


def _options(fault: Fault) -> tuple[str, ...]:
    journal = ("--journal", "{folder}/journal") if fault.who == "supervisor" else ()
    chunks = ("--max-num-batched-tokens", "32") if fault.when == "chunk" else ()
    policy = ("--scheduling-policy", "spinning_policy:Spinning")
    return (*journal, *chunks, *(policy if _spins_engine(fault) else ()))


def _spins_engine(fault: Fault) -> bool:
    """Model worker 0's thread is the engine's; the main one of its process is the front end's."""
    return fault.what == "spin" and fault.who == "model0"


def _hosts(fault: Fault) -> tuple[int, ...]:
    """The cable is between whom and the ranks before it; rank 0 is on the supervisor's host."""
    if fault.what != "packets":
        return ()
    n_here = max(1, int(fault.whom.removeprefix("rank ")))
    return n_here, fault.n_ranks - n_here


def _before(fault: Fault) -> tuple[Event, ...]:
    """Brings the moment about."""
    if fault.when in ("prefill", "chunk", "compile"):
        return (Event(after_tokens=10, ask=True),)
    if fault.when == "between":
        return (Event(after_tokens=30, pause=True),)
    if fault.when == "recovery":
        return (Event(after_tokens=30, signal="SIGKILL", whom="starter"),)
    if fault.when == "scale":
        n = {"1x1": 1, "1x2": -1, "2x1": 1, "2x2": -1}[fault.dop]
        change = {"instruction": "scale", "attention": n}
        return (Event(after_tokens=20, apply=change, status=None),)
    return ()


def _struck(fault: Fault) -> tuple[Event, ...]:
    """In the moment."""
    at: dict[str, object] = {"whom": fault.whom}
    during = {
        "prefill": "prompts", "chunk": "prompts", "recovery": "recovering", "compile": "compiling",
        "scale": "scaling",
    }  # fmt: skip
    if fault.when in during:
        at["during"] = during[fault.when]
    elif fault.when == "decode":
        at["after_tokens"] = 30
    if fault.what == "packets":
        return (Event(**at, cut=True),)
    if fault.what == "disk":
        return (Event(**at, full_disk=True),)
    if fault.what == "memory":
        for_s = 5 if fault.who == "supervisor" else 0
        return (Event(**at, no_memory=True, for_s=for_s),)
    if _spins_engine(fault):
        return (Event(**at, spin_engine=True),)
    number = {"kill": "SIGKILL", "stop": "SIGSTOP", "spin": "SIGUSR1"}[fault.what]
    if fault.who != "supervisor" or fault.what == "kill":
        return (Event(**at, signal=number),)
    # Nobody looks after a supervisor but who has started it.
    then = "SIGCONT" if fault.what == "stop" else "SIGKILL"
    return (
        Event(**at, signal=number, for_s=STANDS_S),
        Event(whom="supervisor", signal=then),
    )


def _after(fault: Fault) -> tuple[Event, ...]:
    """What lets it go on."""
    found: list[Event] = []
    if fault.who == "supervisor" and fault.what in ("kill", "spin"):
        found.append(Event(start=True))
    if fault.when == "between":
        found.append(Event(resume=True))
    if fault.what == "packets":
        found.append(Event(lift=True, after_recoveries=1 + (fault.when == "recovery")))
    has_prompts = fault.when in ("prefill", "chunk", "compile")
    # Else one without memory may need none for long, and nobody asks a prefill worker for anything.
    may_be_missed = (fault.what, fault.who) == ("spin", "prefill") and not has_prompts
    if may_be_missed or (fault.what == "memory" and fault.who != "supervisor"):
        found.append(Event(ask=True))
    if fault.what == "disk":
        found.append(Event(lift=True))
    if fault.what == "memory" and fault.who == "supervisor":
        found.insert(0, Event(lift=True, start=True))
    return tuple(found)


def _check(fault: Fault) -> Check:
    """How often the job is started again: for the fault, unless it is the supervisor's own affair, and for the
    kill or the change that it comes during."""
    # What memory a process has may do for all that it has still to do: then nothing has happened.
    least = 0 if fault.who == "supervisor" or fault.what == "memory" else 1
    if fault.who == "supervisor" and fault.what in ("kill", "spin"):
        return Check(recoveries=0)  # of the next supervisor
    more = fault.when == "recovery"
    if fault.who == "supervisor" and fault.what == "memory":
        return Check(recoveries=0, recoveries_at_most=3)  # it may not hear the job's answers, or end itself
    most = (fault.who != "supervisor") + more
    if fault.when == "scale":
        most += 1  # the change may have been made before the fault is found
    if fault.what == "packets":
        most += 8  # starts fail while the cable is out
    elif fault.what != "kill" and fault.who != "supervisor":
        most += 1  # a start that stands still is ended once more
    return Check(recoveries=least + more, recoveries_at_most=most, streams_may_end=True)
