"""Processes that end, and what is known of them before they are gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from serving import ROOT
from supervised import wait_until

from jaxlamina.process import ending
from jaxlamina.supervisor.leaving import Leaving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nobody says so elsewhere")

SLEEPS = "import time; time.sleep(600)"
# The kernel takes a while to free so much memory.
MAPS = "import mmap; m = mmap.mmap(-1, 2**30); m.madvise(mmap.MADV_NOHUGEPAGE); m.write(bytes(2**30)); "
# The first thread ends by itself, and another one goes on.
ENDS_ONE_THREAD = (
    "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
    "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
)


@contextmanager
def process(program):
    """One that is killed at the end, and that has begun."""
    words = [sys.executable, "-c", program.replace("import time; ", "import time; print(flush=True); ")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as found:
        assert found.stdout is not None
        found.stdout.readline()
        try:
            yield found
        finally:
            found.kill()


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_killed_process_has_ended_before_it_is_waited_for():
    with process(SLEEPS) as child:
        began = ending.began(child.pid)
        assert began is not None and ending.exit_code(child.pid, began) is None
        child.kill()
        wait_until(lambda: state(child.pid) == "Z", 20)
        assert ending.exit_code(child.pid, began) == -signal.SIGKILL
        assert ending.exit_code(child.pid, began + 1) is None  # another one of that number
        assert child.wait() == -signal.SIGKILL
        assert ending.exit_code(child.pid, began) is None and ending.began(child.pid) is None


def test_a_killed_process_has_ended_before_its_memory_is_free():
    with process(MAPS + SLEEPS) as child:
        began = ending.began(child.pid)
        child.kill()
        wait_until(lambda: ending.exit_code(child.pid, began) is not None, 20)
        assert child.poll() is None, "its memory was free at once, so that this shows nothing"
        assert ending.exit_code(child.pid, began) == -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 3])
def test_a_code_is_the_process_own(code):
    with process(f"import time; raise SystemExit({code})") as child:
        began = ending.began(child.pid)
        wait_until(lambda: state(child.pid) == "Z", 20)
        assert ending.exit_code(child.pid, began) == code == child.wait()


def test_a_process_that_stands_still_has_not_ended():
    with process(SLEEPS) as child:
        began = ending.began(child.pid)
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(child.pid) == "T", 20)
        assert ending.exit_code(child.pid, began) is None


def test_a_process_runs_for_as_long_as_any_of_its_threads():
    with process(ENDS_ONE_THREAD) as child:
        began = ending.began(child.pid)
        wait_until(lambda: state(child.pid) == "Z", 20)
        assert ending.exit_code(child.pid, began) is None and child.poll() is None
        child.kill()
        wait_until(lambda: ending.exit_code(child.pid, began) == -signal.SIGKILL, 20)


def test_where_nobody_says_waiting_is_left(monkeypatch):
    with process(SLEEPS) as child:
        child.kill()
        wait_until(lambda: state(child.pid) == "Z", 20)
        monkeypatch.setattr(ending, "_stat", lambda path: None)
        assert ending.began(child.pid) is None and ending.exit_code(child.pid, None) is None


def test_what_a_process_starts_ends_with_it_before_either_is_gone():
    """Here the child is taken away late, so that what it has started is not this process's meanwhile."""
    grandchild = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); "
    with process(MAPS + grandchild + "import time; print(p.pid); time.sleep(600)") as child:
        assert child.stdout is not None
        other, began = int(child.stdout.readline()), ending.began(child.pid)
        since = ending.began(other)
        child.kill()
        leaving = Leaving()

        async def end():
            await leaving.end_all(lambda: but_others(child.pid), 0.0)
            assert leaving and ending.began(child.pid) == began
            assert ending.exit_code(other, since) is not None or ending.began(other) != since
            await leaving.gone()
            assert not leaving and ending.began(child.pid) is None

        asyncio.run(asyncio.wait_for(end(), 30))


