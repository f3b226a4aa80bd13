"""Real jobs over real ranks, as users start them: the right text, and an end with the right line when a rank
fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from certificates import certificate
from checkpoint_examples import tiny_words_folder
from launch_hosts import Hosts, why_no_hosts

from jaxlamina.weights import demo
from launch.commands import IN_MEMORY, OPEN_MPI
from launch.local import free_ports

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 120
STARTED: list[subprocess.Popen] = []
MPI = pytest.param("mpi", marks=pytest.mark.mpi)
PROMPTS = ("w1 w2 w3", "w9", "w5 w6 w7 w8 w9 w10 w11 w12 w13")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Hugging Face folder of a model with two layers, random weights and 64 words."""
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def unsplit(tiny):
    """What one process without any split writes."""
    return finish(start("-m", "jaxlamina", *generate("--no-split", model=tiny)))[1]


def generate(*options, n=24, model=None):
    to = () if model is None else ("--model", str(model))
    return ("generate", *to, "--raw", "--ignore-eos", "--max-tokens", str(n), *options, *PROMPTS)


def start(*words, before=(), **variables):
    """A Python process, of ours and without what another starter may have left in the environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "JAXLAMINA_"))}
    process = subprocess.Popen(
        [*before, sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def end(process):
    for group in {process.pid, *pids(process).values()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Whatever a test that failed has left running is ended."""
    yield
    while STARTED:
        with STARTED.pop() as process:
            end(process)


def finish(process, timeout=DEADLINE_S):
    """Exit code, stdout, lines of stderr. It must end by itself in time."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        pytest.fail(f"not over within {timeout} s; stderr so far: {process.communicate()[1]}")
    return process.returncode, out, err.splitlines()


def launched(transport, tiny, *options, command):
    on_cpus = ("--set", "model_platform=cpu", "--set", "attention_platform=cpu")
    words = ("--transport", transport, "--model", str(tiny), *on_cpus, *options)
    return start("-m", "jaxlamina", "launch", *words, "--", *command)


def pids(process):
    """rank → process number, of a job that `launched` started: by what its starter told each."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(e.partition("=")[::2] for e in (folder / "environ").read_text().split("\0"))
            words = (folder / "cmdline").read_text().split("\0")
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, UnicodeDecodeError):
            continue
        if "launch" not in words or session != process.pid:
            continue  # mpirun's ranks lead no session of their own
        for name in ("JAXLAMINA_RANK", "OMPI_COMM_WORLD_RANK"):
            if name in environment:
                found[int(environment[name])] = int(folder.name)
    return found


# --- the right text ---


@pytest.mark.parametrize(
    ("transport", "partition"),
    [
        pytest.param("mpi", "requests", marks=pytest.mark.mpi),
        pytest.param("xla", "heads", marks=pytest.mark.slow),  # by TLS: below
    ],
)
def test_a_launched_job_writes_what_one_process_writes(tiny, unsplit, transport, partition):
    options = ("--dop", "1,2", "--partition", partition)
    code, out, err = finish(launched(transport, tiny, *options, command=generate()))
    assert code == 0, err
    assert (
        out == unsplit and out.count("w") == 3 * 24
    )  # and what libraries print by themselves is not on stdout
    assert err[-1].endswith(f"memory pool on rank 1, rank 2 by {transport}")


@pytest.mark.slow
@pytest.mark.skipif(demo.present() is None, reason="the demo model is not here: make demo")
@pytest.mark.parametrize("transport", [MPI, "xla"])
def test_the_demo_model_over_three_attention_workers(transport):
    command = ("generate", "--max-tokens", "64", "What is gravity?")
    alone = finish(start("-m", "jaxlamina", *command, "--no-split"))[1]
    code, out, err = finish(launched(transport, "smollm2-135m-instruct", "--dop", "1,3", command=command))
    assert code == 0, err
    assert out == alone and out.strip()


