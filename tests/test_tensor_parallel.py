"""A model's weights shared out among model ranks: the unsplit model's tokens, and who holds what."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import check_greedy, run_job
from test_models import MODELS

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, abstract_params, apply, random_params
from jaxlamina.ranks.apart import shared_out
from jaxlamina.ranks.model_side import model_workspace_bytes, traces
from jaxlamina.ranks.shards import EXCHANGES, shard_like, shard_model, shard_of
from jaxlamina.steps.layout import Layout, local_heads
from jaxlamina.workers.model_worker import ModelWorker, trace_step
from jaxlamina.workers.spec import specs_of
from jaxlamina.workers.workspace import LargestStep
from pallas_kernels import compat

SLOW = pytest.mark.slow
MPI = [pytest.mark.mpi, SLOW]
CASES = [
    ("xla", (2, 1), 2, "heads"),
    pytest.param("xla", (2, 2), 1, "requests", marks=SLOW),
    pytest.param("xla", (2, 2), 2, "heads", marks=SLOW),
    pytest.param("mpi", (2, 1), 1, "heads", marks=MPI),
    pytest.param("mpi", (2, 2), 2, "requests", marks=MPI),
    pytest.param("mpi", (3, 1), 1, "heads", marks=MPI),  # cannot share two KV heads out
]


@pytest.mark.parametrize(("transport", "dop", "n_batches", "partition"), CASES)
def test_shards_give_the_unsplit_models_tokens(transport, dop, n_batches, partition):
    how: dict[str, Any] = {"partition": partition, "n_batches": n_batches, "tensor_parallel": dop[0]}
    how["parcel_bytes"] = 20_000  # a layer's weights take several parcels
    lengths = {"llama": 30} | ({} if transport == "mpi" else {"qwen3-moe": 8})
    scenarios = [("greedy", {"model": model, "n_tokens": n}) for model, n in lengths.items()]
    found = run_job(transport, dop, scenarios, **how)
    for one, n in zip(found, lengths.values(), strict=True):
        check_greedy(one, n_tokens=n)


def shared(name, n_shards):
    config = ModelConfig.from_hf(MODELS[name])
    like = abstract_params(config, jnp.float32)
    return config, like, shared_out(traces(partial(apply, config), like), like, n_shards)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_that_only_products_and_lookups_read_is_shared_out(name):
    _, like, found = shared(name, 2)
    assert set(found.axes) == {n for n, x in like.items() if len(x.shape) == 2}  # experts' stacks stay whole
    # Weights lie [out, in]. What comes of an MLP's first products, and of attention, goes to its last one.
    ends = {
        n
        for n in found.axes
        if n.endswith(("down_proj.weight", "fc2.weight", "o_proj.weight", "out_proj.weight"))
    }
    assert {n for n, axis in found.axes.items() if axis} == ends
    assert ends and found.by_heads and not found.why_not


@pytest.mark.parametrize(
    ("name", "n", "n_sums", "n_gathered"),
    [
        *((name, 2, 1 + 2 * 2, 1) for name in ("llama-biases", "qwen3-biases", "phi3", "gemma3")),
        ("llama-multi-head", 4, 1 + 2 * 2, 1),
        ("opt", 2, 2 + 2 * 2, 1),  # which looks positions up, too
        ("mixtral", 2, 1 + 2, 2 + 1),  # whose experts are whole on every rank, and a router's scores
        ("llama", 4, 1 + 2, 2 * 2 + 1),  # two KV heads: q, k and v are gathered, and what comes of attention
    ],
)
def test_shards_are_the_model_together(name, n, n_sums, n_gathered):
    """Shards whose exchanges are done here, equation by equation: the model's logits on the first of them, and
    two exchanges a layer where heads can be shared out."""
    config, like, found = shared(name, n)
    fn, params = partial(apply, config), random_params(config, seed=3)
    tokens = jnp.asarray([[5, 9, 2, 7, 1], [3, 3, 8, 0, 4]], jnp.int32)
    inputs = tokens, jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), tokens.shape), jnp.asarray([4, 2])
    counts: Counter[str] = Counter()

    def run(of_shards: Any) -> jax.Array:
        own_like = shard_like(like, found)
        models = [trace_step(shard_model(fn, like, found, i), own_like, *tokens.shape) for i in range(n)]
        envs = [
            dict(zip((*t.jaxpr.constvars, *t.jaxpr.invars), (*t.consts, *t.flatten(p, inputs)), strict=True))
            for t, p in zip(models, of_shards, strict=True)
        ]

        def read(env: Any, v: Any) -> Any:
            return v.val if isinstance(v, compat.Literal) else env[v]

        for eqns in zip(*(t.jaxpr.eqns for t in models), strict=True):
            xs = [[read(env, v) for v in eqn.invars] for env, eqn in zip(envs, eqns, strict=True)]
            name, p = eqns[0].primitive.name, eqns[0].params
            outs = (
                [compat.bind_eqn(eqn, x) for eqn, x in zip(eqns, xs, strict=True)]
                if name not in EXCHANGES
                else []
            )
            if name in EXCHANGES:
                counts[name] += 1
                parts = [x for [x] in xs]
                outs = [[sum(parts) if "axis" not in p else jnp.concatenate(parts, axis=p["axis"])]] * n
            for env, eqn, out in zip(envs, eqns, outs, strict=True):
                env.update(zip(eqn.outvars, out, strict=True))
        return read(envs[0], models[0].jaxpr.outvars[0])  # type: ignore[no-any-return]

    got = jax.jit(run)([shard_of(params, found, i) for i in range(n)])
    want = fn(params, *inputs)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert config.num_hidden_layers == 2
    assert counts == {"sum_of_shards": n_sums, "columns_of_shards": n_gathered}
    assert found.by_heads == (n <= config.num_key_value_heads) and bool(found.why_not) != found.by_heads


def test_what_cannot_be_divided_stays_whole():
    _, like, found = shared("llama", 3)
    assert found.axes and all(like[name].shape[0] % 3 == 0 for name in found.axes)
    assert "model.layers.0.self_attn.q_proj.weight" not in found.axes  # 32 rows
    assert not found.by_heads and "2 KV heads" in found.why_not and "3 ranks" in found.why_not


def test_shards_are_the_whole_in_pieces():
    config, like, found = shared("qwen2", 2)
    params = random_params(config, seed=1)
    pieces = [shard_of(params, found, i) for i in range(2)]
    assert [{n: x.shape for n, x in p.items()} for p in pieces] == [
        {n: x.shape for n, x in shard_like(like, found).items()}
    ] * 2
    for name, whole in params.items():
        if name in found.axes:
            together = np.concatenate([p[name] for p in pieces], axis=found.axes[name])
            np.testing.assert_array_equal(together, whole)
        else:
            np.testing.assert_array_equal(pieces[1][name], whole)


def test_a_shards_slices_take_less_than_the_whole_models():
    """Beside weights: found by compiling them, without the other shards."""
    config, like, found = shared("qwen2", 2)
    fn, params, device = partial(apply, config), random_params(config, seed=1), jax.devices()[0]
    whole = ModelWorker(fn, params, device, like)
    specs, step = specs_of(whole.split(1).sites, "auto"), LargestStep(8, 64, 32)
    shard = ModelWorker(
        shard_model(fn, like, found, 1), shard_of(params, found, 1), device, shard_like(like, found)
    )
    of_shard = model_workspace_bytes(shard, specs, device, step, 2)
    assert 0 < of_shard < model_workspace_bytes(whole, specs, device, step)


def test_a_weight_that_is_read_in_another_way_too_is_refused_by_name():
    _, like, found = shared("llama", 2)

    def other(params: Any, tokens: Any, positions: Any, logits_at: Any) -> jax.Array:
        logits = apply(ModelConfig.from_hf(MODELS["llama"]), params, tokens, positions, logits_at)
        return logits + params["model.embed_tokens.weight"].sum()

    with pytest.raises(UserError, match="reduce_sum too: take fewer shards"):
        trace_step(shard_model(other, like, found, 0), shard_like(like, found), 1, 1)


@given(a=st.integers(1, 5), b=st.integers(1, 5), each=st.integers(1, 3), by_heads=st.booleans())
def test_each_head_goes_between_the_rank_and_the_worker_that_have_it(a, b, each, by_heads):
    n = a * b * each
    workers = tuple(range(a, a + b))
    layout = Layout(workers, "heads" if by_heads else "requests", heads_over=a)
    links = layout.links(0, n)
    assert list(links) == sorted(links, key=lambda link: (link.rank, link.worker)) and all(
        x.heads for x in links
    )
    n_times = 1 if layout.by_heads else b
    assert Counter(h for link in links for h in link.heads) == dict.fromkeys(range(n), n_times)
    for rank in range(a):
        own = [link for link in links if link.rank == rank]
        assert {h for link in own for h in link.heads} == set(range(rank * n // a, (rank + 1) * n // a))
        if layout.by_heads:
            assert all(h // (n // b) == workers.index(link.worker) for link in own for h in link.heads)
    # A prefill worker has all heads, whoever shares them out.
    [*alone] = layout.links(a + b, n)
    assert {link.rank for link in alone} == {a + b} and sum(len(x.heads) for x in alone) == n * n_times


@given(a=st.integers(1, 4), b=st.integers(1, 4), each=st.integers(2, 6), share=st.floats(0.0, 1.0))
def test_what_a_rank_keeps_of_its_heads_it_sends_to_nobody(a: int, b: int, each: int, share: float) -> None:
    n = a * each
    if (kept := local_heads(n, b, share, a)) is None or 0 < n - kept < b:
        return
    layout = Layout(tuple(range(a, a + b)), "heads", local_share=share, heads_over=a)
    own, pooled = [layout.own_heads(i, n) for i in range(a)], layout.pooled_heads(n)
    assert sorted([*pooled, *(h for of in own for h in of)]) == list(range(n))
    assert {len(of) for of in own} == {kept // a}
    for link in layout.links(0, len(pooled)) if pooled else ():
        heads = [pooled[i] for i in link.heads]
        assert {h // each for h in heads} == {link.rank} and not {*heads} & {*own[link.rank]}
