"""The cluster file: defaults, every example in configs/clusters, and one line for whatever is wrong with
one."""

from __future__ import annotations

import dataclasses

import pytest

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster, address, change, fields
from jaxlamina.models.config_files import configs_dir


def write(folder, text):
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_without_a_file_there_are_two_ranks_on_this_host():
    cluster = Cluster.load(None)
    assert cluster == Cluster() and cluster.n_ranks == 2
    assert cluster.describe(0) == "rank 0 (model worker 0)"
    assert cluster.describe(1) == "rank 1 (attention worker 0)"


def test_a_file_and_changes_over_it(tmp_path):
    path = write(tmp_path, 'dop = [1, 3]\ntransport = "mpi"\nq_first = false\nstart_deadline_s = 7\n')
    cluster = Cluster.load(path, {"transport": "xla", "partition": "tokens"})
    assert (cluster.dop, cluster.transport, cluster.partition) == ((1, 3), "xla", "tokens")
    assert (cluster.q_first, cluster.start_deadline_s, cluster.n_ranks) == (False, 7.0, 4)
    assert cluster.error_line(2, "no\n  memory ") == "error: rank 2 (attention worker 1): no memory"


def test_a_dop_as_a_command_line_has_it():
    assert Cluster.load(None, {"dop": "1,2"}) == Cluster.load(None, {"dop": [1, 2]}) == Cluster(dop=(1, 2))


@pytest.mark.parametrize("path", sorted((configs_dir() / "clusters").glob("*.toml")), ids=lambda p: p.name)
def test_every_example_is_a_cluster(path):
    assert Cluster.load(path).n_ranks >= 2


def test_there_are_examples():
    assert len(list((configs_dir() / "clusters").glob("*.toml"))) >= 3


