"""A job of real processes: whose lines go where, and that all end within seconds, with the right last line.

Small programs stand in for ranks: what ranks compute is not the point here (`test_launch_ranks` has that).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import why_no_mpi

from jaxlamina.server.pieces import SECRET
from launch.local import free_ports

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 30

JOB = """
import json, os, sys
from launch.processes import Child, Job
from jaxlamina.job.cluster import Cluster
scripts = json.loads(sys.argv[1])
children = [
    Child((sys.executable, "-c", script), rank, dict(os.environ), stdout=rank == 0, stdin=rank == 0)
    for rank, script in enumerate(scripts)
]
describe = Cluster(dop=(1, len(scripts) - 1)).describe
options = {"grace_s": 60, "is_supervised": True} if "supervised" in sys.argv else {"grace_s": 1.5}
if "ends" in sys.argv:
    options |= {"end_s": 20, "folder": sys.argv[-1]}
sys.exit(Job(children, describe, **options).run())
"""
SLEEP = "import time; time.sleep(60)"
# What a rank does whose rank 0 is gone: it reports and ends. A file in the folder stands for the connection.
REPORT = "import os, sys, time\nwhile not os.path.exists('{gone}'): time.sleep(0.01)\n{then}"


def start(*scripts, words=(), **options):
    return subprocess.Popen(
        [sys.executable, "-c", JOB, json.dumps(scripts), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        **options,
    )


def finish(process, text=None):
    """Exit code, stdout, lines of stderr. The job must end by itself, in time."""
    try:
        out, err = process.communicate(text, timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err.splitlines()


def say(text, rest=""):
    return f"import sys; print({text!r}, file=sys.stderr, flush=True)\n{rest}"


def test_rank_0_has_stdin_and_stdout_and_the_others_lines_have_their_rank():
    code, out, err = finish(
        start(
            "import sys; sys.stdout.write('[' + sys.stdin.read() + ']'); print('note', file=sys.stderr)",
            "import sys; print('out'); sys.stdout.flush(); sys.stderr.write('no end of line')",
            "import sys; assert sys.stdin.read() == ''",
            stdin=subprocess.PIPE,
        ),
        "two\nlines, one of them open",
    )
    assert (code, out) == (0, "[two\nlines, one of them open]")
    assert sorted(err) == ["[rank 1] no end of line", "[rank 1] out", "note"]


def test_only_bad_news_of_connections_is_shown():
    well = "[Gloo] Rank {0} is connected to 1 peer ranks. Expected number of connected peer ranks is : {1}"
    code, _, err = finish(start(say(well.format(0, 1)), say(well.format(1, 1), say(well.format(1, 2)))))
    assert code == 0 and err == ["[rank 1] " + well.format(1, 2)]


def test_text_comes_as_it_is_written():
    process = start("import time; print('a', end='', flush=True); time.sleep(60)", SLEEP)
    began = time.monotonic()
    assert process.stdout.read(1) == "a" and time.monotonic() - began < 20
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM


def test_a_failed_rank_ends_the_others_and_has_the_last_line():
    line = "error: rank 2 (attention worker 1): the file is not there"
    began = time.monotonic()
    code, _, err = finish(start(SLEEP, SLEEP, say(line, "sys.exit(7)")))
    assert code == 3 and err[-1] == line and err.count(line) == 1
    assert time.monotonic() - began < 10


def test_the_survivors_reports_come_before_the_line_of_the_rank_that_began_it(tmp_path):
    gone = tmp_path / "gone"
    first = "error: rank 1 (attention worker 0): out of memory"
    report = "error: rank 0 (model worker 0): rank 1 (attention worker 0) is gone in step 7 (decode, batch 8)"
    # Rank 0's report is there before rank 1 has said its own line.
    slow = f"import time; open({str(gone)!r}, 'w').close(); time.sleep(0.5)\n" + say(first, "sys.exit(1)")
    code, _, err = finish(start(REPORT.format(gone=gone, then=say(report, "sys.exit(3)")), slow))
    assert code == 3 and err[-2:] == [report, first]


def test_what_the_others_say_of_a_rank_is_shown_once_and_its_own_words_last(tmp_path):
    gone = tmp_path / "gone"
    line = "error: rank 2 (attention worker 1): out of memory"
    more = "error: rank 2 (attention worker 1): closed its connection in step 7"
    copy = REPORT.format(gone=gone, then=say(line, "sys.exit(3)"))
    other = REPORT.format(gone=gone, then=say(more, "sys.exit(3)"))
    slow = f"import time; open({str(gone)!r}, 'w').close(); time.sleep(0.5)\n" + say(line, "sys.exit(1)")
    code, _, err = finish(start(copy, other, slow))
    assert code == 3 and err == [f"[rank 1] {more}", line]


def test_what_another_says_of_a_rank_will_do_where_it_said_nothing_itself(tmp_path):
    line = "error: rank 1 (attention worker 0): no sign of life for 15 s"
    code, _, err = finish(start(say(line, "sys.exit(3)"), SLEEP))
    assert code == 3 and err == [line]


def test_a_killed_rank_is_named_after_what_the_others_reported(tmp_path):
    gone = tmp_path / "gone"
    report = "error: rank 0 (model worker 0): rank 1 (attention worker 0) closed its connection"
    kill = f"import os; open({str(gone)!r}, 'w').close(); os.kill(os.getpid(), 9)"
    code, _, err = finish(start(REPORT.format(gone=gone, then=say(report, "sys.exit(3)")), kill, SLEEP))
    assert code == 3
    killed = "error: rank 1 (attention worker 0): killed by SIGKILL; if nobody did that, its host ran out of memory"
    assert err == [report, killed]


def test_a_killed_rank_began_it_even_where_others_do_not_know(tmp_path):
    gone = tmp_path / "gone"
    report = "error: rank 0 (model worker 0): a step failed: connection reset by peer"
    kill = f"import os; open({str(gone)!r}, 'w').close(); os.kill(os.getpid(), {{}})"
    scripts = REPORT.format(gone=gone, then=say(report, "sys.exit(3)")), kill.format(11)
    code, _, err = finish(start(*scripts))
    assert code == 3 and err == [report, "error: rank 1 (attention worker 0): killed by SIGSEGV"]
    gone.unlink()
    # But a library that gives up aborts.
    abort = REPORT.format(gone=gone, then="time.sleep(0.3); os.abort()")
    code, _, err = finish(
        start(abort, f"open({str(gone)!r}, 'w').close(); " + say("error: rank 1: no", "exit(2)"))
    )
    assert code == 3 and err[-2:] == [
        "error: rank 0 (model worker 0): killed by SIGABRT",
        "error: rank 1: no",
    ]


def test_a_rank_that_says_nothing_is_named_with_its_exit_code():
    code, _, err = finish(start(SLEEP, "import sys; sys.exit(5)"))
    assert code == 3 and err[-1] == "error: rank 1 (attention worker 0): ended with exit code 5"


def test_a_rank_that_has_said_why_but_does_not_end_is_ended():
    line = "error: rank 1 (attention worker 0): no room for KV"
    began = time.monotonic()
    code, _, err = finish(start(SLEEP, say(line, SLEEP)))
    assert code == 3 and err == [line] and time.monotonic() - began < 10


def test_a_supervised_rank_that_stands_still_is_not_waited_for():
    line = "error: rank 0 (model worker 0): a step with rank 1 (attention worker 0) was not done within 4 s"
    still = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    began = time.monotonic()
    code, _, err = finish(
        start(f"import time; time.sleep(0.5); {say(line, 'exit(3)')}", still, words=["supervised"])
    )
    assert code == 3 and err == [line] and time.monotonic() - began < 20


def test_ranks_that_stay_after_rank_0_is_done_are_ended():
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    began = time.monotonic()
    code, out, err = finish(start("print('done')", ignore))
    assert (code, out) == (3, "done\n") and time.monotonic() - began < 20
    assert err == ["error: rank 1 (attention worker 0): did not end within 1.5 s of rank 0"]


@pytest.mark.parametrize(
    ("codes", "job"), [((0, 0), 0), ((1, 0), 1), ((2, 2), 2), ((2, 3), 3), ((1, 9), 3), ((2, 130), 3)]
)
def test_a_jobs_exit_code_says_what_kind_of_end_it_was(codes, job):
    assert finish(start(*(f"import sys; sys.exit({code})" for code in codes)))[0] == job


def test_rank_0_may_be_done_a_little_before_the_others():
    assert finish(start("print('done')", "import time; time.sleep(0.7)")) == (0, "done\n", [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_and_says_nothing(tmp_path, number):
    here = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w').close(); time.sleep(60)"
    process = start(here, here, here)
    pids = _pids(tmp_path, 3)
    process.send_signal(number)
    assert finish(process)[::2] == (128 + number, [])
    assert not any(_alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("has_an_answer", [False, True])
def test_a_signal_is_rank_0s_once_it_has_an_answer(tmp_path, number, has_an_answer):
    """As a server has, which then brings its work to an end."""
    folder, pids = tmp_path / "folder", tmp_path / "pids"
    folder.mkdir()
    pids.mkdir()
    here = f"import os, time; open(r'{pids}/' + str(os.getpid()), 'w').close(); "
    ends = f"open(r'{folder}/ends', 'w').close(); print('done'); sys.exit(0)"
    first = f"""
