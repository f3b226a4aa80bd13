"""Buckets: every size fits in one, and none wastes more than it should."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.engine.sizes_to_compile import first_of, shapes
from jaxlamina.steps.buckets import Buckets, CompiledSizes, StepSizes, bucket, steps
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
    for cut, most, from_, ratio in (("coarse", 20, 256, 1.5), ("doubling", 4, 2048, 4)):
        sizes = Buckets.default(4, max_model_len, cut)
        assert sizes.context[-1] == max_model_len and len(sizes.context) <= most
        for n in {1, max_model_len // 3 + 1, max_model_len // 2 + 1, max_model_len}:
            got = bucket(n, sizes.context)
            assert n <= got and (n < from_ or got <= n * ratio)


def test_contexts_as_they_are_cut():
    def contexts(cut):
        return Buckets.default(1, 2048, cut).context

    assert contexts("coarse") == (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    assert contexts("doubling") == (2048,)
    for most, found in (
        (4096, (4096,)),
        (9000, (2250, 9000)),
        (16384, (4096, 16384)),
        (32768, (2048, 8192, 32768)),
    ):
        assert Buckets.default(1, most, "doubling").context == found
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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("capability", "dtype", "kv", "head_dim", "cut"),
    [
        ("9.0", "bfloat16", "auto", 128, "doubling"),
        ("10.0", "float32", "int8", 64, "doubling"),
        ("9.0", "float32", "auto", 128, "coarse"),  # Triton's or XLA's
        ("9.0", "bfloat16", "auto", 72, "coarse"),
        ("8.0", "bfloat16", "auto", 128, "coarse"),
        (None, "bfloat16", "auto", 128, "few"),
    ],
)
def test_how_finely_contexts_are_cut(capability, dtype, kv, head_dim, cut):
    """By what a device's attention looks at; the devices are names of them."""
    device = SimpleNamespace(platform="cpu" if capability is None else "gpu", compute_capability=capability)
    spec = AttentionSpec(2, head_dim, np.dtype(jnp.dtype(dtype)), 1.0, None, None, kv)
    assert bucket_cut([spec], device) == cut


def test_a_cpu_has_few_sizes():
    sizes = Buckets.default(32, 8192, "few")
    assert sizes.batch == (1, 2, 4, 8, 16, 32) and sizes.context == (2048, 8192) and not sizes.prefills
    assert sizes.prompt == (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    todo = shapes(sizes, max_model_len=8192, max_chunk=2048)
    assert len(todo) == 6 * 2 + 7 * 2, "what `jaxlamina serve` compiles with its defaults"
    assert {shape.kind for shape in todo} == {"decode", "chunk"}
    more = [shape for shape in first_of(todo, 8) if shape not in first_of(todo)]
    assert more == [StepSizes("chunk", 1, 1024, 8192)], (
        "half of a step's longest prompt, where many cores compile"
    )
    # A prompt that follows nothing is a chunk; it needs no program of its own.
    assert sizes.fit(StepSizes("prefill", 1, 40, 0)) == StepSizes("chunk", 1, 64, 2048)
    alone = shapes(sizes, max_model_len=8192, max_chunk=2048, chunks=False)
    assert [s for s in alone if s.kind != "decode"] == [
        StepSizes("chunk", 1, n, 2048) for n in sizes.prompt[:7]
    ]


CUTS = st.sampled_from(["fine", "coarse", "doubling", "few"])


@given(st.data(), CUTS, st.integers(1, 40), st.integers(2, 3000), st.booleans(), st.integers(2, 4000))
def test_a_step_is_padded_to_the_smallest_that_is_compiled(data, cut, most_rows, longest, mixed, chunk):
    sizes = Buckets.default(most_rows, longest, cut)
    todo = shapes(sizes, max_model_len=longest, max_chunk=chunk, mixed=mixed and cut != "fine")
    first = first_of(todo)
    assert len(first) <= 5
    compiled = CompiledSizes(sizes)
    compiled.add(first)
    compiled.add(data.draw(st.lists(st.sampled_from(todo), max_size=3)))
    n_rows = data.draw(st.integers(1, most_rows))
    rows = StepSizes("decode", n_rows, 1, data.draw(st.integers(1, longest - 1)))
    earlier = data.draw(st.integers(0, max(0, longest - 2)))
    n_tokens = data.draw(st.integers(1, min(chunk, longest - earlier)))
    prompt = StepSizes("chunk" if earlier else "prefill", 1, n_tokens, earlier)
    for wanted in (rows, prompt):
        found = compiled.fit(wanted)
        assert found in compiled.shapes, "nothing is compiled for a request once the first are"
        assert found.holds(wanted)
        assert found == min(
            (s for s in compiled.shapes if s.holds(wanted)),
            key=lambda s: (s != sizes.fit(wanted), s.room),
        )
    assert compiled.rows(n_rows) >= n_rows
    compiled.add(todo)
    assert compiled.fit(rows) == sizes.fit(rows) and compiled.fit(prompt) == sizes.fit(prompt)


def test_sizes_that_nothing_compiled_holds_are_compiled_at_once():
    sizes = Buckets(batch=(1, 4), prompt=(8, 32), context=(16, 64))
    compiled = CompiledSizes(sizes)
    assert compiled.fit(StepSizes("decode", 3, 1, 20)) == StepSizes("decode", 4, 1, 64)
    compiled.add([StepSizes("decode", 4, 1, 64), StepSizes("chunk", 1, 32, 64)])
    assert compiled.fit(StepSizes("prefill", 1, 5, 0)) == StepSizes("chunk", 1, 32, 64)
    assert compiled.wanted == {StepSizes("prefill", 1, 8, 0): 25}, (
        "24 rows of padding less, and the step itself"
    )
    scored = StepSizes("prefill", 1, 5, 0, of_all=True)
    assert compiled.fit(scored) == StepSizes("prefill", 1, 8, 0, of_all=True)
    both = StepSizes("decode", 1, 1, 3, alongside=StepSizes("chunk", 1, 9, 30))
    assert compiled.fit(both) == StepSizes("decode", 1, 1, 16, alongside=StepSizes("chunk", 1, 32, 64))
    compiled.add([StepSizes("decode", 4, 1, 64, alongside=StepSizes("chunk", 1, 32, 64))])
    assert compiled.fit(both) == StepSizes("decode", 4, 1, 64, alongside=StepSizes("chunk", 1, 32, 64))
    with pytest.raises(ValueError, match="n=5 must be within"):
        compiled.fit(StepSizes("decode", 5, 1, 3))
