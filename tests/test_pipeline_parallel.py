"""A model's slices shared out among model ranks: the unsplit model's tokens, and who holds what.

The schedule of a pipeline is in `test_schedules`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from rank_jobs import check_greedy, mpi, run_job
from test_models import MODELS

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, abstract_params, apply
from jaxlamina.ranks.model_side import traces
from jaxlamina.ranks.stages import stages_of

# Slices in plenty, of which those of the layers outweigh the embedding, which the first and the last slice
# read.
DEEP = ["llama-tied", {"num_hidden_layers": 5, "intermediate_size": 1024}]
CASES: list[Any] = [
    ("xla", (2, 2), 4, "requests", DEEP),
    ("xla", (2, 2), 2, "tokens", DEEP),
    ("xla", (3, 1), 4, "heads", DEEP),
    ("xla", (3, 1), 1, "heads", "opt"),
    ("xla", (2, 2), 1, "heads", "qwen3"),
    ("xla", (2, 2), 4, "requests", "mistral-window"),
    ("xla", (2, 2), 1, "tokens", "gemma3"),
    mpi((2, 1), 3, "heads", DEEP),
    mpi((2, 2), 1, "requests", DEEP),
    mpi((2, 2), 4, "heads", DEEP),
    mpi((3, 1), 4, "heads", DEEP),
]


def run(transport: str, dop: tuple[int, int], scenarios: Any, **how: Any) -> list[dict[str, Any]]:
    return run_job(transport, dop, scenarios, pipeline_parallel=dop[0], **how)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "dop", "n_batches", "partition", "model"), CASES)
def test_stages_give_the_unsplit_models_tokens(transport, dop, n_batches, partition, model):
    case = {"model": model, "n_tokens": 24}
    found = run(transport, dop, [("greedy", case)], partition=partition, n_batches=n_batches)
    check_greedy(found[0], n_tokens=24)
    decodes = [name for name in found[0]["programs"] if name.startswith("decode, batch 4")]
    assert all(f"in {n_batches} staggered" in name for name in decodes) == (n_batches > 1), decodes


def test_every_rank_holds_its_share_and_auto_tries_one_batch_and_two_a_stage(tmp_path):
    """One job for both: its ranks are weighed while a second model's steps go as one batch and as several."""
    scenarios = [("held", {"model": DEEP}), ("greedy", {"model": DEEP, "n_tokens": 24})]
    rank_0, tokens = run("xla", (2, 1), scenarios, n_batches="auto", weigh=tmp_path)
    check_greedy(tokens, n_tokens=24)
    decodes = [name for name in tokens["programs"] if name.startswith("decode, batch 4")]
    assert {"in 4 staggered" in name for name in decodes} == {True, False}, decodes
    stages, like = stages_of_model(*DEEP, n_stages=2)
    whole = sum(x.size * x.dtype.itemsize for x in like.values())
    for held, names in zip(
        (rank_0["held_bytes"], int((tmp_path / "1").read_text())), stages.params, strict=True
    ):
        share = sum(like[name].size * like[name].dtype.itemsize for name in names)
        assert share < 0.6 * whole
        assert share <= held < share + 0.05 * whole  # logits, tokens, …


@pytest.mark.slow
def test_programs_that_do_not_fit_then_kv_that_moves_and_prompts_in_chunks():
    chunks = {"model": DEEP, "n_tokens": 24, "max_num_batched_tokens": 8}
    scenarios = [
        ("mismatch", {"model": "llama", "what": "more"}),
        ("moves", {"model": "llama"}),
        ("greedy", chunks),
    ]
    unfit, *found = run("xla", (2, 2), scenarios, partition="requests", n_batches=4)
    assert "do not match, so none is run: rank 0 (model worker 0), exchange" in unfit["line"]
    assert all(x["same"] for x in found), found


def test_kv_crosses_between_attention_workers_and_stages():
    """An attention worker has all layers of a token, a stage has some."""
    model = ["llama", {"num_hidden_layers": 4}]
    how = {"partition": "requests", "local_attention": 0.5}
    [found] = run("xla", (2, 2), [("crosses", {"model": model})], **how)
    stages = 2  # the keeper after two attention workers
    assert [stages in way for way in found["ways"]] == [True] * 4, found
    assert [way[0] == stages for way in found["ways"]] == [True, False] * 2, found
    assert max(found["differences"]) < 1e-5, found


@pytest.mark.slow
def test_samples_beams_and_scaled_kv():
    """Rows that come and go; scales of KV that are found with the whole model."""
    int8 = {"model": "llama", "n_tokens": 24, "kv_dtype": "int8-channel"}
    found = run("xla", (2, 1), [("branches", {"model": "llama"}), ("greedy", int8)], n_batches=4)
    assert all(x["same"] for x in found), found


# --- who has what ---


def stages_of_model(name: str, changes: dict[str, Any], n_stages: int) -> tuple[Any, Any]:
    config = ModelConfig.from_hf(MODELS[name] | changes)
    like = abstract_params(config, jnp.float32)
    return stages_of(traces(partial(apply, config), like), like, n_stages), like


def slices_of(name: str, n_layers: int, tied: bool) -> set[int]:
    """The slices of a LLaMA that read a parameter."""
    if "embed_tokens" in name:
        return {0, n_layers} if tied else {0}
    if "layers." not in name:
        return {n_layers}  # the last norm and the LM head
    i = int(name.split("layers.")[1].split(".")[0])
    before = ("input_layernorm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
    return {i} if any(part in name for part in before) else {i + 1}


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mistral-window", "gemma2"]
)
@pytest.mark.parametrize("n_stages", [1, 2, 3, 5])
def test_a_stage_has_what_its_slices_read(name, n_stages):
    n_layers = 4
    stages, like = stages_of_model(name, {"num_hidden_layers": n_layers}, n_stages)
    tied = "lm_head.weight" not in like
    assert len(stages.ranks) == n_layers + 1 and set(stages.ranks) == set(range(n_stages))
    for rank, names in enumerate(stages.params):
        own = {i for i, at in enumerate(stages.ranks) if at == rank}
        assert names == {x for x in like if slices_of(x, n_layers, tied) & own}


def test_embedding_and_head_are_weighed():
    # In a vocabulary that outweighs all layers both have a stage to themselves.
    for name in ("llama", "llama-tied"):
        for n_words, ranks in ((4096, (0, 1, 1, 1, 2)), (8, (0, 0, 1, 2, 2))):
            stages, _ = stages_of_model(name, {"num_hidden_layers": 4, "vocab_size": n_words}, 3)
            assert stages.ranks == ranks


def test_more_stages_than_slices():
    with pytest.raises(UserError, match="pipeline_parallel=4 is more than the model's 3 slices: take fewer"):
        stages_of_model("llama", {}, 4)
