"""A decode step with a chunk of another request's prompt alongside: the logits and tokens of both run by
themselves.

Over real ranks (`rank_job`), for both transports and each partition; and in one process, for models of every
family.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rank_jobs import run_job
from test_models import MODELS

from jaxlamina.models import ModelConfig, apply, random_params
from jaxlamina.ranks.wires import pack, packed_like, unpack
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.buckets import Buckets
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.workers import DecodeBatch, PrefillBatch
from jaxlamina.workers.model_worker import trace_step
from splitter import split

# transport, attention workers, partition, model, and what else there is in the job
CASES: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("xla", 2, "tokens", "mistral-window", {"second": {"q_first": False}}),
    ("mpi", 2, "heads", "llama", {"dtype": "bfloat16"}),
]
SLOW: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("xla", 1, "heads", "llama", {"second": {"n_batches": 2}}),
    ("xla", 2, "heads", "llama", {"dtype": "bfloat16", "second": {"q_first": False}}),
    ("xla", 2, "requests", "qwen2-window", {}),
    ("mpi", 2, "requests", "llama", {}),
    ("xla", 3, "tokens", "llama", {}),
    ("mpi", 1, "heads", "mistral-window", {"second": {"n_batches": 2}}),
    ("mpi", 2, "tokens", "llama", {"second": {"q_first": False}}),
]


def marked(case: tuple[Any, ...], *marks: Any) -> Any:
    return pytest.param(*case, marks=[*marks, *([pytest.mark.mpi] if case[0] == "mpi" else [])])


@pytest.mark.parametrize(
    ("transport", "n_workers", "partition", "model", "options"),
    [*(marked(case) for case in CASES), *(marked(case, pytest.mark.slow) for case in SLOW)],
)
def test_over_ranks(
    transport: str, n_workers: int, partition: str, model: str, options: dict[str, Any]
) -> None:
    scenario = "with_chunk", {"model": model, "partition": partition, **options}
    found = run_job(transport, n_workers, [scenario], partition=partition)[0]
    bfloat16, second = "dtype" in options, options.get("second", {})
    assert found["finite"] and found["difference"] < (0.03 if bfloat16 else 1e-5), found
    if not bfloat16:  # rounding may turn one
        assert found["tokens"][0] == found["tokens"][1], found
    assert found.get("stray", 0.0) == 0.0, found
    names = found["programs"]
    mixed = [name for name in names if "with prefill" in name or "with chunk" in name]
    assert {"with chunk" in name for name in mixed} == {False, True}, (
        names
    )  # from its first token on, and after others
    assert any("q with k and v" in name for name in mixed) == ("q_first" in second), names
    assert any("staggered" in name for name in names) == ("n_batches" in second), names
    counts = found["n_exchanges"]  # of steps with a chunk and of one without: a chunk is no further message
    assert len(counts) > 2 and len(set(counts.values())) == 1, counts


FEW = ("qwen2-window",)


@pytest.mark.parametrize(
    "name",
    [
        *FEW,
        *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n not in (*FEW, "llama-dynamic")),
    ],
)
def test_unsplit_and_slice_by_slice(name: str) -> None:
    """Against decode and prefill by themselves; a chunk's padding and a batch's are stored nowhere."""
    config, n = ModelConfig.from_hf(MODELS[name]), 40
    fn, params, device = partial(apply, config), random_params(config, seed=3), jax.devices()[0]
    buckets = Buckets(batch=(2,), prompt=(8,), context=(16,))
    slots = np.random.default_rng(1).permutation(n).tolist()
    row, long = slots[:6], slots[6:18]
    found = []
    for kind in ("apart", "unsplit", "slice by slice"):
        if kind == "slice by slice":
            executor: Any = LocalExecutor(fn, params, n_slots=n, model_device=device, attention_device=device)
        else:
            executor = UnsplitExecutor(fn, params, n_slots=n, device=device)
        executor.prefill(PrefillBatch.build([[5, 9, 11]], [row[:3]], buckets, n))
        logits = []
        for step, (start, stop) in enumerate(((0, 5), (5, 12))):
            batch = DecodeBatch.build([7 + step], [row[: 4 + step]], buckets, n)
            own = [list(range(20 + start, 20 + stop))], [long[start:stop]]
            chunk = PrefillBatch.build(*own, buckets, n, [long[:start]])
            if kind == "apart":
                got = executor.decode(batch), executor.prefill(chunk)
            else:
                of_rows, [of_chunk] = executor.run(Step(batch, (PromptPart(chunk),)))
                got = of_rows, of_chunk
            logits += [np.asarray(got[0])[:1], np.asarray(got[1])]
        found.append(np.concatenate(logits))
        kv = executor.kv
        for pool in (*kv.k, *kv.v):
            assert not np.asarray(pool)[[*row[5:], *slots[18:]]].any()
    for got in found[1:]:
        assert np.abs(got - found[0]).max() <= 1e-5 * np.abs(found[0]).max()
        assert (got.argmax(-1) == found[0].argmax(-1)).all()


@pytest.mark.parametrize("name", MODELS)
def test_last_slices_of_fewer_rows_take_the_same_context(name: str) -> None:
    """What `ModelProgram` counts on when it gives the last slice only the rows that logits are wanted of."""
    config = ModelConfig.from_hf(MODELS[name])
    fn, params = partial(apply, config), random_params(config, seed=3)
    many, few = (split(trace_step(fn, params, rows, 1)) for rows in (4 + 8, 4 + 1))
    pairs = list(zip(many.slices[-1].context_vars, few.slices[-1].context_vars, strict=True))
    assert pairs
    for a, b in pairs:
        assert a.aval.dtype == b.aval.dtype
        assert [n if n != 12 else 5 for n in a.aval.shape] == list(b.aval.shape)
    shapes = [[(x.shape, x.dtype) for x in m.slice_params(m.n, params)] for m in (many, few)]
    assert shapes[0] == shapes[1]


def test_a_chunk_of_several_requests_is_refused() -> None:
    config, n = ModelConfig.from_hf(MODELS["llama"]), 8
    executor = UnsplitExecutor(
        partial(apply, config), random_params(config, seed=3), n_slots=n, device=jax.devices()[0]
    )
    buckets = Buckets(batch=(1,), prompt=(2,), context=(2,))
    batch = DecodeBatch.build([1], [[0, 1]], buckets, n)
    chunk = PrefillBatch.build([[1, 2], [3, 4]], [[2, 3], [4, 5]], buckets, n)
    with pytest.raises(ValueError, match="a chunk of 2 requests must be of one"):
        executor.run(Step(batch, (PromptPart(chunk),)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_messages_of_several_dtypes_arrive_bit_by_bit(dtype: str) -> None:
    rng = np.random.default_rng(0)
    outs = jnp.asarray(rng.standard_normal((3, 1, 2, 4)), dtype)
    partials = jnp.asarray(rng.standard_normal((1, 5, 2, 5)), jnp.float32).at[0, 0, 0, 4].set(-jnp.inf)
    likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (outs, partials)]
    message = jax.jit(pack)(outs, partials)
    assert (message.shape, message.dtype) == (packed_like(*likes).shape, packed_like(*likes).dtype)
    assert message.nbytes == outs.nbytes + partials.nbytes
    for got, want in zip(unpack(message, *likes), (outs, partials), strict=True):
        assert got.dtype == want.dtype and np.array_equal(np.asarray(got), np.asarray(want))
