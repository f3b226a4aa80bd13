"""A job below a supervisor, where the system does not let it start, or it is to end just then. Real processes of a
few lines; a supervisor in a process of its own, since it ends all others that are below it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from serving import ROOT
from test_ending import SERVER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nobody says so elsewhere")

# With two attention workers it is not ready for as long as a file is there, and ends if another one is.
PROGRAM = f"""
import os, pathlib, subprocess, sys, time
here = pathlib.Path(sys.argv[-1]).parents[1]
while 'dop="1,2"' in sys.argv and (here / "hold").exists():
    time.sleep(0.01)
if 'dop="1,2"' in sys.argv and (here / "broken").exists():
    sys.exit(1)
if 'dop="1,2"' in sys.argv and (here / "wrong").exists():
    wrong = [{sys.executable!r}, "-m", "jaxlamina", "plan", "--model", "nothing-there"]
    sys.exit(subprocess.run(wrong).returncode)
{SERVER}
"""
# `python` is a link: without it nothing can be started.
SUPERVISOR = """
import asyncio, json, logging, os, signal, subprocess, sys
from pathlib import Path
from jaxlamina.server.errors import ApiError
from jaxlamina.supervisor import leaving
from jaxlamina.supervisor.changes import JobCommand, Workers
from jaxlamina.supervisor.child import Cause, GivenUp, NotChanged, SupervisedJob
from jaxlamina.supervisor.operating import Operating

logging.basicConfig(format="log: %(message)s", stream=sys.stdout, level=logging.INFO)
folder, python = Path(sys.argv[1]) / "sockets", Path(sys.argv[1]) / "python"
folder.mkdir()
python.symlink_to(sys.executable)

async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)

async def main(how):
    times = dict(stuck_after_s=30, step_s=30, start_s=30, recovery_s=30, shutdown_s=30) | how
    command = JobCommand((str(python), "-c", sys.argv[2], "--", "serve"), Workers(1, 1, 0))
    job = SupervisedJob(command, folder, **times)
    running = asyncio.create_task(job.run())
    await scenario(job, running)
    job.end()
    job.end()
    await running
    print("ended", flush=True)
