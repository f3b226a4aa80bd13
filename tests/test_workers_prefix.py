"""Prefill of what follows stored tokens: equal to a prefill of the whole prompt, split and unsplit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from test_models import MODELS, VARIANTS
from test_workers import BUCKETS, N_SLOTS, assert_close, config_of, make

from jaxlamina.models import random_params
from jaxlamina.workers import PrefillBatch

PROMPTS = [list(range(3, 16)), list(range(40, 47)), [9, 8, 7, 6, 5]]
HITS = (9, 0, 4)  # tokens of each that are stored already; the rest is one chunk


def chunk_batch(slots, prompts=PROMPTS, hits=HITS) -> PrefillBatch:
    rest = [row[n:] for row, n in zip(prompts, hits, strict=True)]
    to = [row[n:] for row, n in zip(slots, hits, strict=True)]
    earlier = [row[:n] for row, n in zip(slots, hits, strict=True)]
    return PrefillBatch.build(rest, to, BUCKETS, N_SLOTS, earlier)


def scattered(prompts=PROMPTS, seed=1) -> list[list[int]]:
    free = np.random.default_rng(seed).permutation(N_SLOTS).tolist()
    return [[free.pop() for _ in row] for row in prompts]


def whole_then_chunks(executor) -> tuple[np.ndarray, np.ndarray]:
    """Logits of whole prompts, and of the same prompts in two goes into other slots."""
    slots = scattered()
    whole = executor.prefill(PrefillBatch.build(PROMPTS, slots, BUCKETS, N_SLOTS))
    whole = np.array(whole)
    slots = scattered(seed=2)
    for row, row_slots, n in zip(PROMPTS, slots, HITS, strict=True):
        if n:
            executor.prefill(PrefillBatch.build([row[:n]], [row_slots[:n]], BUCKETS, N_SLOTS))
    return whole, np.array(executor.prefill(chunk_batch(slots)))


# What these have of their own is in the model's slices, not in attention over stored tokens.
SAME = (
    "gemma",
    "gemma2",
    "granite",
    "phi3",
    "phi3-longrope",
    "smollm3",
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-plain-shares",
)
CASES = [
    pytest.param(name, "split", marks=[pytest.mark.slow] * (name in VARIANTS))
    for name in MODELS
    if name not in SAME
] + [
    ("llama", "unsplit"),
    ("qwen2-window", "unsplit"),
]


@pytest.mark.parametrize("name, kind", CASES)
def test_a_chunk_after_stored_tokens_equals_the_whole_prompt(name: str, kind: str):
    config = config_of(name)
    if config.rope is not None and config.rope.rope_type == "dynamic":
        pytest.skip("stored keys keep the base of their own length: a chunk is another function")
    whole, chunk = whole_then_chunks(make(config, kind=kind))
    assert_close(chunk, whole, 2e-5)


def test_chunk_by_chunk_equals_the_whole_prompt():
    executor = make(config_of("qwen2-window"))
    prompt = list(range(5, 25))
    slots = scattered([prompt])[0]
    want = np.array(executor.prefill(PrefillBatch.build([prompt[:16]], [slots[:16]], BUCKETS, N_SLOTS)))
    for first, last in ((0, 3), (3, 4), (4, 12), (12, 16)):
        batch = PrefillBatch.build(
            [prompt[first:last]], [slots[first:last]], BUCKETS, N_SLOTS, [slots[:first]]
        )
        got = np.array(executor.prefill(batch))
    assert_close(got, want, 2e-5)


def test_bfloat16_chunks_follow_the_whole_prompt():
    config = config_of("llama")
    params = random_params(config, seed=3, dtype=jnp.bfloat16)
    for kind in ("split", "unsplit"):
        whole, chunk = whole_then_chunks(make(config, params, kind))
        assert_close(chunk, whole, 0.03)


def test_stored_tokens_are_read_and_others_are_not():
    executor = make(config_of("llama"))
    slots = scattered()
    for row, row_slots, n in zip(PROMPTS, slots, HITS, strict=True):
        if n:
            executor.prefill(PrefillBatch.build([row[:n]], [row_slots[:n]], BUCKETS, N_SLOTS))
    batch = chunk_batch(slots)
    want = np.array(executor.prefill(batch))
    read = {s for row, n in zip(slots, HITS, strict=True) for s in row[:n]}
    others = jnp.asarray(sorted(set(range(N_SLOTS)) - read))
    executor.kv.k, executor.kv.v = (
        [pool.at[others].set(jnp.nan) for pool in pools] for pools in (executor.kv.k, executor.kv.v)
    )
    assert np.array_equal(np.array(executor.prefill(batch)), want)
    executor.kv.k[0] = executor.kv.k[0].at[slots[0][0]].set(3.0)
    assert not np.array_equal(np.array(executor.prefill(batch))[0], want[0])


def test_without_stored_tokens_no_new_program_is_compiled():
    executor = make(config_of("llama"))
    slots = scattered()
    executor.prefill(PrefillBatch.build(PROMPTS, slots, BUCKETS, N_SLOTS))
    before = dict(executor.programs.counts)
    executor.prefill(PrefillBatch.build(PROMPTS, slots, BUCKETS, N_SLOTS, [[], [], []]))
    assert executor.programs.counts == before
    assert not any("stored" in what for what in before)


def test_prefill_batch_with_earlier_tokens():
    batch = PrefillBatch.build([[1, 2, 3], [4]], [[9, 8, 7], [6]], BUCKETS, 60, [[11, 12], []])
    assert batch.has_earlier and batch.slot_table.shape == (2, 16)
    assert batch.slot_table[0, :2].tolist() == [11, 12] and batch.lengths.tolist() == [2, 0]
    assert batch.positions[0].tolist() == [2, 3, 4, 4, 4, 4, 4, 4] and not batch.positions[1].any()
    assert batch.logits_at.tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"len\(earlier\)=1 must be equal"):
        PrefillBatch.build([[1], [2]], [[3], [4]], BUCKETS, 60, [[5]])
