"""Runs a scenario of faults (`fault_scenarios`) with real processes and clients, and checks what must be true.

Every answer is compared, event by event, with one that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from fault_scenarios import Event, Scenario
from launch_hosts import Hosts
from serving import ROOT
from supervised import (
    DEADLINE_S,
    ON_CPUS,
    Asked,
    N,
    Supervised,
    answers,
    children,
    find,
    is_there,
    policy_once,
    requests_of,
    restarts,
    starter,
    wait_until,
    words_of,
)

from launch.processes import LAUNCHED

# In every process of a job: SIGUSR1 has its main thread spin for ever.
SPINS = """
import signal


def spin(*_):
    while True:
        pass


signal.signal(signal.SIGUSR1, spin)
"""
SPINNING_POLICY = policy_once("Spinning", "spin", "while True: pass")
# Long prompts, that have nothing in common by which KV could be found.
PROMPTS = {
    f"prompt {n}": (
        "/v1/completions",
        {"prompt": f"w{n} w2 w3 " * 150, "max_tokens": 5, "stream": True, "seed": n, "temperature": n % 2},
    )
    for n in range(10, 22)
}
_AT_ONCE = 6  # of these
# More than a journal writes into what it has of a disk already.
LARGE = {
    "large": (
        "/v1/completions",
        {"prompt": "w4 w2", "max_tokens": 5, "temperature": 0, "stream": True, "user": "x" * 5_000_000},
    )
}
SMALL_DISK = "size=32m"
# A rank that has lost another one ends with a code. The supervisor may ask it in the moment before, and hear that
# its engine has failed.
_SEEN_BEFORE = {"exit code 3": ("the engine has failed: ",)}


class Where(NamedTuple):
    """Words for a job over ranks, for one process, and the environment of both, and of ranks beside."""

    of_ranks: tuple[str, ...] = ()
    of_one: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    of_all_ranks: Mapping[str, str] = {}


ON_CPU_RANKS = Where(ON_CPUS)
# All ranks share one GPU, which each takes for its own: XLA's collectives want one each, MPI does not. Float32
# without TF32, as tokens are to be the same whoever else is in a batch.
ON_ONE_GPU = Where(
    ("--transport", "mpi", "--dtype", "float32"),
    ("--dtype", "float32"),
    {
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02",
    },
    {"CUDA_VISIBLE_DEVICES": ",".join("0" * 5)},
)


def why_no_small_disk() -> str | None:
    return None if os.geteuid() == 0 else "a disk that can be filled is mounted by root alone"


class Run:
    """One run of ``scenario``; ``folder``: for its files; ``where``: what its job is started with beside."""

    def __init__(
        self,
        scenario: Scenario,
        model: Path,
        folder: Path,
        cleanups: contextlib.ExitStack,
        where: Where = ON_CPU_RANKS,
    ) -> None:
        self.scenario, self.folder = scenario, folder
        self.requests = requests_of(scenario.n_tokens or N)
        (folder / "sitecustomize.py").write_text(SPINS)
        (folder / "spinning_policy.py").write_text(SPINNING_POLICY)
        self.hosts = None
        job = [*scenario.job, *(where.of_ranks if scenario.job else ())]
        options = [*scenario.options, *(() if scenario.job else where.of_one)]
        if scenario.hosts:
            self.hosts = cleanups.enter_context(Hosts(folder))
            job += ["--set", f"control={self.hosts.addresses[0]}:29400"]
            job += ["--starter", starter(self.hosts, *scenario.hosts)]
        if scenario.full_disk:
            cleanups.enter_context(small_disk(folder / "journal"))
        variables = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])} | where.variables
        variables |= where.of_all_ranks if scenario.job else {}
        variables["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
        if scenario.compiles:
            variables |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla"), "JAX_LOG_COMPILES": "1"}
        self._start = [job, model, [w.format(folder=folder) for w in options], variables]
        self._cleanups = cleanups
        self.supervisors: list[Supervised] = []
        self.asked: dict[str, Asked] = {}
        self.changes: list[tuple[Asked, int | None]] = []
        self._folders: set[Path] = set()  # of sockets and pipes, that processes had when a fault came
        self._struck: set[int] = set()  # all of jobs that were struck: they may take a moment to end
        self._n_logged = 0  # lines of the log when prompts were asked for
        self._looks = Looks(lambda: self.server.port)

    @property
    def server(self) -> Supervised:
        return self.supervisors[-1]

    def start(self) -> None:
        server = Supervised.of(*self._start)
        self._cleanups.callback(server.close)
        self.supervisors.append(server)

    def run(self) -> None:
        self.start()
        expected = {name: one.said for name, one in answers(self.server.port, self.requests).items()}
        assert all(expected.values())
        # What takes over is there before it is needed: how long that takes goes by the machine.
        n_spares = max((event.after_spares for event in self.scenario.events[:1]), default=0)
        wait_until(lambda: self.has_said("a spare stands by", n_spares))
        self.ask(self.requests)
        self._cleanups.enter_context(self._looks)
        for event in self.scenario.events:
            # Looked for before, as these moments may be short; of two jobs the one that runs is struck.
            early = event.during in ("prompts", "compiling", "scaling") and not event.cut
            pid = find(event.whom, self.server.process.pid) if early else 0
            self.wait_for(event)
            if event.whom and not pid and not event.cut:
                old = self._struck if event.during == "recovering" else ()
                pid = find(event.whom, self.server.process.pid, old)
            self.happen(event, pid)
        self.check_answers(expected)
        self.check_recoveries()
        self.end()

    def ask(self, requests: dict[str, tuple[str, dict]]) -> None:
        self.asked |= {name: Asked(self.server.port, *request) for name, request in requests.items()}

    # --- when ---

    def wait_for(self, event: Event) -> None:
        try:
            wait_until(lambda: self.is_time_for(event))
        except AssertionError as error:
            raise AssertionError(f"{error}: {event}{self.story()}") from None

    def has_said(self, what: str, n: int) -> bool:
        """So many lines of the log."""
        return sum(what in line for line in self.server.lines) >= n

    def is_time_for(self, event: Event) -> bool:
        streams = [
            one for name, one in self.asked.items() if name in self.requests and one.body.get("stream")
        ]
        if event.is_for_streams and not all(one.events for one in streams):
            return False
        if len(self.asked["greedy"].events) < event.after_tokens:
            return False
        for n, said in (
            (event.after_spares, "a spare stands by"),
            (event.after_ready, "the job is ready again"),
        ):
            if not self.has_said(said, n):
                return False
        if event.after_recoveries:
            if len(restarts(self.server)) < event.after_recoveries:
                return False
            return event.lift or self.has_taken_over(self.status(), event.whom)
        if event.lift and self.scenario.full_disk:
            return self.counter("jaxlamina:journal_failures_total") >= 1
        return not event.during or self.is_in(event.during, event.whom)

    def is_in(self, moment: str, whom: str) -> bool:
        """As the server says."""
        if moment == "prompts":  # accepted, and not computed
            prompts = [one for name, one in self.asked.items() if name in PROMPTS]
            return any(one.key and not one.events for one in prompts)
        if moment == "compiling":
            log = self.server.lines[self._n_logged :]
            begun, done = ("Compiling jit", "Finished XLA compilation")
            return sum(begun in line for line in log) > sum(done in line for line in log)
        status = self.status()
        if moment == "scaling":
            return status["spare"] == "starting"
        return status["status"] == "recovering" and self.has_taken_over(status, whom, self._struck)

    def status(self) -> Mapping[str, str]:
        return self.server.get("/v1/fault_tolerance/status")

    def has_taken_over(self, status: Mapping[str, str], whom: str, apart_from: Collection[int] = ()) -> bool:
        """Not while a process stands ready that has its imports: it is none of the job's yet."""
        return status["spare"] not in ("importing", "imported") and self.is_there(whom, apart_from)

    def is_there(self, whom: str, apart_from: Collection[int] = ()) -> bool:
        """Of a starter's ranks those on the other host are no children of the supervisor."""
        if is_there(whom, self.server, apart_from):
            return True
        other = self.hosts.pids(1) if self.hosts is not None and whom != "rank 0" else []
        return any("launch" in words_of(pid) for pid in other)

    # --- what ---

    def happen(self, event: Event, pid: int) -> None:
        server = self.server
        if event.ask:
            self._n_logged = len(server.lines)
            more = [name for name in PROMPTS if name not in self.asked][:_AT_ONCE]
            self.ask({name: PROMPTS[name] for name in more})
        if event.pause:
            server.post("/pause", None)
        if event.apply:
            change = Asked(server.port, "/v1/fault_tolerance/apply", event.apply)
            self.changes.append((change, event.status))
        if event.signal:
            self._folders |= folders(server.process.pid)
            self._struck |= self.of_job()
            os.kill(pid, getattr(signal, event.signal))
            if (event.signal, event.whom) == ("SIGKILL", "supervisor"):
                server.process.wait(20)
        if event.spin_engine:
            (self.folder / "spin").touch()
        if event.no_memory:
            limit_memory(pid, spare=event.whom == "supervisor")
        if event.full_disk:
            fill(self.folder / "journal")
            self.ask(LARGE)
        if event.cut:
            assert self.hosts is not None
            self.hosts.cut()
        time.sleep(event.for_s)
        if event.lift and server.process.poll() is None:
            self.lift()
        elif event.start:
            self.start()
        if event.resume:  # while the job is started again it takes no such calls
            wait_until(lambda: self.server.request("POST", "/resume")[0] == 200)

    def of_job(self) -> set[int]:
        """All processes of the job that runs; those of one that is made ready may take over."""
        with contextlib.suppress(StopIteration):
            job = find("starter" if self.scenario.job else "server", self.server.process.pid)
            return {job, *children(job)}
        return set()

    def lift(self) -> None:
        if self.hosts is not None:
            self.hosts.mend()
        elif self.scenario.full_disk:
            (self.folder / "journal" / "filler").unlink()
        else:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(self.server.process.pid, resource.RLIMIT_AS, unlimited)

    # --- what must be true ---

    def check_answers(self, expected: dict[str, list[str]]) -> None:
        for change, status in self.changes:
            change.join(DEADLINE_S)
            assert status in (None, change.status), change.events
        another = len(self.supervisors) > 1
        for name, one in self.asked.items():
            one.join(DEADLINE_S)
            assert not one.is_alive(), f"{name} has no end\n{self.story()}"
            if another and one.broke and one.key:  # its supervisor was killed: it asks the next one
                one.goes_on(self.server.port)
        for name in sorted(self.asked.keys() - self.requests.keys()):
            again = Asked(self.server.port, self.asked[name].path, self.asked[name].body)
            again.join(DEADLINE_S)
            expected[name] = again.said
            assert again.ends, f"{again.status} {again.events}\n{self.story()}"
        said = {name: one.said for name, one in self.asked.items()}
        if another:  # who had no answer yet knows no key to ask for
            said = {name: events for name, events in said.items() if self.asked[name].key}
            assert len(said) >= 5
        for name, events in said.items():
            one = self.asked[name]
            if self.scenario.check.drawn_may_differ and one.body["temperature"]:
                assert one.ends and len(events) > len(expected[name]) / 2, f"{name}: {events}{self.story()}"
                continue
            assert events == expected[name], f"{name}: {difference(events, expected[name])}\n{self.story()}"

    def check_recoveries(self) -> None:
        server, check = self.server, self.scenario.check
        assert self._looks.n and not self._looks.broke, f"{self._looks.broke}{self.story()}"
        # Answers may have ended just before a process did, which is seen a moment later.
        try:
            wait_until(lambda: len(restarts(server)) >= check.recoveries, 30)
        except AssertionError:
            raise AssertionError(f"less than {check.recoveries} recoveries{self.story()}") from None
        wait_until(lambda: server.request("GET", "/health")[0] == 200)
        n = len(restarts(server))
        assert check.recoveries <= n <= max(check.recoveries, check.recoveries_at_most), self.story()
        causes = [(check.cause, restarts(server)[-1])] if check.cause else []
        for cause, said in (*causes, *zip(check.causes, restarts(server), strict=False)):
            assert any(one in said for one in (cause, *_SEEN_BEFORE.get(cause, ()))), self.story()
        own = server.get("/metrics").decode()
        counted = re.findall(r"^jaxlamina:recoveries_total\{.*\} (\S+)$", own, re.MULTILINE)
        assert sum(map(float, counted)) == n
        if check.recoveries:
            least = 0 if check.streams_may_end else 1  # before the change
            n_stalls = self.counter("jaxlamina:recovery_stall_seconds_count", own)
            n_resumed = self.counter("jaxlamina:resumed_requests_total", own)
            assert min(n_stalls, n_resumed) >= least, f"{n_stalls=} {n_resumed=}{self.story()}"
        if check.recomputed_at_most is not None:
            # tests/faults/README.md says where the bound comes from.
            n = self.counter("jaxlamina:recomputed_tokens_total", own)
            assert n <= check.recomputed_at_most, f"{n:.0f} tokens were computed again{self.story()}"

    def story(self) -> str:
        """What the supervisor and its job have said."""
        of_jax = re.compile(r"(\[rank \d\] )?(Compiling|Finished|Persistent|Writing|Not writing)")
        lines = [line for line in self.server.lines if not of_jax.match(line)]
        return "\n".join(["", *lines, f"the supervisor's exit code: {self.server.process.poll()}"])

    def counter(self, name: str, metrics: str | None = None) -> float:
        metrics = self.server.get("/metrics").decode() if metrics is None else metrics
        found = re.search(rf"^{name} (\S+)$", metrics, re.MULTILINE)
        assert found, f"no {name}"
        return float(found[1])

    def end(self) -> None:
        """All processes, ports and folders are gone, and the journal says of each request that it has ended."""
        server = self.server
        below = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0, self.story()
        assert below
        wait_until(lambda: not any(words_of(pid) for pid in below), 20)
        if self.hosts is not None:
            wait_until(lambda: not any("launch" in words_of(pid) for pid in self.hosts.pids(1)), 20)
        left = [folder for folder in self._folders if folder.exists()]
        assert not left, f"folders of processes that were killed: {left}{self.story()}"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)), "its port is still open"
        if (path := self.folder / "journal" / "journal.sqlite").exists():
            with contextlib.closing(sqlite3.connect(path)) as database:
                ended = dict(database.execute("SELECT key, ended IS NOT NULL FROM requests"))
            assert all(ended.values())
            assert {one.key for one in self.asked.values() if one.key} <= set(ended)


