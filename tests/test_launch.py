"""Starting ranks: command lines, platforms, examples for schedulers, and a job of real processes that end
together."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxlamina.cli.launch import _context, find_model
from jaxlamina.cli.main import main as command_line
from jaxlamina.cli.model_options import revision_of
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import JOB, Cluster
from jaxlamina.models.config_files import configs_dir
from jaxlamina.process.gpus import n_gpus, visible_gpus
from launch import devices, local
from launch.commands import (
    IN_MEMORY,
    handing_on,
    has_room,
    mpi_child,
    mpirun_among,
    mpirun_argv,
    plain_children,
    rank_argv,
)
from launch.options import LaunchOptions, parse
from launch.roles import Place

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "launch" / "examples"
GENERATE = ("generate", "--max-tokens", "3", "a b")


# --- options and command lines ---


def test_what_follows_the_command_is_its_own():
    words = [
        "--config",
        "c.toml",
        "--set",
        "dop=1,2",
        "--set",
        "q_first=true",
        "--rank",
        "1",
        "--",
        *GENERATE,
    ]
    for arguments in (words, [word for word in words if word != "--"]):
        found = parse("launch", "", arguments)
        assert found == LaunchOptions("c.toml", ("dop=1,2", "q_first=true"), 1, GENERATE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--colour", "red", "generate", "x"], "--colour"),
        (["--rank", "one", "generate", "x"], "invalid int value: 'one'"),
        (["split"], "must be one of generate, serve, bench, not 'split'"),
        ([], "must be one of generate, serve, bench, and there is none"),
        (["--module", "some.module", "generate", "x"], "leave out 'generate'"),
        (
            ["--starter", "mpirun 'a", "generate", "x"],
            "cannot be taken apart into words: No closing quotation",
        ),
        (["--starter", " ", "generate", "x"], "--starter needs words"),
    ],
)
def test_options_that_are_none(words, message):
    with pytest.raises(UserError) as error:
        parse("python -m launch", "", words)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("what", [(GENERATE, None), ((), "some.module")])
def test_a_ranks_command_line_is_read_back_as_it_was_meant(what):
    options = LaunchOptions("my jobs/c.toml", ("dop=1,3", 'model="a b"'), None, *what)
    argv = rank_argv(options)
    assert argv[:4] == (sys.executable, "-P", "-m", "launch")
    assert parse("launch", "", argv[4:]) == options


def test_open_mpi_gets_its_options_and_another_mpi_none():
    argv = mpirun_argv(3, "mpirun (Open MPI) 4.1.4", root=True)
    assert argv[:4] == ("mpirun", "-n", "3", "--allow-run-as-root") and "--oversubscribe" in argv
    assert "--allow-run-as-root" not in mpirun_argv(3, "mpirun (Open MPI) 5.0.1", root=False)
    assert mpirun_argv(2, "HYDRA build details:", root=True) == ("mpirun", "-n", "2")
    by_tcp = mpirun_argv(3, "mpirun (Open MPI) 4.1.4", root=True, in_memory=False)
    assert argv[: len(by_tcp)] == by_tcp and argv[len(by_tcp) :] == IN_MEMORY
    assert has_room(3, 192 * 2**20) and not has_room(4, 192 * 2**20)


def test_a_starters_open_mpi_hands_on_what_ranks_need():
    words = (
        "ip",
        "netns",
        "exec",
        "a",
        "/opt/bin/mpirun",
        "-n",
        "2",
        "-x",
        "PYTHONPATH=/b",
        "--hostfile",
        "my hosts",
    )
    assert parse("launch.local", "", ["--starter", shlex.join(words), "--", *GENERATE]).starter == words
    assert mpirun_among(words) == 4 and mpirun_among(("srun", "-n", "2")) is None
    found = handing_on(words, 4, ["A", "PYTHONPATH"])
    assert found == (*words[:5], "-x", "A", *words[5:]), "and what the user says stays"


def test_plain_children_know_their_rank_and_only_rank_0_has_our_stdin_and_stdout():
    children = plain_children(
        Cluster(dop=(1, 2)), LaunchOptions(None, (), None, GENERATE), {"A": "1"}, "/pipes"
    )
    assert [child.environment["JAXLAMINA_RANK"] for child in children] == ["0", "1", "2"]
    assert all(
        child.environment["JAXLAMINA_N_RANKS"] == "3" and child.environment["A"] == "1" for child in children
    )
    assert [(child.stdin, child.stdout) for child in children] == [(True, True)] + [(False, False)] * 2


def test_each_job_has_a_word_of_its_own_that_all_its_ranks_know():
    def words():
        options = LaunchOptions(None, ("dop=1,2", "transport=xla"), None, GENERATE)
        return [
            child.environment[JOB] for child in local._job(options.cluster(), options, "/pipes")._children
        ]

    one, other = words(), words()
    assert len(one) == 3 and len(set(one)) == 1 and len(one[0]) == 32 and one[0] != other[0]


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "xla"])
def test_which_rank_the_starter_itself_is_reaches_no_rank(monkeypatch, tmp_path, transport):
    for name in ("RANK", "N_RANKS", "LOCAL_RANK", "DEVICE"):
        monkeypatch.setenv(f"JAXLAMINA_{name}", "7")
    options = LaunchOptions(None, ("dop=1,2", f"transport={transport}"), None, GENERATE)
    children = local._job(options.cluster(), options, str(tmp_path))._children
    assert len(children) == (1 if transport == "mpi" else 3)
    assert not any(
        child.environment.get(f"JAXLAMINA_{name}") == "7"
        for child in children
        for name in ("RANK", "N_RANKS", "LOCAL_RANK", "DEVICE")
    )


def test_a_server_has_time_to_end_and_no_stdin():
    serve = LaunchOptions(None, (), None, ("serve", "--shutdown-timeout=7", "--port", "0"))
    assert 7 < serve.end_s < 100 < LaunchOptions(None, (), None, ("serve", "--shutdown-timeout", "99")).end_s
    assert LaunchOptions(None, (), None, GENERATE).end_s is None
    children = plain_children(Cluster(dop=(1, 1)), serve, {}, "/pipes")
    assert [child.stdin for child in children] == [False, False]


def test_mpirun_starts_the_same_command():
    options = LaunchOptions(None, ("dop=1,2",), None, GENERATE)
    child = mpi_child(("mpirun", "-n", "3"), options, {}, "/pipes")
    assert child.argv == ("mpirun", "-n", "3", *rank_argv(options)) and child.rank is None


def told(cluster, *command):
    """The command's options as it would have them on rank 0."""
    return _context(list(command), cluster).params