def test_an_unknown_key_is_named_with_the_file_and_the_known_ones(tmp_path):
    path = write(tmp_path, 'transprot = "mpi"\n')
    with pytest.raises(UserError) as error:
        Cluster.load(path)
    assert str(error.value).startswith(f"{path}: unknown key 'transprot'; known: dop, transport, partition, ")
    assert all(name in str(error.value) for name in fields())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dop = ", "is not TOML"),
        ("dop = [1]\n", "dop=(1,) must be two numbers"),
        ('dop = "1;2"\n', "DOP '1;2' must be a,b"),
        ("dop = [1, -1]\n", "n_attention=-1 must be a whole number, at least 0"),
        ("dop = [0, 0]\n", "n_model=0 must be a whole number, at least 1"),
        ("dop = [2, 0]\n", "(2, 0) has 2 copies of the model, and no attention workers"),
        ("dop = [2, 0]\nlocal_attention = 1\n", "take tensor_parallel=2, or 2 jobs of dop=(1, 0)"),
        *(
            (f"dop = [1, 0]\n{name} = {value}\n", f"which dop=(1, 0) has none: leave {name} out")
            for name, value in (
                ("local_attention", 0),
                ("local_attention", 0.5),
                ("partition", '"tokens"'),
                ("n_batches", 2),
                ("mini_batches", 2),
                ("prefill_workers", 1),
                ("kv_replicas", 1),
            )
        ),
        (
            "dop = [2, 1]\nn_batches = 1\n",
            "2 model workers for n_batches=1 staggered batches, so some would idle: take n_batches=3",
        ),
        ('n_batches = "some"\n', "n_batches='some' must be a whole number"),
        ("n_batches = 0\n", "n_batches=0 must be at least 1"),
        (
            "dop = [4, 1]\ntensor_parallel = 2\n",
            "tensor_parallel=2 must be 1, or 4: all model workers of dop=(4, 1)",
        ),
        (
            "dop = [4, 1]\npipeline_parallel = 3\n",
            "pipeline_parallel=3 must be 1, or 4: all model workers of dop=(4, 1)",
        ),
        (
            "dop = [2, 1]\npipeline_parallel = 2\ntensor_parallel = 2\n",
            (
                "tensor_parallel=2 and pipeline_parallel=2 are two ways for the same model workers to share "
                "out the weights"
            ),
        ),
        (
            'dop = [2, 1]\npipeline_parallel = 2\npipelining = "fixed"\n',
            (
                "pipelining='fixed' is about several copies of the model, of which there is one with "
                "pipeline_parallel=2"
            ),
        ),
        ("pipeline_parallel = 0\n", "pipeline_parallel=0 must be at least 1"),
        ("prefill_workers = -1\n", "prefill_workers=-1 must be at least 0"),
        (
            'n_batches = 3\npipelining = "rotational"\n',
            "one batch more than there are model workers, 2 for dop=(1, 1)",
        ),
        ('pipelining = "any"\n', "pipelining='any' must be one of auto, rotational, fixed"),
        ('transport = "tcp"\n', "transport='tcp' must be one of mpi, xla"),
        ('scheduling_policy = "lifo"\n', "scheduling_policy='lifo' must be one of fifo, fcfs, priority"),
        ("gpu_memory_utilization = 0\n", "gpu_memory_utilization=0.0 must be above 0, and 1 at most"),
        ("kv_headroom = 1.5\n", "kv_headroom=1.5 must be from 0 to 1"),
        ('kv_manager = "paged"\n', "kv_manager='paged' must be one of token, padded"),
        ('partition = "layers"\n', "partition='layers' must be one of auto, heads, requests, tokens"),
        ("token_block = 0\n", "token_block=0 must be at least 1"),
        ("token_block = true\n", "token_block=True must be a whole number"),
        ("q_first = 1\n", "q_first=1 must be true or false"),
        ('control = "somewhere"\n', "control='somewhere' must be host:port"),
        ('control = "10.1.2.3 fd00::1:29400"\n', "control='10.1.2.3 fd00::1:29400' must be host:port"),
        ('coordinator = "a:70000"\n', "coordinator='a:70000' must be host:port"),
        ("step_deadline_s = 0\n", "step_deadline_s=0.0 must be a number of seconds above 0"),
        ("heartbeat_s = inf\n", "heartbeat_s=inf must be a number of seconds above 0"),
        ("heartbeat_s = 1e10\n", "above 0, and 2592000 (30 days) at most"),
        ("start_deadline_s = 2592001\n", "2592000 (30 days) at most"),
        ('model_platform = "gpu"\n', "model_platform='gpu' must be one of cpu, cuda, tpu"),
        ("model = 7\n", "model=7 must be text"),
        ('model = ""\n', "must be a name, a folder or a file"),
        ("kv_slots = 0\n", "kv_slots=0 must be at least 1"),
        ('model_platform = "cuda"\nattention_platform = "cpu"\n', "or take transport='mpi'"),
        ('control = "a:1"\ncoordinator = "a:1"\n', "take two ports"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        Cluster.load(path)
    assert str(path) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the cluster file .*none\.toml: No such file"):
        Cluster.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("how", "mode", "n_replicas", "usual_n_batches"),
    [
        ({"dop": (1, 1)}, "fixed", 1, 2),
        ({"dop": (1, 1), "pipelining": "rotational"}, "rotational", 1, 2),
        ({"dop": (3, 1)}, "rotational", 3, 4),
        ({"dop": (3, 1), "pipelining": "fixed"}, "fixed", 3, 4),
        ({"dop": (3, 1), "n_batches": 4}, "rotational", 3, 4),
        ({"dop": (3, 1), "n_batches": 3}, "fixed", 3, 4),
        ({"dop": (3, 1), "tensor_parallel": 3}, "fixed", 1, 2),
        ({"dop": (3, 1), "pipeline_parallel": 3}, "stages", 1, 6),
        ({"dop": (2, 1), "pipeline_parallel": 2, "n_batches": "auto"}, "stages", 1, 4),
        ({"dop": (2, 1), "pipeline_parallel": 2, "n_batches": 5}, "stages", 1, 4),
    ],
)
def test_how_model_workers_have_the_model(how, mode, n_replicas, usual_n_batches):
    cluster = Cluster(**how)
    found = cluster.pipelining_mode, cluster.n_replicas, cluster.usual_n_batches
    assert found == (mode, n_replicas, usual_n_batches)
    assert cluster.shares_weights == (n_replicas < cluster.n_model)


