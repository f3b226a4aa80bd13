"""Child processes of one job: their lines, prefixed; their end, all together; and the one line that says why.

A job is over within seconds once one of its processes has failed. Single-threaded: one loop reads all pipes
and looks at all children. Knows ranks by number; nothing of what they do or of MPI beyond how mpirun words
its reports.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from jaxlamina.exit_codes import BAD_INPUT, FAILED, WRONG
from jaxlamina.process import ending
from jaxlamina.process.descendants import descendants
from jaxlamina.process.parents import end_with_parent

# Names the folder of the ranks' pipes in the environment of every process that `launch.local` starts.
LAUNCHED = "JAXLAMINA_LAUNCHED"
# A file in it that rank 0 makes when it begins, and one with its process number once it has an answer to
# SIGTERM: mpirun would not pass a signal on to it alone.
BEGUN, FIRST_PID = "begun", "first"
_SUPERVISED_GRACE_S = 0.5

_ERROR_LINE = re.compile(r"error: rank (\d+)\b")
_BLAMES = re.compile(r"error: rank \d+(?: \([^)]*\))?: rank (\d+)\b")
# What XLA's CPU collectives say, by themselves, once a rank has found the others.
_ALL_IS_WELL = re.compile(r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. .* is : \1\s*$")
_RULE = re.compile(r"-{40,}")
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)")
_EXITED = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)")


@dataclass(frozen=True)
class Child:
    """A process to start. rank: whose it is, None for mpirun. stdout: whether it may write to ours as it
    is."""

    argv: tuple[str, ...]
    rank: int | None
    environment: Mapping[str, str]
    stdout: bool
    stdin: bool


@dataclass
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    since: int | None  # the kernel's ticks
    code: int | None = None
    told: bool = False  # it was we who ended it

    def exit_code(self) -> int | None:
        """None: it runs. One that does not may be there still."""
        return ending.code_of(self.process, self.since)

    @property
    def is_first(self) -> bool:
        """Whether the job is done when this one is: rank 0's process, or the mpirun that has all ranks."""
        return self.child.rank in (0, None)


@dataclass(frozen=True)
class _Report:
    """An error line: who wrote it, and which rank it is about. killed: it is our word on one that was
    killed."""

    by: int
    about: int
    line: str
    killed: bool = False


@dataclass
class _Reason:
    """Error lines in the order they came, and which rank began it all."""

    reports: list[_Report] = field(default_factory=list)

    def add(self, report: _Report) -> bool:
        """Whether it is the first that this rank wrote about that one."""
        if any((other.by, other.about) == (report.by, report.about) for other in self.reports):
            return False
        self.reports.append(report)
        return True

    def has_spoken(self, rank: int) -> bool:
        return any(report.by == rank for report in self.reports)

    def silent(self) -> list[int]:
        """Those that others have lost, and that have said nothing; none where one has said of itself why it
        ends, as that may have begun it, and its exit code counts."""
        if any(report.by == report.about for report in self.reports):
            return []
        return [rank for rank in dict.fromkeys(r.about for r in self.reports) if not self.has_spoken(rank)]

    def in_order(self) -> list[str]:
        """All lines, each once, the one of the rank that began it last."""
        if not self.reports:
            return []
        # One that was killed before it said a word did not end because of the others: they noticed.
        first = next((report for report in self.reports if report.killed), self.reports[0])
        last = self._of(first.about)
        seen = {last.about}
        # A survivor's own line names the rank that it lost.
        while blamed := _BLAMES.match(last.line):
            other = int(blamed[1])
            if other in seen or not any(report.about == other for report in self.reports):
                break
            last = self._of(other)
            seen.add(other)
        others = dict.fromkeys(_shown(r.by, r.line) for r in self.reports if r.line != last.line)
        return [*others, last.line]

    def _of(self, rank: int) -> _Report:
        """The rank's own words, or else what the first other one says of it."""
        about = [report for report in self.reports if report.about == rank]
        return next((report for report in about if report.by == rank), about[0])


