"""A model's weights shared out among model ranks: the unsplit model's tokens, and who holds what."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from rank_jobs import check_greedy, run_job
from test_models import MODELS

from jaxlamina.models import ModelConfig, abstract_params, apply, random_params
from jaxlamina.ranks.model_side import traces
from jaxlamina.ranks.shards import shard_axes, shard_like, shard_of

CASES = [
    ("xla", (2, 1), 2, "heads"),
    pytest.param("xla", (2, 2), 1, "requests", marks=pytest.mark.slow),
    pytest.param("mpi", (2, 1), 1, "heads", marks=[pytest.mark.mpi, pytest.mark.slow]),
    pytest.param("mpi", (3, 1), 1, "heads", marks=[pytest.mark.mpi, pytest.mark.slow]),
]


@pytest.mark.parametrize(("transport", "dop", "n_batches", "partition"), CASES)
def test_shards_give_the_unsplit_models_tokens(transport, dop, n_batches, partition):
    how = {"partition": partition, "n_batches": n_batches, "tensor_parallel": dop[0]}
    lengths = {"llama": 30} | ({} if transport == "mpi" else {"qwen3-moe": 8})
    scenarios = [("greedy", {"model": model, "n_tokens": n}) for model, n in lengths.items()]
    found = run_job(transport, dop, scenarios, **how)
    for one, n in zip(found, lengths.values(), strict=True):
        check_greedy(one, n_tokens=n)


def axes_of(name, n_shards):
    config = ModelConfig.from_hf(MODELS[name])
    like = abstract_params(config, jnp.float32)
    return config, like, shard_axes(traces(partial(apply, config), like), like, n_shards)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_that_only_products_read_is_shared_out(name):
    _, like, axes = axes_of(name, 2)
    matrices = {n for n, x in like.items() if len(x.shape) == 2}
    looked_up = {n for n in matrices if "embed" in n and "project" not in n}
    assert set(axes) == matrices - looked_up
    assert set(axes.values()) == {0}  # weights lie [out, in]; experts' stacks are whole on every rank


def test_what_cannot_be_divided_stays_whole():
    _, like, axes = axes_of("llama", 3)
    assert axes and all(like[name].shape[0] % 3 == 0 for name in axes)
    assert "model.layers.0.self_attn.q_proj.weight" not in axes  # 32 rows


def test_shards_are_the_whole_in_pieces():
    config, like, axes = axes_of("qwen2", 2)
    params = random_params(config, seed=1)
    pieces = [shard_of(params, axes, 2, i) for i in range(2)]
    assert [{n: x.shape for n, x in p.items()} for p in pieces] == [
        {n: x.shape for n, x in shard_like(like, axes, 2).items()}
    ] * 2
    for name, whole in params.items():
        if name in axes:
            np.testing.assert_array_equal(np.concatenate([p[name] for p in pieces], axis=axes[name]), whole)
        else:
            np.testing.assert_array_equal(pieces[1][name], whole)