def test_the_command_gets_what_the_cluster_file_says_of_the_model_and_it_does_not():
    cluster = Cluster(model="tiny", dtype="bfloat16", max_model_len=64, max_num_seqs=7, mixed_steps=True)
    found = told(cluster, "generate", "--dtype=float32", "x")
    assert (found["model"], found["dtype"], found["max_model_len"]) == ("tiny", "float32", 64)
    assert found["max_num_seqs"] is None and found["mixed_steps"] is True  # as many as it has prompts
    found = told(replace(cluster, kv_slots=99), "serve", "--max-model-len", "32", "--no-mixed-steps")
    assert (found["kv_slots"], found["max_model_len"], found["max_num_seqs"]) == (99, 32, 7)
    assert found["mixed_steps"] is False and found["host_kv_slots"] == "auto"
    changed = replace(cluster, calibration_file="words.txt", host_kv_slots=9, scheduling_policy="chat-first")
    for command in (["serve"], ["generate", "x"]):
        found = told(replace(changed, kv_manager="padded", kv_headroom=0.5), *command)
        assert (found["calibration_file"], found["host_kv_slots"]) == ("words.txt", 9)
        assert (found["scheduling_policy"], found["kv_manager"]) == ("chat-first", "padded")
        assert found["kv_headroom"] == 0.5
    assert "model" not in told(cluster, "bench", "kernels")