import os, signal, sys
def end(*_):
    {ends}
if {has_an_answer}:
    signal.signal(signal.SIGTERM, end)
    open(r'{folder}/first', 'w').write(str(os.getpid()))
{here}
time.sleep(60)
"""
    second = f"{here}\nwhile not os.path.exists(r'{folder}/ends'): time.sleep(0.01)"
    process = start(first, second, words=["ends", str(folder)])
    found = _pids(pids, 2)
    process.send_signal(number)
    assert finish(process) == ((0, "done\n", []) if has_an_answer else (128 + number, "", []))
    assert not any(_alive(pid) for pid in found)


def test_ranks_do_not_outlive_a_starter_that_is_killed(tmp_path):
    here = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w').close(); time.sleep(60)"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + here  # jax.distributed is
    process = start(here, deaf)
    pids = _pids(tmp_path, 2)
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < until, "a rank is still there"
        time.sleep(0.05)
    process.communicate()


def _pids(folder, n):
    until = time.monotonic() + DEADLINE_S
    while len(found := [int(path.name) for path in folder.iterdir()]) < n:
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_free_ports_are_several_and_free():
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


# --- a rank's own start ---


def rank(*arguments, **variables):
    cleared = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "SLURM_", "JAXLAMINA_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=cleared | variables,
    )
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done
    return done.stderr.strip()


def test_a_rank_that_cannot_start_says_which_it_is_and_why(tmp_path):
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    generate = ("generate", "x")
    (tmp_path / "bad.toml").write_text("dop = [1, 2]\ndeadline = 3\n")
    assert rank("--config", str(tmp_path / "bad.toml"), *generate, **mpi).startswith(
        f"error: rank 2: {tmp_path}/bad.toml: unknown key 'deadline'; known: dop"
    )
    assert rank("--sett", "dop=1,2", *generate, **mpi).startswith("error: rank 2: ")
    assert (
        rank("--set", "dop=1,3", *generate, **mpi)
        == "error: rank 2: DOP (1, 3) needs 4 ranks, 3 were started: mpirun -n 4"
    )
    gpus = ("--set", "dop=1,2", "--set", "transport=mpi", "--set", "attention_platform=cuda")
    assert rank(*gpus, *generate, CUDA_VISIBLE_DEVICES="", **mpi).startswith(
        "error: rank 2 (attention worker 1): no GPU is left for this rank: 0 here"
    )
    assert rank(*generate).startswith("error: nothing says which rank this is")
    assert "needs MPI to start the ranks" in rank("--rank", "1", "--set", "transport=mpi", *generate)


@pytest.mark.mpi
def test_all_ranks_of_one_host_by_mpirun_end_with_the_line_of_the_one_that_failed(tmp_path):
    """The real starter and real ranks, one of which has no platform: the only GPU is rank 0's, and hidden."""
    assert why_no_mpi() is None
    words = ["--set", "dop=1,2", "--set", "transport=mpi", "--set", "attention_platform=cuda"]
    done = subprocess.run(
        [sys.executable, "-m", "launch.local", *words, "--set", "start_deadline_s=20", "generate", "x"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0 and not done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith(("error: rank 1 (attention worker 0)", "error: rank 2 (attention worker 1)"))
    assert "no GPU is left for this rank" in last


def start_module(tmp_path, source, *changes, **variables):
    """The real starter, of ranks that run ``source``."""
    (tmp_path / "of_a_test.py").write_text(source)
    words = [word for change in changes for word in ("--set", change)]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.local", *words, "--module", "of_a_test"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "JAX_PLATFORMS": "cpu"} | variables,
        stdin=subprocess.DEVNULL,
    )


def segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith("vader_segment")}