def difference(found: list[str], wanted: list[str]) -> str:
    """Of two answers, where it begins."""
    at = len(os.path.commonprefix([found, wanted]))
    here = slice(max(0, at - 1), at + 3)
    return f"event {at} of {len(found)}, {len(wanted)} wanted: {found[here]} in place of {wanted[here]}"


class Looks(threading.Thread):
    """Asks for the models while it is entered. There may be no answer meanwhile, but none that breaks off, as
    nothing is done for it."""

    def __init__(self, port: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._port, self._is_over = port, threading.Event()
        self.n, self.broke = 0, set[bytes]()

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            connection = http.client.HTTPConnection("127.0.0.1", self._port(), timeout=DEADLINE_S)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/v1/models")
                answer = connection.getresponse()
                said = answer.read()
                self.n += answer.status == 200
                if b"is not known" in said:
                    self.broke.add(said)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()


def folders(supervisor: int) -> set[Path]:
    """In which a supervisor's job has its socket, and launchers their ranks' pipes."""
    found = set()
    for pid in children(supervisor):
        words = words_of(pid)
        found |= {Path(after).parent for word, after in pairwise(words) if word == "--uds"}
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            said = dict(word.partition("=")[::2] for word in variables)
            found |= {Path(said[LAUNCHED])} if LAUNCHED in said else set()
    return found


def limit_memory(pid: int, *, spare: bool) -> None:
    """From now on it gets none. ``spare``: but may take again what it gives back."""
    size = int(re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024
    most = size if spare else size - 2**30
    resource.prlimit(pid, resource.RLIMIT_AS, (max(most, 0), resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_disk(path: Path):
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