@pytest.mark.parametrize(
    "words", [["--partition", "tokens"], ["--gpu-memory-utilization=0.9"], ["--no-split"]]
)
def test_what_the_cluster_says_alone_is_no_option_over_ranks(words):
    option = words[0].partition("=")[0]
    with pytest.raises(UserError, match=f"serve's {option} is for one process"):
        find_model(["serve", *words], Cluster())


def test_a_revision_is_of_the_model_that_it_was_said_with():
    cluster = Cluster(model="org/name", revision="v2")
    for command, wanted in (
        (["serve"], "v2"),
        (["serve", "--model=a/b"], None),
        (["serve", "--model=a/b", "--revision=v3"], "v3"),
    ):
        assert revision_of(_context(command, cluster)) == wanted


def test_more_processes_than_a_host_can_mean_are_not_begun(capsys):
    assert local.main(["--set", 'dop="1,1000000"', "--set", 'transport="xla"', "--", "serve"]) == 2
    assert "is 1000001 processes of this host, which starts 1024 at most" in capsys.readouterr().err


# --- platforms and GPUs ---


def test_each_pool_has_its_platform_before_jax_is_there():
    cluster = Cluster(transport="mpi", dop=(1, 2), model_platform="cuda", attention_platform="cpu")
    ranks = [devices.variables(cluster, Place(rank, 3, rank, "mpirun"), n_gpus=1) for rank in range(3)]
    assert ranks == [{"JAX_PLATFORMS": "cuda,cpu", "JAXLAMINA_DEVICE": "0"}, *[{"JAX_PLATFORMS": "cpu"}] * 2]


def test_gpus_go_to_those_ranks_of_a_host_that_want_one():
    cluster = Cluster(transport="mpi", dop=(1, 3), model_platform="cpu", attention_platform="cuda")
    # Ranks 2 and 3 share the second host.
    places = [Place(1, 4, 1, "mpirun"), Place(2, 4, 0, "mpirun"), Place(3, 4, 1, "mpirun")]
    assert [devices.variables(cluster, p, 2)["JAXLAMINA_DEVICE"] for p in places] == ["0", "0", "1"]


def test_a_rank_without_a_gpu_says_so():
    cluster = Cluster(dop=(1, 2), model_platform="cuda", attention_platform="cuda")
    for transport, way in (("xla", "transport mpi"), ("mpi", 'one of the pools with platform "cpu"')):
        what = f"no GPU is left for this rank: 2 here, for 3 ranks or more.*or use {way}$"
        with pytest.raises(UserError, match=what):
            devices.variables(replace(cluster, transport=transport), Place(2, 3, 2, "jaxlamina"), n_gpus=2)
    assert devices.variables(Cluster(), Place(1, 2, 1, "jaxlamina"), n_gpus=0) == {}
    some = Cluster(gpu_memory_utilization=0.9, transport="mpi", attention_platform="cpu")
    found = [devices.variables(some, Place(rank, 2, rank, "jaxlamina"), n_gpus=1) for rank in range(2)]
    assert [x.get("XLA_PYTHON_CLIENT_MEM_FRACTION") for x in found] == ["0.9", None]


def test_a_rank_whose_place_on_its_host_nobody_says_tells_which_gpu_it_takes():
    cluster, here = Cluster(dop=(1, 2)), Place(2, 3, None, "mpirun")
    assert devices.variables(cluster, here, 4) == {"JAXLAMINA_DEVICE": "0"}
    said = devices.note(cluster, here, 4)
    assert said.startswith("rank 2 (attention worker 1): nothing says which of its host's ranks it is")
    assert "GPU 0 of 4" in said and "CUDA_VISIBLE_DEVICES" in said
    on_cpu = Cluster(transport="mpi", dop=(1, 2), attention_platform="cpu")
    known = Place(2, 3, 2, "mpirun")
    assert not any(devices.note(*x) for x in ((cluster, here, 1), (cluster, known, 4), (on_cpu, here, 4)))


