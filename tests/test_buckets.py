"""Buckets: every size fits in one, and none wastes more than it should."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.buckets import Buckets, bucket, steps
from jaxlamina.workers.spec import AttentionSpec, bucket_cut


@given(st.integers(1, 300), st.integers(1, 40_000))
def test_default_buckets_hold_everything_up_to_their_limits(max_num_seqs: int, max_model_len: int):
    sizes = Buckets.default(max_num_seqs, max_model_len)
    assert sizes.batch[-1] == max_num_seqs and sizes.context[-1] == max_model_len
    assert sizes.prompt[-1] == max(2, max_model_len)
    assert len(sizes.context) < 80
    for n in {1, max_num_seqs // 2 + 1, max_num_seqs}:
        got = bucket(n, sizes.batch)
        assert n <= got and (n < 8 or got <= n * 1.5)
    for n in {1, max_model_len // 2 + 1, max_model_len}:
        got = bucket(n, sizes.context)
        assert n <= got and (n <= 512 or got <= n * 1.125)


@given(st.integers(1, 40_000))
def test_contexts_of_steps_that_are_one_program(max_model_len: int):
    for cut, most, from_, ratio in (("coarse", 20, 256, 1.5), ("doubling", 8, 512, 2)):
        sizes = Buckets.default(4, max_model_len, cut)
        assert sizes.context[-1] == max_model_len and len(sizes.context) <= most
        for n in {1, max_model_len // 3 + 1, max_model_len // 2 + 1, max_model_len}:
            got = bucket(n, sizes.context)
            assert n <= got and (n < from_ or got <= n * ratio)


def test_contexts_as_they_are_cut():
    def contexts(cut):
        return Buckets.default(1, 2048, cut).context

    assert contexts("coarse") == (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    assert contexts("doubling") == (512, 1024, 2048)
    assert len(contexts("fine")) == 24 and Buckets.default(1, 96, "coarse").context == (64, 96)
    assert Buckets.default(1, 96, "doubling").context == (96,)


def test_batches_and_prompts_where_padding_costs_little():
    sizes = Buckets.default(320, 1000, "doubling")
    assert sizes.batch == (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320)
    assert sizes.prompt == (32, 64, 128, 256, 384, 512, 768, 1000)
    assert Buckets.default(48, 20, "doubling").batch == (1, 2, 4, 8, 16, 32, 48)
    assert Buckets.default(128, 2, "doubling").prompt == (2,)
    few = Buckets.default(1, 300, "doubling")
    assert (few.batch, few.prompt) == ((1,), (32, 64, 128, 256, 300))


@given(st.integers(1, 600), st.integers(1, 40_000))
def test_doubling_holds_everything_up_to_the_limits(max_num_seqs: int, max_model_len: int):
    sizes = Buckets.default(max_num_seqs, max_model_len, "doubling")
    assert sizes.batch[-1] == max_num_seqs and sizes.prompt[-1] == max(2, max_model_len)
    for n in {1, max_num_seqs // 2 + 1, max_num_seqs}:
        assert n <= bucket(n, sizes.batch) <= max(n * (2 if n <= 128 else 1.5), 1)
    for n in {1, max_model_len // 2 + 1, max_model_len}:
        assert n <= bucket(n, sizes.prompt) <= max(32, n * (2 if n <= 256 else 1.5))


def test_bucket_is_the_smallest_that_fits():
    assert [bucket(n, (2, 4, 9)) for n in (0, 1, 2, 3, 4, 5, 9)] == [2, 2, 2, 4, 4, 9, 9]
    with pytest.raises(ValueError, match="n=10 must be within 0 … 9"):
        bucket(10, (2, 4, 9))


def test_steps_cut_each_doubling_evenly():
    assert steps(16, 100, 2) == (16, 24, 32, 48, 64, 96, 100)
    assert steps(8, 32, 1) == (8, 16, 32)
    assert steps(8, 3, 2) == (3,)
    with pytest.raises(ValueError, match="start=0"):
        steps(0, 4, 1)


@pytest.mark.parametrize("sizes", [(), (0, 4), (4, 4), (8, 4)])
def test_bad_buckets_are_refused(sizes):
    with pytest.raises(ValueError, match="positive and rising"):
        Buckets(batch=sizes, prompt=(16,), context=(64,))


def test_a_prompt_bucket_of_one_token_is_refused():
    with pytest.raises(ValueError, match="must start at 2"):
        Buckets(batch=(1,), prompt=(1, 16), context=(64,))


@pytest.mark.parametrize(
    ("capability", "dtype", "kv", "head_dim", "cut"),
    [
        ("9.0", "bfloat16", "auto", 128, "doubling"),
        ("10.0", "float32", "int8", 64, "doubling"),
        ("9.0", "float32", "auto", 128, "coarse"),  # Triton's or XLA's
        ("9.0", "bfloat16", "auto", 72, "coarse"),
        ("8.0", "bfloat16", "auto", 128, "coarse"),
        (None, "bfloat16", "auto", 128, "coarse"),
    ],
)
def test_how_finely_contexts_are_cut(capability, dtype, kv, head_dim, cut):
    """By what a device's attention looks at; the devices are names of them."""
    device = SimpleNamespace(platform="cpu" if capability is None else "gpu", compute_capability=capability)
    spec = AttentionSpec(2, head_dim, np.dtype(jnp.dtype(dtype)), 1.0, None, None, kv)
    assert bucket_cut([spec], device) == cut