@pytest.mark.parametrize(
    ("how", "on_cpus", "on_gpus"),
    [
        ({}, 1, "auto"),
        ({"n_batches": "auto"}, "auto", "auto"),
        ({"n_batches": 1}, 1, 1),
        ({"n_batches": 4}, 4, 4),
        ({"mini_batches": 2}, 1, 1),
        ({"dop": (2, 1)}, 3, "auto"),
        ({"dop": (2, 1), "tensor_parallel": 2}, 1, "auto"),
        ({"dop": (2, 1), "pipeline_parallel": 2}, 1, "auto"),
        ({"dop": (2, 0), "tensor_parallel": 2}, 1, 1),
        ({"dop": (2, 0), "pipeline_parallel": 2, "n_batches": "auto"}, 1, 1),
    ],
)
def test_staggered_batches_are_measured_by_default_where_there_are_accelerators(how, on_cpus, on_gpus):
    cluster = Cluster(**how)
    assert (cluster.n_batches_on("cpu"), cluster.n_batches_on("gpu")) == (on_cpus, on_gpus)


def test_an_accelerator_of_the_other_pool_counts():
    cluster = Cluster(transport="mpi", model_platform="cpu", attention_platform="cuda")
    assert cluster.n_batches_on("cpu") == "auto"


def test_without_attention_workers_model_workers_have_all_kv_and_one_platform():
    cluster = Cluster(dop=(2, 0), tensor_parallel=2, transport="xla", model_platform="cuda")
    assert cluster.local_share == 1 and cluster.is_one_platform and not cluster.pools.attention_ranks
    assert [cluster.describe(rank) for rank in range(cluster.n_ranks)] == [
        "rank 0 (model worker 0)", "rank 1 (model worker 1)",
    ]  # fmt: skip
    assert not dataclasses.replace(cluster, dop=(2, 1), transport="mpi").is_one_platform


def test_mixed_platforms_go_over_mpi():
    cluster = Cluster(transport="mpi", dop=(1, 2), model_platform="cuda", attention_platform="cpu")
    assert [cluster.platform(rank) for rank in range(3)] == ["cuda", "cpu", "cpu"]


def test_prefill_workers_are_more_ranks_on_the_model_platform():
    cluster = Cluster(
        transport="mpi", dop=(1, 2), prefill_workers=2, model_platform="cuda", attention_platform="cpu"
    )
    assert cluster.n_ranks == 5 and list(cluster.pools.attention_ranks) == [1, 2]
    assert [cluster.platform(rank) for rank in range(5)] == ["cuda", "cpu", "cpu", "cuda", "cuda"]
    assert cluster.describe(4) == "rank 4 (prefill worker 1)"


def test_what_ranks_compare_is_flat_and_has_every_key_but_how_rank_0_is_reached():
    config = Cluster(dop=(1, 3), control="somewhere:9").as_config()
    own = {"control", "job_secret_file", "control_certfile", "control_keyfile", "control_cafile"}
    assert set(config) == set(fields()) - own
    assert config["dop"] == "1,3" and config["kv_slots"] is None
    assert all(value is None or isinstance(value, str | int | float | bool) for value in config.values())
    other = dataclasses.replace(Cluster(dop=(1, 3)), control="10.0.0.1:9")
    assert other.as_config() == config


def test_addresses():
    assert address("control", "[::1]:29400") == ("::1", 29400)
    assert address("control", "node-1.cluster:1") == ("node-1.cluster", 1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dop=1,2", ("dop", "1,2")),
        ("dop=[1, 2]", ("dop", [1, 2])),
        ("q_first=false", ("q_first", False)),
        ("model=/models/a b", ("model", "/models/a b")),
        ('model="7"', ("model", "7")),
        ("step_deadline_s=2.5", ("step_deadline_s", 2.5)),
    ],
)
def test_one_change_of_a_command_line(text, wanted):
    assert change(text) == wanted


def test_a_change_without_a_value():
    with pytest.raises(UserError, match="'dop' must be key=value"):
        change("dop")
    with pytest.raises(UserError, match="unknown key 'dpo'"):
        Cluster.load(None, {"dpo": "1,2"})


def test_copies_of_kv_that_is_not_kept_are_refused():
    with pytest.raises(UserError, match="kept_kv_slots=0 keeps none: leave one of them out"):
        Cluster(kv_replicas=1, kept_kv_slots=0)
    with pytest.raises(UserError, match="kv_replicas=2 must be at least 0, and 1 at most"):
        Cluster(kv_replicas=2)