def test_a_rank_says_that_no_gpu_is_left_and_it_computes_on_the_cpu():
    """By MPI, where no platform is named, that is no error."""
    cluster = Cluster(transport="mpi", dop=(1, 2))
    last = Place(2, 3, 2, "mpirun")
    assert devices.variables(cluster, last, 2) == {"JAX_PLATFORMS": "cpu"}
    assert devices.variables(cluster, last, 0) == {}
    said = devices.note(cluster, last, 2)
    assert said.startswith(
        "rank 2 (attention worker 1): no GPU is left for it (2 here), so it computes on the CPU"
    )
    with pytest.raises(UserError, match="no GPU is left for this rank"):
        devices.variables(Cluster(transport="xla", dop=(1, 2)), last, 2)
    silent = ((cluster, last, 0), (cluster, last, 3), (cluster, Place(1, 3, 1, "mpirun"), 2))
    assert not any(devices.note(*x) for x in (*silent, (cluster, Place(1, 3, 1, "srun"), 1)))


def test_slurm_gives_a_task_its_own_gpu():
    cluster = Cluster(model_platform="cuda", attention_platform="cuda")
    found = devices.variables(cluster, Place(1, 2, 1, "srun"), n_gpus=1)
    assert found["JAXLAMINA_DEVICE"] == "0"


def test_gpus_that_are_hidden_do_not_count():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}) == [
        "3",
        "5",
    ]  # how many JAX has: test_bench_compared_jobs
    assert n_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


# --- examples for schedulers ---


def test_the_hostfile_has_a_host_for_each_rank_of_its_cluster():
    cluster = Cluster.load(configs_dir() / "clusters" / "gpu-and-cpus.toml")
    text = (EXAMPLES / "hostfile").read_text()
    hosts = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert sum(int(slots.removeprefix("slots=")) for _, slots in hosts) == cluster.n_ranks
    assert cluster.control.startswith(hosts[0][0] + ":"), "rank 0 is on the first host"
    assert f"mpirun -n {cluster.n_ranks} " in text


@pytest.fixture
def slurm(tmp_path):
    """Runs the batch script with a `scontrol` that knows two nodes, and an `srun` that writes down its
    arguments."""
    tools = {
        "scontrol": '[ "$*" = "show hostnames gpu[7-9]" ] && printf "gpu7\\ngpu8\\ngpu9\\n"',
        "srun": f'for word; do printf "%s\\n" "$word"; done > {tmp_path}/words',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def submit(*words, **variables):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "gpu[7-9]"}
        script = EXAMPLES / "slurm.sh"
        subprocess.run(
            [shutil.which("bash"), script, *words],
            check=True,
            timeout=30,
            env=environment | variables,
        )
        return (tmp_path / "words").read_text().splitlines()

    return submit


def test_the_slurm_script_starts_a_rank_a_task_and_names_rank_0s_node(slurm):
    script = (EXAMPLES / "slurm.sh").read_text()
    config = str(configs_dir() / "clusters" / "hosts-xla.toml")
    words = slurm(*GENERATE, SLURM_JOB_ID="41", JAXLAMINA_CONFIG=config)
    at = words.index("launch")
    assert words[at - 2 : at] == ["python", "-m"] and "--kill-on-bad-exit=1" in words[:at]
    options = parse("launch", "", words[at + 1 :])
    cluster = options.cluster()
    assert options.command == GENERATE
    assert (cluster.control, cluster.coordinator) == ("gpu7:20082", "gpu7:20083")
    words = slurm(*GENERATE, SLURM_JOB_ID="42", JAXLAMINA_CONFIG=config)
    beside = parse("launch", "", words[words.index("launch") + 1 :]).cluster()
    assert not {cluster.control, cluster.coordinator} & {beside.control, beside.coordinator}
    assert f"#SBATCH --ntasks={cluster.n_ranks}\n" in script