@pytest.mark.mpi
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root mounts a disk")
@pytest.mark.parametrize("size", ["64m", "192m"])
def test_ranks_whose_shared_memory_would_be_too_small_send_by_tcp(tiny, unsplit, size):
    """A container's /dev/shm, where a rank that finds it full would be ended by SIGBUS."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", mount, "sh")
    words = ("--set", "dop=1,2", "--set", "transport=mpi", "--set", f"model={tiny}")
    code, out, err = finish(start("-P", "-m", "launch.local", *words, "--", *generate(), before=before))
    assert code == 0 and out == unsplit, err
    assert ("/dev/shm has 64 MiB left: ranks send to each other by TCP" in "\n".join(err)) == (size == "64m")


@pytest.mark.mpi
def test_two_hosts_with_addresses_of_their_own(tiny, unsplit, tmp_path):
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    settings = {"dop": "1,2", "transport": "mpi", "partition": "tokens", "token_block": 4, "model": tiny}
    with Hosts(tmp_path) as hosts:
        settings["control"] = f"{hosts.addresses[0]}:29400"
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        mpirun = ("mpirun", "-n", "3", "--hostfile", str(hosts.hostfile(1, 2)), "--allow-run-as-root")
        reach = ("--mca", "plm_rsh_agent", str(hosts.agent), "-x", "PYTHONPATH", "-x", "JAX_PLATFORMS")
        before = hosts.on_first(*mpirun, *OPEN_MPI, *IN_MEMORY, *reach)
        process = start("-P", "-m", "launch", *words, "--", *generate(), before=before)
        code, out, err = finish(process)
    assert code == 0, err
    assert out == unsplit


# --- a rank that fails ---


def long_job(transport, tiny, *options, dop="1,2"):
    """A job that has begun to write, and would for minutes; and its ranks' processes."""
    command = ("generate", "--raw", "--ignore-eos", "--max-tokens", "8000", "w1 w2")
    n_ranks = sum(map(int, dop.split(",")))
    # On one host nothing would be left to attention workers.
    split = () if dop.endswith(",0") else ("--partition", "requests", "--local-attention", "0")
    words = ("--dop", dop, *split, *options)
    process = launched(transport, tiny, *words, command=command)
    assert process.stdout.read(40), process.stderr.read()  # streamed text: steps are running
    ranks = pids(process)
    assert sorted(ranks) == [*range(n_ranks)]
    return process, ranks


def gone(ranks):
    """Whether all processes end, within a second."""
    until = time.monotonic() + 1
    while left := [pid for pid in ranks.values() if Path(f"/proc/{pid}/exe").exists()]:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return not left


@pytest.mark.parametrize(
    ("transport", "rank", "role", "dop"),
    [
        pytest.param("mpi", 2, "attention worker 1", "1,2", marks=pytest.mark.mpi),
        ("xla", 1, "model worker 1", "2,1"),
        pytest.param("xla", 2, "attention worker 1", "1,2", marks=pytest.mark.slow),
        pytest.param("mpi", 1, "model worker 1", "2,0", marks=[pytest.mark.mpi, pytest.mark.slow]),
    ],
)
def test_a_killed_rank_ends_the_job_and_is_named(tiny, transport, rank, role, dop):
    several = {"2,1": ("--set", "n_batches=3"), "2,0": ("--set", "tensor_parallel=2")}
    process, ranks = long_job(transport, tiny, *several.get(dop, ()), dop=dop)
    began = time.monotonic()
    os.kill(ranks[rank], signal.SIGKILL)
    code, _, err = finish(process, timeout=40)
    assert time.monotonic() - began < 15 and code == 3 and gone(ranks), err
    assert err[-1].startswith(f"error: rank {rank} ({role}): killed by SIGKILL"), err


def test_a_rank_that_stands_still_ends_the_job_after_the_deadline(tiny):
    process, ranks = long_job("xla", tiny, "--set", "step_deadline_s=4", "--set", "heartbeat_s=60")
    for _ in range(5):  # if it is stopped while it compiles a bucket, no step is late: again, a little later
        os.kill(ranks[1], signal.SIGSTOP)
        until = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        if process.poll() is not None:
            break
        os.kill(ranks[1], signal.SIGCONT)
        time.sleep(0.7)
    code, _, err = finish(process, timeout=5)
    assert code == 3 and gone(ranks), err
    # Somebody who still runs says which step, and with whom.
    assert "was not done within 4 s" in err[-1] and "decode, batch 1" in err[-1], err
    assert err[-1].startswith(("error: rank 0 (model worker 0): ", "error: rank 2 (attention worker 1): "))