DOES_NOT_MEET = """
import sys, time
from jaxlamina import ranks
def main(cluster, rank):
    if rank == 2:  # alive, with all of its heartbeats
        sys.modules[ranks.serve.__module__].open_transport = lambda *_, **__: time.sleep(1000)
    return ranks.serve(cluster, rank) if rank else ranks.join(cluster, 0).close() or 0
"""


def test_a_rank_that_does_not_come_to_the_first_exchange_is_named(tmp_path):
    words = ["dop=1,2", "start_deadline_s=8", "model_platform=cpu", "attention_platform=cpu"]
    process = start_module(tmp_path, DOES_NOT_MEET, *words)
    code, _, err = finish(process)
    missing = "(rank 2 (attention worker 1) did not come to it)"
    late = f"the ranks' first exchange was not done within 8 s {missing}"
    assert code == 3 and err[-1] == f"error: rank 0 (model worker 0): {late}", err


ENTERS_MPI = """
import os, time
from mpi4py import MPI
def main(cluster, rank):
    MPI.COMM_WORLD.Barrier()
    print("among", os.getppid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.mpi
def test_a_killed_mpirun_is_named_and_leaves_nothing(tmp_path):
    assert why_no_mpi() is None
    (tmp_path / "tmp").mkdir()
    before = segments()
    process = start_module(tmp_path, ENTERS_MPI, "transport=mpi", TMPDIR=str(tmp_path / "tmp"))
    said = next(line for line in process.stderr if "among" in line)
    [folder] = (tmp_path / "tmp").glob("jaxlamina-mpi-*")
    assert [path.name for path in folder.iterdir() if path.name.startswith("ompi.")]
    os.kill(int(said.split()[-1]), signal.SIGKILL)
    code, _, err = finish(process)
    killed = "error: mpirun, which had started the ranks, was killed by SIGKILL; if nobody did that, its host"
    assert code == 3 and err[-1] == f"{killed} ran out of memory"
    assert not segments() - before and not list((tmp_path / "tmp").iterdir())


LOSES_RANK_1 = """
import os, signal, sys, time
from mpi4py import MPI
def main(cluster, rank):
    MPI.COMM_WORLD.Barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun's, which may be first
    time.sleep(0.2)
    print("error: rank 1 (attention worker 0) has gone", file=sys.stderr, flush=True)
    os._exit(3)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_supervisor_does_not_wait_for_mpirun_when_all_ranks_have_ended(tmp_path, is_supervised):
    """It goes on for a second, and only then says how a rank has ended."""
    (tmp_path / "tmp").mkdir()
    before = segments()
    supervised = {SECRET: "secret"} if is_supervised else {}
    variables = {"TMPDIR": str(tmp_path / "tmp")} | supervised
    process = start_module(tmp_path, LOSES_RANK_1, "transport=mpi", **variables)
    code, _, err = finish(process)
    how = {
        True: "ended without a word: it was killed, or it crashed",
        False: "killed by SIGKILL; if nobody did",
    }
    assert code == 3 and err[-1].startswith(f"error: rank 1 (attention worker 0): {how[is_supervised]}"), err
    assert not segments() - before and not list((tmp_path / "tmp").iterdir())