"""


def supervise(tmp_path, scenario, job=PROGRAM, **how):
    """The lines of a supervisor that runs ``scenario(job, running)``; ``job``: the program it starts; ``how``: its
    settings."""
    program = f"{SUPERVISOR}\nasync def scenario(job, running):\n{textwrap.indent(textwrap.dedent(scenario), '    ')}"
    words = [sys.executable, "-c", f"{program}\nasyncio.run(main({how}))", str(tmp_path), job]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "ended", done.stdout + done.stderr
    return lines[:-1]


def test_a_start_that_the_system_refuses_is_a_failed_one(tmp_path):
    """It is tried again after a pause, and whoever waits gets the job."""
    scenario = """
        first = await job.ready(20)
        python.unlink()
        first.process.kill()
        waiting = asyncio.create_task(job.ready(20, after=first.n))
        await until(lambda: len(job.causes) == 2)
        python.symlink_to(sys.executable)
        second = await waiting
        print(second.n, [cause.kind for cause in job.causes], job.state)
    """
    *lines, said = supervise(tmp_path, scenario)
    assert said == "3 ['killed', 'start'] ready"
    assert any("could not be started: [Errno 2]" in line and "again in 1 s" in line for line in lines), lines


def test_a_first_start_that_the_system_refuses_is_given_up(tmp_path):
    scenario = """
        python.unlink()
        try:
            await job.ready(20)
        except GivenUp as error:
            print("given up:", error, job.code)
    """
    said = supervise(tmp_path, scenario)[-1]
    assert said.startswith("given up: the job ended: it could not be started: [Errno 2]"), said
    assert said.endswith(" 3")


def test_a_job_that_is_asked_to_end_and_has_no_answer_to_it_ends_well(tmp_path):
    """As it has none while it starts."""
    scenario = """
        await until(lambda: job._running is not None)
        job.end()
        await running
        print(job.code, job.given_up)
    """
    assert supervise(tmp_path, scenario)[-1] == "0 the server has shut down"


@pytest.mark.parametrize(
    "does",
    ["kill()", "job.change(job.command, 'as asked', stop_first=True, deadline_s=20)"],
    ids=["killed", "planned"],
)
def test_a_job_that_has_just_ended_otherwise_and_is_asked_to_ends_well(tmp_path, does):
    """While what is left of it ends, as that of a large one takes a moment."""
    scenario = f"""
        first = await job.ready(20)
        end_all = job._leaving.end_all

        async def later(*how):
            await asyncio.sleep(0.3)
            await end_all(*how)

        async def kill():
            first.process.kill()

        job._leaving.end_all = later
        doing = asyncio.ensure_future({does})
        await until(lambda: not job._is_ready)
        job.end()
        await running
        await asyncio.wait([doing])
        print(job.code, doing.exception() or job.given_up)
    """
    assert supervise(tmp_path, scenario)[-1] == "0 the server has shut down"


def test_a_job_that_is_asked_to_end_and_does_not_is_killed(tmp_path):
    scenario = """
        pid = (await job.ready(20)).process.pid
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        job.end()
        await running
        print(job.code, job.given_up)
    """
    *lines, said = supervise(tmp_path, scenario, shutdown_s=0.5)
    assert said == "-9 the server has shut down"
    assert any("did not end within 0.5 s of when it was asked to" in line for line in lines), lines


def test_a_job_that_ends_may_be_silent(tmp_path):
    """As one of ranks is, whose server is gone before all of them are."""
    scenario = """
        await job.ready(20)
        job.end()
        await running
        print(job.code, job.given_up)
    """
    ends_late = """
        import os, signal, time
        def end(*_):
            os.rename(path, path + ".closed")
            time.sleep(3)
            os._exit(5)
        signal.signal(signal.SIGTERM, end)
    """
    lines = supervise(tmp_path, scenario, textwrap.dedent(ends_late) + PROGRAM, stuck_after_s=0.5)
    assert lines[-1] == "5 the server has shut down", lines


def test_a_spare_that_cannot_be_told_is_a_failed_start(tmp_path):
    """It is ended, and another one is started."""
    scenario = """
        first = await job.ready(20)
        await until(lambda: job.spare_state == "standing by")
        spare, away = job._spare, folder.with_name("away")
        folder.rename(away)
        first.process.kill()
        await until(lambda: len(job.causes) == 2)
        away.rename(folder)
        third = await job.ready(20, after=spare.n)
        print(third.n, [cause.kind for cause in job.causes], spare.process.poll() is not None)
    """
    assert supervise(tmp_path, scenario, n_spare=1)[-1] == "3 ['killed', 'start'] True"


def test_without_a_spare_the_next_start_has_its_imports_and_waits_for_the_end_of_the_other(tmp_path):
    scenario = """
        first = await job.ready(20)
        await until(lambda: job.spare_state == "imported")
        ahead = job._spare
        print(job.n_starts, ahead.imports_alone, ahead.stands_by)
        may_go, gone = asyncio.Event(), job._leaving.gone

        async def gone_later():
            await may_go.wait()
            await gone()

        job._leaving.gone = gone_later
        first.process.kill()
        await until(lambda: len(job.causes) == 1)
        await asyncio.sleep(0.3)
        print(job.state, Path(f"{ahead.socket}.takes-over").exists(), job.n_starts)
        may_go.set()
        second = await job.ready(20, after=first.n)
        print(second is ahead, job.n_starts, [cause.kind for cause in job.causes])
        await until(lambda: job.spare_state == "imported" and job._spare is not ahead)
        print(job.n_starts)
    """
    lines = supervise(tmp_path, scenario, imports_after_s=0.0)
    said = [line for line in lines if not line.startswith("log: ")]
    assert said == ["1 True True", "recovering False 1", "True 2 ['killed']", "2"], lines


def test_imports_ahead_that_end_are_begun_again_and_those_of_another_command_are_not_taken(tmp_path):
    scenario = """
        first = await job.ready(20)
        await until(lambda: job.spare_state == "imported")
        ended = job._spare
        ended.process.kill()
        await until(lambda: job.spare_state == "imported" and job._spare is not ended)
        other = job._spare
        job.command = job.command.and_more("more")
        first.process.kill()
        second = await job.ready(20, after=first.n)
        print(second.command[-1], second is other, job.n_starts)
    """
    lines = supervise(tmp_path, scenario, imports_after_s=0.0)
    assert [line for line in lines if not line.startswith("log: ")] == ["more False 2"], lines


def test_a_spare_that_the_system_refuses_is_said_and_tried_again(tmp_path):
    scenario = """
        await until(lambda: job._running is not None)
        python.unlink()
        await until(lambda: job.n_starts == 2)
        print(job.spare_state)
        python.symlink_to(sys.executable)
        await until(lambda: job.spare_state == "standing by")
        print(job.n_starts)
    """
    lines = supervise(tmp_path, scenario, n_spare=1)
    assert [line for line in lines if not line.startswith("log: ")] == ["none", "3"]
    assert any("a spare could not be started: [Errno 2]" in line for line in lines), lines


def test_a_fault_of_the_supervisors_own_is_said_to_whoever_waits(tmp_path):
    """And nothing is left of the job."""
    scenario = """
        first = await job.ready(20)

        async def broken(running):
            raise RuntimeError("broken")

        job._health = broken
        try:
            await job.ready(20, after=first.n)
        except GivenUp as error:
            print(error)
        await running
        print(job.state, job.code, first.process.poll() is not None)
    """
    lines = supervise(tmp_path, scenario)
    assert "internal error of the supervisor (RuntimeError: broken)" in lines
    assert lines[-1] == "failed 3 True"


def test_a_signal_while_a_start_waits_for_memory_ends_all(tmp_path):
    """What is killed stays for as long as it is held."""
    scenario = """
        held, polled, is_gone = set(), subprocess.Popen.poll, leaving._is_gone
        subprocess.Popen.poll = lambda self: None if self.pid in held else polled(self)
        leaving._is_gone = lambda pid, began: pid not in held and is_gone(pid, began)
        first = await job.ready(20)
        held.add(first.process.pid)
        first.process.kill()
        await until(lambda: job.causes)
        await asyncio.sleep(0.1)
        print(bool(job._leaving))
        job.end()
        held.clear()
        await asyncio.wait_for(running, 20)
        print(job.n_starts, job.code, job.given_up)
    """
    assert supervise(tmp_path, scenario)[-2:] == ["True", "1 0 the server has shut down"]


def test_a_signal_while_a_start_is_put_off_ends_all_at_once(tmp_path):
    scenario = """
        first = await job.ready(20)
        job._retrying.ended = lambda *of_it, was_ready, is_first: 0 if was_ready else 600
        python.unlink()
        first.process.kill()
        await until(lambda: len(job.causes) == 2)
        job.end()
        await asyncio.wait_for(running, 20)
        print(job.n_starts, job.given_up)
    """
    assert supervise(tmp_path, scenario)[-1] == "2 the server has shut down"


def test_a_signal_during_a_change_leaves_the_job_to_finish(tmp_path):
    """The new one is ended with it."""
    scenario = """
        first = await job.ready(20)
        changing = asyncio.create_task(job.change(job.command, "", stop_first=False, deadline_s=20))
        await until(lambda: job._spare is not None)
        new = job._spare
        first.process.send_signal = lambda number: None  # it takes its time
        job.end()
        del first.process.send_signal
        try:
            await changing
        except NotChanged as error:
            print(error)
        print(first.exit_code(), new.exit_code())
    """
    assert supervise(tmp_path, scenario)[-2:] == ["the server is shutting down", "None None"]


def test_a_change_that_cannot_be_says_what_its_job_said(tmp_path):
    """The line of the first of its processes that ended with an error."""
    (tmp_path / "wrong").touch()
    scenario = """
        operating = Operating(job)
        await job.ready(20)
        try:
            await operating.apply(json.dumps(dict(instruction="scale", attention=1)).encode())
        except ApiError as error:
            print(error.status, error)
        print([path.name for path in folder.glob("*.why")], operating.status()["workers"]["attention"])
    """
    said, left = (line for line in supervise(tmp_path, scenario) if not line.startswith("log: "))
    assert said.startswith("409 the new job ended with code 2: no model shape 'nothing-there'"), said
    assert said.endswith("; the one before it runs on") and left == "[] 1"


@pytest.mark.parametrize(("comes", "workers"), [(True, 2), (False, 1)])
def test_a_change_that_is_late_is_under_way_and_known_when_it_is_over(tmp_path, comes, workers):
    """Whether the changed job comes, or the one before it again; later changes begin there."""
    (tmp_path / "hold").touch()
    scenario = f"""
        operating, n = Operating(job), (await job.ready(20)).n

        async def scale(timeout_s):
            change = dict(instruction="scale", attention=1, stop_first=True, timeout=timeout_s)
            return await operating.apply(json.dumps(change).encode())

        try:
            await scale(1)
        except ApiError as error:
            print(error.status, error.code, "still under way" in str(error))
        hold = folder.parent / "hold"
        if not {comes}:
            hold.with_name("broken").touch()
        hold.unlink()
        await job.ready(20, after=n)
        print(operating.status()["workers"]["attention"])
        hold.with_name("broken").unlink(missing_ok=True)
        print((await scale(20))["job"], [word for word in job._running.command if "dop" in word][-1])
    """
    lines = [line for line in supervise(tmp_path, scenario) if not line.startswith("log: ")]
    more = workers + 1
    assert lines == ["503 still_changing True", f"{workers}", f'DOP (1, {more}) dop="1,{more}"']