def test_the_kubernetes_manifest_has_a_pod_for_each_rank(tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest: pip install pyyaml")
    text = (EXAMPLES / "mpijob.yaml").read_text()
    config, job = yaml.safe_load_all(text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    (tmp_path / "cluster.toml").write_text(config["data"]["cluster.toml"])
    cluster = Cluster.load(tmp_path / "cluster.toml")
    # The launcher is a worker too, and the first host: rank 0.
    assert spec["runLauncherAsWorker"] and spec["slotsPerWorker"] == 1 == launcher["replicas"]
    assert cluster.n_ranks == launcher["replicas"] + worker["replicas"]
    for pod in (launcher, worker):
        pod = pod["template"]["spec"]
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes.keys() == mounts.keys()
        assert volumes["cluster"]["configMap"]["name"] == config["metadata"]["name"]
        assert cluster.job_secret_file == mounts["secret"] + "/job.secret"
        secret = volumes["secret"]["secret"]
        assert secret["defaultMode"] == 0o400, "a rank takes no secret that others may read"
        assert f"create secret generic {secret['secretName']} --from-literal=job.secret=" in text
        on_gpu = "nvidia.com/gpu" in container["resources"].get("limits", {})
        assert on_gpu == (pod is launcher["template"]["spec"])
    [container] = launcher["template"]["spec"]["containers"]
    stub = 'mpirun() { for word; do printf "%s\\n" "$word"; done; }; hostname() { echo 10.1.2.3 fd00::1; }\n'
    done = subprocess.run(
        [*container["command"], stub + container["args"][0]], check=True, capture_output=True, text=True
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["-n", str(cluster.n_ranks)]
    options = parse("launch", "", words[words.index("launch") + 1 :])
    assert options.command == ("generate", "What is gravity?")
    mounted = container["volumeMounts"][0]["mountPath"] + "/cluster.toml"
    assert options.config == mounted and options.changes == ('control="10.1.2.3:29400"',)


# --- `jaxlamina launch`, up to where it becomes the starter ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dop", "1;2", "--", "generate", "x"], "error: DOP '1;2' must be a,b"),
        (["--transport", "tcp", "--", "generate", "x"], "error: transport='tcp' must be one of mpi, xla"),
        (["--set", "colour=red", "--", "generate", "x"], "error: unknown key 'colour'; known: dop"),
        (["--config", "none.toml", "--", "generate", "x"], "error: cannot read the cluster file none.toml"),
        (
            ["--dop", "1,2", "--", "split"],
            "error: the command for rank 0 must be one of generate, serve, bench, not 'split'",
        ),
        (["--dop", "1,2"], "must be one of generate, serve, bench, and there is none"),
        (["--", "generate", "--max-tokns", "3", "x"], "No such option: --max-tokns"),
        (["--supervise", "--", "generate", "x"], "--supervise is for serve, not for generate"),
        (["--no-supervise", "--", "serve", "--supervise"], "leave one of them out"),
        (["--", "serve", "--no-supervise", "--journal", "j"], "--journal is for a supervised server"),
        (["--starter", "mpirun", "--", "serve", "--spare", "1"], "--spare does not go with --starter"),
        (["--", "bench", "nothing"], "No such command 'nothing'"),
    ],
)
def test_what_cannot_work_is_said_before_a_rank_is_started(capsys, words, message):
    assert command_line(["launch", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_its_options_go_into_the_cluster(monkeypatch, tmp_path):
    seen = []
    (tmp_path / "7").mkdir()  # a model, as far as `launch` looks at one
    (tmp_path / "7" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda path, argv, environment: seen.append((argv, environment)))
    words = ["--dop", "1,2", "--transport", "mpi", "--partition", "tokens", "--model", "7", "--no-q-first"]
    assert command_line(["launch", *words, "--set", "token_block=4", "--", *GENERATE]) == 0
    [(argv, environment)] = seen
    assert argv[:4] == [sys.executable, "-P", "-m", "launch.local"]
    options = parse("launch.local", "", argv[4:])
    wanted = Cluster(dop=(1, 2), transport="mpi", partition="tokens", model="7", q_first=False, token_block=4)
    assert options.cluster() == wanted and options.command == GENERATE
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import launch.local, jaxlamina"],
        check=False,
        env=environment,
        cwd="/",
    )
    assert done.returncode == 0, "it finds the packages that this process runs"