def by_hand(tiny, rank, port, *changes):
    settings = {
        "control": f"127.0.0.1:{port}",
        "coordinator": f"127.0.0.1:{port + 1}",
        "model": tiny,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    words = [part for word in [*words, "start_deadline_s=60", *changes] for part in ("--set", word)]
    return start(
        "-m", "launch", *words, "--rank", str(rank), "--", *generate(), JAXLAMINA_JOB="a word of this job"
    )


def test_ranks_may_come_in_any_order(tiny, unsplit):
    port = free_ports(1)[0]
    first = by_hand(tiny, 1, port)
    time.sleep(4)  # long enough to have tried in vain
    assert first.poll() is None
    code, out, err = finish(by_hand(tiny, 0, port))
    assert code == 0, err
    assert out == unsplit
    assert finish(first)[0] == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_a_job_by_tls_writes_the_same_and_a_rank_without_says_what_is_wrong(tiny, unsplit, tmp_path):
    files = zip(("control_certfile", "control_keyfile"), certificate(tmp_path, "job"), strict=True)
    by_tls = [f'{key}="{path}"' for key, path in files]
    options = [word for key in by_tls for word in ("--set", key)]
    code, out, err = finish(launched("xla", tiny, "--dop", "1,2", *options, command=generate()))
    assert (code, out) == (0, unsplit), err
    port = free_ports(1)[0]
    plain = by_hand(tiny, 1, port)
    finish(by_hand(tiny, 0, port, "start_deadline_s=8", *by_tls), timeout=50)
    code, _, err = finish(plain, timeout=20)
    assert code != 0 and "speaks TLS, and this rank has no control_certfile" in err[-1]


def secret_file(folder, name, content=b"0123456789abcdef0123", mode=0o600):
    path = folder / name
    path.write_bytes(content)
    path.chmod(mode)
    return f'job_secret_file="{path}"'


def test_a_rank_with_another_config_is_refused_and_both_say_what_differs(tiny, tmp_path):
    """Rank 0 knows it by the secret of a file, each host's its own: else it would wait for another."""
    port = free_ports(1)[0]
    other = by_hand(tiny, 1, port, "token_block=4", secret_file(tmp_path, "of rank 1"))
    code, out, err = finish(
        by_hand(tiny, 0, port, "token_block=8", secret_file(tmp_path, "of 0")), timeout=50
    )
    other_code, _, other_err = finish(other, timeout=20)
    assert code != 0 and other_code != 0 and not out
    assert err[-1].startswith("error: rank 0 (model worker 0): "), err
    assert other_err[-1].startswith("error: rank 1 (attention worker 0): "), other_err
    assert "token_block is 4 there and 8 on rank 0" in err[-1]
    assert "token_block is not the same on rank 0" in other_err[-1] and "8" not in other_err[-1]


def test_a_rank_with_another_secret_is_no_rank_and_says_so(tiny, tmp_path):
    port = free_ports(1)[0]
    own = secret_file(tmp_path, "own"), secret_file(tmp_path, "other", b"another secret of this rank")
    stranger = by_hand(tiny, 1, port, own[1])
    code, _, err = finish(by_hand(tiny, 0, port, own[0], "start_deadline_s=8"), timeout=50)
    assert code != 0 and "did not start within 8 s" in err[-1] and "is of another job" in err[-1]
    code, _, err = finish(stranger, timeout=20)
    assert code != 0 and "without a proof that it is of this job" in err[-1] and "job_secret_file" in err[-1]


def test_a_secret_that_others_may_read_is_refused_before_anything_starts(tiny, tmp_path):
    open_to_all = secret_file(tmp_path, "open", mode=0o644)
    code, _, err = finish(by_hand(tiny, 1, 1, open_to_all), timeout=30)
    assert code == 2 and err[-1].endswith(f"chmod 600 {tmp_path}/open") and len(err) == 1
    code, _, err = finish(launched("xla", tiny, "--set", open_to_all, command=generate()), timeout=30)
    assert code == 2 and err[-1].endswith(f"chmod 600 {tmp_path}/open") and len(err) == 1


def test_a_rank_that_never_comes_is_named(tiny):
    alone = by_hand(tiny, 0, free_ports(1)[0], "dop=1,2", "start_deadline_s=3")
    orphan = by_hand(tiny, 1, port := free_ports(1)[0], "start_deadline_s=3")
    code, _, err = finish(alone, timeout=40)
    assert code != 0 and err[-1].startswith("error: rank 0 (model worker 0): ")
    assert "rank 1 (attention worker 0)" in err[-1] and "did not start within 3 s" in err[-1]
    code, _, err = finish(orphan, timeout=40)
    assert code != 0 and err[-1].startswith("error: rank 1 (attention worker 0): ")
    assert f"127.0.0.1:{port}" in err[-1]