ONE_SAYS_WHY = """
import os, sys, time
from mpi4py import MPI
def main(cluster, rank):
    MPI.COMM_WORLD.Barrier()
    if rank == 1:
        print("error: rank 1 (attention worker 0): kv_slots is not good", file=sys.stderr, flush=True)
        os._exit(2)
    if rank == 2:
        time.sleep(60)
    time.sleep(0.15)
    print("error: rank 2 (attention worker 1) has gone", file=sys.stderr, flush=True)
    os._exit(3)
"""


@pytest.mark.mpi
def test_a_rank_that_says_why_is_heard_before_one_that_is_lost(tmp_path):
    """Also by a supervisor: mpirun ends the others, and its exit code is the first one's."""
    process = start_module(tmp_path, ONE_SAYS_WHY, "dop=1,2", "transport=mpi", **{SECRET: "secret"})
    code, _, err = finish(process)
    assert code == 2 and err[-1].endswith("rank 1 (attention worker 0): kv_slots is not good"), err


@pytest.mark.mpi
def test_ranks_of_one_host_need_no_ssh(tmp_path):
    """As in many containers. mpirun looks for it in any case."""
    for name in ("mpirun", "orted"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "launch.local",
            "--set",
            "transport=mpi",
            "--module",
            "jaxlamina.process.kept_folders",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