def but_others(pid):
    """The processes that the tests' own process has, apart from one."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found |= {int(x) for x in file.read().split()}
    return found - {pid}


def test_what_does_not_end_is_killed_after_its_time():
    with process(SLEEPS) as child:
        leaving, began = Leaving(), time.monotonic()
        asyncio.run(asyncio.wait_for(leaving.end_all(lambda: but_others(child.pid), 0.5), 30))
        assert time.monotonic() - began >= 0.5
        asyncio.run(leaving.gone())
        assert ending.began(child.pid) is None


NO_FILES = """
import asyncio, os, resource, subprocess
from jaxlamina.supervisor.leaving import Leaving

child = subprocess.Popen(["sleep", "600"])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

async def main():
    leaving, files = Leaving(), []
    try:
        while True:
            files.append(os.open("/dev/null", 0))
    except OSError:
        ending = asyncio.create_task(leaving.end_all(lambda: [], 0.0))
        await asyncio.sleep(0.1)
    print(child.poll(), ending.done(), flush=True)
    while files:
        os.close(files.pop())
    await ending
    await leaving.gone()
    print(child.poll() is not None, flush=True)

asyncio.run(main())
"""


def test_what_nobody_says_to_be_gone_is_waited_for():
    """Here no file can be opened, so that /proc says nothing."""
    words = [sys.executable, "-c", NO_FILES]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.splitlines() == ["None False", "True"], done.stderr


# Answers /health at once, as a spare or one that imports ahead when it is its turn.
SERVER = """
import http.server, os, pathlib, socketserver, sys, time
path = sys.argv[-1]
if "JAXLAMINA_STANDBY" in os.environ or os.environ.get("JAXLAMINA_IMPORTS") == path:
    pathlib.Path(path + ".stands-by").touch()
    while not os.path.exists(path + ".takes-over"):
        time.sleep(0.01)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *of_it):
        pass
socketserver.ThreadingUnixStreamServer(path, Handler).serve_forever()
"""
# A process of its own, since a supervisor ends all others that are below it. What is killed stays for as long as
# its number is in `held`.
SUPERVISOR = """
import asyncio, os, subprocess, sys
from pathlib import Path
from jaxlamina.supervisor import leaving
from jaxlamina.supervisor.changes import JobCommand
from jaxlamina.supervisor.child import SupervisedJob

held, polled, is_gone = set(), subprocess.Popen.poll, leaving._is_gone
subprocess.Popen.poll = lambda self: None if self.pid in held else polled(self)
leaving._is_gone = lambda pid, began: pid not in held and is_gone(pid, began)

async def spare_of(job):
    while job.spare_state != "standing by":
        await asyncio.sleep(0.02)

async def main():
    times = dict(stuck_after_s=30, step_s=30, start_s=30, recovery_s=30, shutdown_s=30)
    job = SupervisedJob(JobCommand((sys.executable, *sys.argv[2:])), Path(sys.argv[1]), n_spare=1, **times)
    running = asyncio.create_task(job.run())
    first = await job.ready(20)
    await asyncio.wait_for(spare_of(job), 20)
    held.add(first.process.pid)
    first.process.kill()
    second = await job.ready(20, after=first.n)
    print(second.n, job.causes[0].text, Path(f"/proc/{first.process.pid}").exists(), flush=True)
    await asyncio.sleep(0.5)
    print(job.n_starts, job.spare_state, flush=True)
    held.clear()
    await asyncio.wait_for(spare_of(job), 20)
    print(job.n_starts, Path(f"/proc/{first.process.pid}").exists(), flush=True)
    job.end()
    job.end()
    await running

asyncio.run(main())
"""


def test_a_spare_takes_over_from_what_is_not_gone_and_the_next_one_waits_for_that(tmp_path):
    words = [sys.executable, "-c", SUPERVISOR, str(tmp_path), "-c", SERVER]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.splitlines() == ["2 killed by SIGKILL True", "2 none", "3 False"], done.stderr
