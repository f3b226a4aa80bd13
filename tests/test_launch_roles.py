"""Rank → role: every rank has one, model workers first, groups partition the pool; and whence a process has
its rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from launch.roles import Place, Pools, Role, place


def test_two_model_workers_and_one_attention_worker():
    pools = Pools.parse("2,1")
    assert pools.roles == (
        Role(0, "model", 0, 0, 0),
        Role(1, "model", 1, 0, 1),
        Role(2, "attention", 0, 0, 0),
    )
    assert (list(pools.model_ranks), list(pools.attention_ranks)) == ([0, 1], [2])


def test_two_replicas_are_two_groups():
    pools = Pools(4, 2, n_replicas=2)
    assert [(r.replica, r.shard) for r in pools.roles[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 12))
def test_roles_and_groups_partition_the_ranks(shards, replicas, n_attention):
    pools = Pools(shards * replicas, n_attention, replicas)
    assert [r.rank for r in pools.roles] == list(range(pools.n_ranks))
    assert [*pools.model_ranks, *pools.attention_ranks] == list(range(pools.n_ranks))
    assert [r.rank for r in pools.roles if r.pool == "model"] == list(pools.model_ranks)
    for role in pools.roles:
        if role.pool == "model":
            assert role.replica * shards + role.shard == role.rank
        else:
            assert pools.attention_ranks[role.index] == role.rank


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_prefill_workers_come_last(n_model, n_attention, n_prefill):
    pools = Pools(n_model, n_attention, n_prefill=n_prefill)
    assert [*pools.model_ranks, *pools.attention_ranks, *pools.prefill_ranks] == list(range(pools.n_ranks))
    found = [r for r in pools.roles if r.pool == "prefill"]
    assert [(r.rank, r.index) for r in found] == [(rank, i) for i, rank in enumerate(pools.prefill_ranks)]
    assert pools.roles[: n_model + n_attention] == Pools(n_model, n_attention).roles


@pytest.mark.parametrize("text", ["", "2", "2,1,1", "a,b", "-1,2", "1.5,1", "0,1", "0,0"])
def test_a_dop_that_is_none_is_a_user_error(text):
    with pytest.raises(UserError):
        Pools.parse(text)


def test_errors_say_what_would_do():
    with pytest.raises(UserError, match="n_model=3 must be a multiple of n_replicas=2"):
        Pools(3, 1, 2)
    with pytest.raises(UserError, match=r"rank=3 must be .* below 3"):
        Pools(2, 1).role(3)
    with pytest.raises(UserError, match=r"DOP \(2, 1\) needs 3 ranks, 2 were started: mpirun -n 3"):
        Pools(2, 1).check_world(2)
    Pools(2, 1).check_world(3)
    with pytest.raises(UserError, match=r"DOP \(1, 1\) \+ 2 for prefill needs 4 ranks, 2 were started"):
        Pools(1, 1, n_prefill=2).check_world(2)
    with pytest.raises(UserError, match="n_prefill=-1 must be a whole number, at least 0"):
        Pools(1, 1, n_prefill=-1)


def test_open_mpi_says_which_rank_this_is():
    environment = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    assert place(environment) == Place(2, 3, 1, "mpirun")


def test_other_mpis_say_it_by_pmi():
    assert place({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}) == Place(1, 2, 1, "mpirun")


def test_srun_may_say_it_by_pmi_but_for_the_place_on_the_host():
    environment = {"PMI_RANK": "2", "PMI_SIZE": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}
    assert place(environment) == Place(2, 3, 1, "srun")


def test_srun_says_it_and_a_step_may_have_fewer_tasks_than_the_job():
    environment = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
    }
    assert place(environment) == Place(1, 2, 0, "srun")


def test_mpirun_inside_a_slurm_job_is_believed_before_slurm():
    environment = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    assert place(environment) == Place(1, 3, 0, "mpirun")


def test_our_own_starter_comes_first():
    environment = {
        "JAXLAMINA_RANK": "1",
        "JAXLAMINA_N_RANKS": "4",
        "JAXLAMINA_LOCAL_RANK": "1",
        "SLURM_PROCID": "0",
    }
    assert place(environment) == Place(1, 4, 1, "jaxlamina")


def test_a_rank_given_by_hand():
    assert place({}, 1) == Place(1, None, None, "jaxlamina")
    assert place({"PMI_RANK": "1"}, 1) == Place(1, None, None, "mpirun")
    with pytest.raises(UserError, match="--rank 0 is given, but PMI_RANK=1: leave out --rank under mpirun"):
        place({"PMI_RANK": "1"}, 0)


def test_nothing_says_it():
    with pytest.raises(UserError, match="nothing says which rank this is: start it by mpirun, srun"):
        place({"PATH": "/bin"})
    with pytest.raises(UserError, match="SLURM_PROCID='one' must be a whole number"):
        place({"SLURM_PROCID": "one"})
