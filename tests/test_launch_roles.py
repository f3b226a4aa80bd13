"""Rank → role: every rank has exactly one, model workers come first, groups partition the pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from launch.roles import Pools, Role


def test_two_model_workers_and_one_attention_worker():
    pools = Pools.parse("2,1")
    assert pools.roles == (
        Role(0, "model", 0, 0, 0),
        Role(1, "model", 1, 0, 1),
        Role(2, "attention", 0, 0, 0),
    )
    assert (list(pools.model_ranks), list(pools.attention_ranks)) == ([0, 1], [2])
    assert pools.replica_groups == ((0, 1),)


def test_two_replicas_are_two_groups():
    pools = Pools(4, 2, n_replicas=2)
    assert pools.replica_groups == ((0, 1), (2, 3))
    assert [(r.replica, r.shard) for r in pools.roles[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
def test_roles_and_groups_partition_the_ranks(shards, replicas, n_attention):
    pools = Pools(shards * replicas, n_attention, replicas)
    assert [r.rank for r in pools.roles] == list(range(pools.n_ranks))
    assert [*pools.model_ranks, *pools.attention_ranks] == list(range(pools.n_ranks))
    assert [r.rank for r in pools.roles if r.pool == "model"] == list(pools.model_ranks)
    assert [rank for group in pools.replica_groups for rank in group] == list(pools.model_ranks)
    for role in pools.roles:
        if role.pool == "model":
            assert pools.replica_groups[role.replica][role.shard] == role.rank
        else:
            assert pools.attention_ranks[role.index] == role.rank


@pytest.mark.parametrize("text", ["", "2", "2,1,1", "a,b", "-1,2", "1.5,1", "0,1", "1,0"])
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