class Job:
    """Starts children, passes their lines on and ends them together.

    - ``describe(rank)``: how messages name a rank.
    - ``pipes``: rank → a pipe's reading end that brings its lines, beside the children's own.
    - ``grace_s``: how long the others may take to end by themselves once one has failed, or once rank 0 is
      done.
    - ``end_s``, ``folder``: rank 0 brings its work to an end by itself when it is told to stop, in so many
      seconds; the folder is that of `LAUNCHED`. None: a signal ends all at once.
    - ``begin_s``: rank 0 must have begun, on this host, after so many seconds.
    - ``is_supervised``: clients wait for the job to be started again. Once a rank has failed, the others have
      half a second, and are killed then: one that stands still hears nothing. (mpirun ends them in an order
      of its own, and must not be told to meanwhile. It goes on for a second once none of them is left, and
      is killed then.) What has ended need not be gone at the end, as the supervisor sees to it. A GPU's
      memory takes the kernel a second.
    """

    def __init__(
        self,
        children: Sequence[Child],
        describe: Callable[[int], str],
        *,
        pipes: Mapping[int, int] | None = None,
        grace_s: float = 5.0,
        end_s: float | None = None,
        folder: str = "",
        begin_s: float | None = None,
        is_supervised: bool = False,
    ) -> None:
        self._children = children
        self._describe = describe
        self._pipes = dict(pipes or {})
        self._grace_s = grace_s
        # Given to the others once one has failed, and then to all once they are told to end.
        self._failed_grace_s, self._kill_after_s = grace_s, 2.0
        if any(child.rank is None for child in children):
            # mpirun ends its ranks itself: it waits a little, too, before it kills them.
            self._kill_after_s = 5.0
        elif is_supervised:
            self._failed_grace_s, self._kill_after_s = min(grace_s, _SUPERVISED_GRACE_S), 0.0
        self._end_s = end_s
        self._begun, self._first_pid = Path(folder, BEGUN), Path(folder, FIRST_PID)
        self._begin_s = begin_s
        self._is_supervised = is_supervised
        self._begin_by = None if begin_s is None else time.monotonic() + begin_s
        self._running: list[_Running] = []
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[int, bytearray] = {}
        self._reason = _Reason()
        self._held: list[str] = []  # mpirun's own reports
        self._in_report = False
        self._code = 0
        self._killed_starter = ""  # the line that says so
        self._signal: int | None = None
        self._is_asked_to_end = False
        self._deadline: float | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Until all have ended. 0 where all did well, `WRONG` or `BAD_INPUT` where ranks ended with these
        alone, 128 + the number of a signal that this process got, and `FAILED` for all else.

        SIGINT and SIGTERM end the job at once; with ``end_s`` the second one does, and after the first all
        may do well. The last line on stderr is that of the rank that began the end.
        """
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank, pipe in self._pipes.items():
                self._watch(pipe, rank)
            for child in self._children:
                self._start(child)
            while any(running.code is None for running in self._running):
                self._pump(0.05)
                self._look()
            self._say_why()
        finally:
            self._kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
        return 128 + self._signal if self._signal else self._code

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signal = self._signal or number

    def _start(self, child: Child) -> None:
        last_signal = signal.SIGTERM if child.rank is None else signal.SIGKILL  # mpirun has ranks to end
        process = subprocess.Popen(
            child.argv,
            env=dict(child.environment),
            stdin=None if child.stdin else subprocess.DEVNULL,
            stdout=None if child.stdout else subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=partial(end_with_parent, last_signal),  # noqa: PLW1509 (this process has one thread)
            process_group=None if self._end_s is None else 0,  # a terminal's Ctrl-C is for this process alone
        )
        self._running.append(_Running(child, process, ending.began(process.pid)))
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                self._watch(stream.fileno(), child.rank, stream)

    def _watch(self, fd: int, rank: int | None, keep: BinaryIO | object = None) -> None:
        os.set_blocking(fd, False)
        self._buffers[fd] = bytearray()
        self._selector.register(fd, selectors.EVENT_READ, (rank, keep))

    def _pump(self, timeout_s: float) -> bool:
        """Passes on what has come; whether anything had."""
        some = False
        for key, _ in self._selector.select(timeout_s):
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            some = some or bool(data)
            buffer = self._buffers[key.fd]
            buffer += data
            if not data:
                self._selector.unregister(key.fd)
                if buffer:
                    buffer += b"\n"
            *lines, rest = bytes(buffer).split(b"\n")
            buffer[:] = rest
            for line in lines:
                self._line(key.data[0], line.decode(errors="replace"))
        return some

    def _pump_rest(self) -> None:
        """What is left in the pipes. A process that a rank left behind may hold one open: it is not waited
        for."""
        until = time.monotonic() + 1
        while self._pump(0) and time.monotonic() < until:
            pass
        for key in list(self._selector.get_map().values()):
            if rest := self._buffers[key.fd]:
                self._line(key.data[0], bytes(rest).decode(errors="replace"))

    def _line(self, rank: int | None, line: str) -> None:
        if found := _ERROR_LINE.match(line):
            about = int(found[1])
            if self._reason.add(_Report(about if rank is None else rank, about, line)):
                return
        if rank is None and self._is_report(line):
            self._held.append(line)
            return
        if _ALL_IS_WELL.match(line):
            return
        _say(_shown(rank, line))

    def _is_report(self, line: str) -> bool:
        """Whether a line of mpirun's own is in one of its blocks between rules; a rank's own line is
        better."""
        if _RULE.fullmatch(line.strip()):
            self._in_report = not self._in_report
            return True
        return self._in_report

    def _look(self) -> None:
        now = time.monotonic()
        for running in self._running:
            if running.code is None and (code := running.exit_code()) is not None:
                running.code = code
                self._ended(running, now)
        if self._reason.reports and self._deadline is None:
            self._deadline = now + self._failed_grace_s  # a rank that has written its line is about to end
        if self._is_supervised and self._pipes and self._reason.silent():
            self._end_mpirun_alone()
        if self._signal is not None and self._end_s is not None and not self._is_asked_to_end:
            self._ask_to_end(now + self._end_s)
        if self._begin_by is not None and now > self._begin_by:
            self._begin_by = None
            if not self._begun.exists():
                self._not_begun()
                self._deadline = now - 1
        late = self._deadline is not None and now > self._deadline
        if (late or self._signal is not None) and self._kill_at is None:
            self._end_all(now)
        if self._kill_at is not None and now > self._kill_at:
            self._kill_all()

    def _end_mpirun_alone(self) -> None:
        """If none of its ranks runs. What it would have said of one that is lost is said as far as it can be
        known without it."""
        [mpirun] = self._running
        if mpirun.told or mpirun.code is not None or _has_children(mpirun.process.pid):
            return
        while self._pump(0):  # words that are in a pipe yet
            pass
        if not (silent := self._reason.silent()):
            return
        what = "ended without a word: it was killed, or it crashed"
        for rank in silent:
            self._reason.add(_Report(rank, rank, f"error: {self._describe(rank)}: {what}"))
        mpirun.told = True
        mpirun.process.kill()
        self._code = self._code or FAILED

    def _not_begun(self) -> None:
        line = (
            f"error: {self._describe(0)}: has not begun on this host within {self._begin_s:g} s: its starter "
            "must reach all hosts, and give it this one (the first of a hostfile)"
        )
        self._reason.add(_Report(0, 0, line))

    def _ask_to_end(self, deadline: float) -> None:
        """Has rank 0 bring its work to an end; the others end after it. The signal has been heeded then."""
        self._is_asked_to_end = True
        try:
            os.kill(int(self._first_pid.read_text()), signal.SIGTERM)
        except (OSError, ValueError):  # it only starts, or is gone: there is nothing to bring to an end
            return
        self._signal, self._deadline = None, deadline

    def _ended(self, running: _Running, now: float) -> None:
        code = running.code
        assert code is not None
        if code or running.is_first:
            soon = now + (self._failed_grace_s if code else self._grace_s)
            self._deadline = soon if self._deadline is None else min(soon, self._deadline)
        if code and not running.told:
            self._failed(code)
            if running.child.rank is not None:
                self._note(running.child.rank, *((code, None) if code > 0 else (None, -code)))
            elif code < 0:
                name = Path(running.child.argv[0]).name
                self._killed_starter = f"error: {name}, which had started the ranks, was {_killed_by(-code)}"

    def _failed(self, code: int) -> None:
        """Which of several that fail is seen first is chance, so the worst is what counts."""
        if code not in (WRONG, BAD_INPUT):
            self._code = FAILED
        self._code = self._code or code

    def _note(self, rank: int, code: int | None, number: int | None) -> None:
        """What became of a rank, where it has not said so itself."""
        while self._pump(0):  # what it wrote last may still be in its pipe
            pass
        if self._reason.has_spoken(rank):
            return
        what = f"ended with exit code {code}" if number is None else _killed_by(number)
        # A library that gives up over a lost peer aborts.
        killed = number not in (None, signal.SIGABRT)
        self._reason.add(_Report(rank, rank, f"error: {self._describe(rank)}: {what}", killed))

    def _end_all(self, now: float) -> None:
        for running in self._running:
            if running.code is None:
                running.told = True
                running.process.terminate()
                if self._signal is None and self._running[0].code == 0 and not self._code:
                    self._say_late(running.child.rank)
        self._code = self._code or FAILED
        self._kill_at = now + self._kill_after_s

    def _say_late(self, rank: int | None) -> None:
        assert rank is not None, "mpirun is over, so nothing is late"
        line = f"error: {self._describe(rank)}: did not end within {self._grace_s:g} s of rank 0"
        self._reason.add(_Report(rank, rank, line))

    def _kill_all(self) -> None:
        for running in self._running:
            if running.exit_code() is None:
                running.process.kill()
        if not self._is_supervised:
            for running in self._running:
                running.process.wait()

    def _say_why(self) -> None:
        self._pump_rest()
        if self._signal is not None:
            return
        report = "\n".join(self._held)
        if self._code:
            for found, is_signal in ((_KILLED.search(report), True), (_EXITED.search(report), False)):
                if found:
                    rank, number = int(found[1]), int(found[2])
                    self._note(rank, *((None, number) if is_signal else (number, None)))
        lines = self._reason.in_order()
        if not lines:
            lines += self._held
            if self._code and not self._killed_starter:
                lines.append(f"error: the ranks ended with exit code {self._code}")
        if self._killed_starter:  # it began the end: ranks end with it
            lines.append(self._killed_starter)
        for line in lines:
            _say(line)


def _has_children(pid: int) -> bool:
    """Whether a process below this one runs, or nobody says."""
    try:
        Path(f"/proc/{pid}/task/{pid}/children").read_text()
        below = descendants(pid)
    except OSError:
        return True
    return any(ending.exit_code(one, ending.began(one)) is None for one in below)


def _shown(rank: int | None, line: str) -> str:
    return line if rank in (0, None) else f"[rank {rank}] {line}"


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # nobody reads any more; the job goes on
        pass


def _killed_by(number: int) -> str:
    note = "; if nobody did that, its host ran out of memory" if number == signal.SIGKILL else ""
    return f"killed by {_signal_name(number)}{note}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
