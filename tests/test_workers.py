"""Split execution: against the model over the whole sequence, against unsplit execution, and what each worker
holds.

Small random models of every family; SmolLM2 is in test_llm.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import MODELS, VARIANTS

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, apply, random_params
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.buckets import Buckets
from jaxlamina.transports import local
from jaxlamina.transports.local import CompiledPieces
from jaxlamina.workers import AttentionSpec, DecodeBatch, PrefillBatch
from jaxlamina.workers.capacity import host_free_bytes, slots_that_fit

BUCKETS = Buckets(batch=(1, 2, 4), prompt=(8, 16), context=(16, 32))
ONE_BUCKET = Buckets(batch=(4,), prompt=(16,), context=(32,))  # fewer programs, where buckets do not matter
N_SLOTS = 60
PROMPTS = ([5, 9, 11, 3, 4, 17, 8, 2, 1, 6], [7, 8], [40, 41, 42, 43, 44])
N_STEPS = 8
DEVICE = jax.devices()[0]


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_hf(MODELS[name])


def make(config: ModelConfig, params=None, kind: str = "split", n_slots: int = N_SLOTS):
    params = random_params(config, seed=3) if params is None else params
    fn = partial(apply, config)
    if kind == "unsplit":
        return UnsplitExecutor(fn, params, n_slots=n_slots, device=DEVICE)
    q_first = kind == "q first"
    return LocalExecutor(
        fn, params, n_slots=n_slots, model_device=DEVICE, attention_device=DEVICE, q_first=q_first
    )


class Rows:
    """Requests by hand: tokens and scattered slots, decoded with given or greedy tokens."""

    def __init__(self, executor, prompts=PROMPTS, buckets=BUCKETS) -> None:
        self.executor = executor
        self.buckets = buckets
        self.free = np.random.default_rng(1).permutation(executor.n_slots).tolist()
        self.tokens = [list(p) for p in prompts]
        self.slots = [[self.free.pop() for _ in p] for p in prompts]
        self.logits: list[np.ndarray] = []  # [n_rows, V] a step

    def prefill(self) -> None:
        rows = [
            self.executor.prefill(PrefillBatch.build([tokens], [slots], self.buckets, self.executor.n_slots))
            for tokens, slots in zip(self.tokens, self.slots, strict=True)
        ]
        self._take(np.concatenate([np.asarray(row) for row in rows]))

    def decode(self) -> None:
        for row in self.slots:
            row.append(self.free.pop())
        newest = [row[-1] for row in self.tokens]
        batch = DecodeBatch.build(newest, self.slots, self.buckets, self.executor.n_slots)
        self._take(np.asarray(self.executor.decode(batch))[: len(newest)])

    def _take(self, logits: np.ndarray) -> None:
        self.logits.append(np.array(logits))  # not a view, which would keep the device array alive
        for row, token in zip(self.tokens, logits.argmax(-1), strict=True):
            row.append(int(token))

    def run(self, n_steps: int = N_STEPS) -> Rows:
        self.prefill()
        for _ in range(n_steps):
            self.decode()
        return self


def assert_close(got: np.ndarray, want: np.ndarray, relative: float) -> None:
    assert np.abs(got - want).max() <= relative * np.abs(want).max()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS))
        for name in MODELS
        if name not in ("gemma", "phi3-longrope", "qwen3-moe-plain-shares")  # as gemma2, phi3, qwen3-moe
    ],
)
def test_split_equals_unsplit_and_the_whole_sequence(name: str):
    config = config_of(name)
    params = random_params(config, seed=3)
    split = Rows(make(config, params), buckets=ONE_BUCKET).run()
    unsplit = Rows(make(config, params, "unsplit"), buckets=ONE_BUCKET).run()
    assert split.tokens == unsplit.tokens
    for got, want in zip(split.logits, unsplit.logits, strict=True):
        assert_close(got, want, 1e-5)
    if config.rope is not None and config.rope.rope_type == "dynamic":
        # its cached keys keep the base of their own step, so a whole sequence at once is another function
        return
    longest = max(len(row) for row in split.tokens)
    padded = np.asarray([row + [0] * (longest - len(row)) for row in split.tokens], np.int32)
    positions = np.broadcast_to(np.arange(longest, dtype=np.int32), padded.shape)
    whole = np.asarray(jax.jit(partial(apply, config))(params, padded, positions))
    for b, prompt in enumerate(PROMPTS):
        for step, logits in enumerate(split.logits):
            assert_close(logits[b], whole[b, len(prompt) - 1 + step], 2e-5)


def test_sending_q_first_changes_nothing():
    config = config_of("qwen3")
    whole, parts = (Rows(make(config, kind=kind), buckets=ONE_BUCKET).run() for kind in ("split", "q first"))
    for got, want in zip(parts.logits, whole.logits, strict=True):
        assert np.array_equal(got, want)


def test_bfloat16_split_follows_unsplit():
    config = config_of("llama")
    params = random_params(config, seed=3, dtype=jnp.bfloat16)
    split, unsplit = (Rows(make(config, params, kind), buckets=ONE_BUCKET) for kind in ("split", "unsplit"))
    assert split.executor.kv.k[0].dtype == jnp.bfloat16
    for rows in (split, unsplit):
        rows.prefill()
    for _ in range(N_STEPS):
        unsplit.tokens = [list(row) for row in split.tokens]  # teacher-forced: rounding may turn a token
        for rows in (split, unsplit):
            rows.decode()
    for got, want in zip(split.logits, unsplit.logits, strict=True):
        assert_close(got, want, 0.03)


def test_everything_a_step_made_but_its_kv_can_be_deleted(monkeypatch):
    """Decoding goes on with the same tokens."""
    config = config_of("llama")
    rows = Rows(make(config), buckets=ONE_BUCKET)
    expected = Rows(make(config), buckets=ONE_BUCKET).run().tokens
    executor, run = rows.executor, CompiledPieces.run
    made: list[jax.Array] = []

    def watched(*args):
        outs = run(*args)
        made.extend(outs)
        return outs

    monkeypatch.setattr(CompiledPieces, "run", watched)
    weights = {id(x) for x in executor.model.params.values()}
    for step in [rows.prefill, *[rows.decode] * N_STEPS]:
        step()
        assert len(made) > 2 * len(executor.specs)
        kv = {id(x) for x in (*executor.kv.k, *executor.kv.v)}
        for x in made:
            assert id(x) not in weights
            if id(x) not in kv and not x.is_deleted():
                x.delete()
        made.clear()
    assert rows.tokens == expected


def test_each_worker_holds_its_own_and_nothing_else():
    config = config_of("llama")
    before = {id(x) for x in jax.live_arrays()}
    rows = Rows(make(config), buckets=ONE_BUCKET).run(2)
    executor = rows.executor

    def memory(arrays) -> set[int]:
        return {x.unsafe_buffer_pointer() for x in arrays}

    pools = memory((*executor.kv.k, *executor.kv.v))
    weights = memory(executor.model.params.values())
    bound = [x for pair in executor._side._weights.values() for x in pair]
    constants = [x for x in bound if x.unsafe_buffer_pointer() not in weights]
    # Of the trace: rotary frequencies; no copy of a weight.
    assert all(x.shape == (config.head_dim // 2,) for x in constants)
    assert not weights & pools
    n_prompt = len(PROMPTS[0])
    spec = executor.specs[0]
    for x in jax.live_arrays():
        if id(x) in before or x.unsafe_buffer_pointer() in pools | weights | memory(constants):
            continue
        # What is left over: the step's small tables. No KV of a prompt, no hidden state.
        assert x.size < n_prompt * spec.n_kv_heads * spec.head_dim, x.shape
        assert not jnp.issubdtype(x.dtype, jnp.floating), (x.shape, x.dtype)


def test_a_growing_sequence_compiles_once_a_bucket():
    config = config_of("llama")
    rows = Rows(make(config), prompts=[[1, 2, 3]])
    rows.prefill()
    rows.decode()
    counts = rows.executor.programs.total
    for _ in range(13):  # up to 16 earlier tokens: the first context bucket
        rows.decode()
    assert rows.executor.programs.total == counts
    for _ in range(5):
        rows.decode()
    assert rows.executor.programs.total == counts + 1


def test_equal_slices_share_programs_at_any_depth(monkeypatch):
    monkeypatch.setattr(local, "_ROUNDS_A_CALL", {"cpu": 3})
    totals = []
    for n_layers in (9, 15):
        config = ModelConfig.from_hf(MODELS["llama"] | {"num_hidden_layers": n_layers})
        rows = Rows(make(config), buckets=ONE_BUCKET).run(1)
        totals.append(rows.executor.programs.total)
    assert totals[0] == totals[1]


def test_layers_of_different_windows_get_their_own():
    specs = make(config_of("qwen2-window")).specs
    assert [spec.window for spec in specs] == [None, 4]


def test_padding_rows_store_nothing():
    config = config_of("llama")
    rows = Rows(make(config))
    rows.prefill()
    attention = rows.executor
    rows.decode()  # three rows in a batch of four
    used = {slot for row in rows.slots for slot in row}
    unused = [slot for slot in range(N_SLOTS) if slot not in used]
    for pool in (*attention.kv.k, *attention.kv.v):
        assert not np.asarray(pool)[unused].any() and np.asarray(pool)[sorted(used)].any(axis=(1, 2)).all()


def test_an_operator_of_another_kind_is_refused_by_name():
    def model(params, tokens, positions, logits_at=None):
        x = params["e"][tokens]
        q = (x @ params["w"]).reshape(*x.shape[:2], 2, 4)
        return jax.nn.dot_product_attention(q, q, q).reshape(*x.shape[:2], 8)

    params = {"e": jnp.ones((10, 8)), "w": jnp.ones((8, 8))}
    with pytest.raises(UserError, match="dot_product_attention; this runtime runs splitter.attention"):
        LocalExecutor(model, params, n_slots=8, model_device=DEVICE, attention_device=DEVICE)


def test_decode_batch_pads_rows_and_context():
    batch = DecodeBatch.build([7, 8, 9], [[4, 5, 6], [1], list(range(20, 38))], BUCKETS, 60)
    assert batch.tokens[:, 0].tolist() == [7, 8, 9, 0]
    assert batch.lengths.tolist() == [2, 0, 17, 0] and batch.positions[:, 0].tolist() == [2, 0, 17, 0]
    assert batch.new_slots.tolist() == [6, 1, 37, 60]
    assert batch.slot_table.shape == (4, 32) and batch.slot_table[0, :2].tolist() == [4, 5]


def test_prefill_batch_pads_to_the_right():
    batch = PrefillBatch.build([[1, 2, 3], [4]], [[9, 8, 7], [6]], BUCKETS, 60)
    assert batch.tokens.shape == (2, 8) and batch.logits_at.tolist() == [2, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2] and not batch.positions[1].any()
    assert batch.slots[0].tolist() == [9, 8, 7, 60, 60, 60, 60, 60]


SPEC = AttentionSpec(2, 16, np.dtype(np.float32), 0.25, None, None)


def test_capacity_goes_by_free_memory_and_says_so_when_it_is_short(monkeypatch):
    assert SPEC.slot_bytes == 2 * 2 * 16 * 4
    monkeypatch.setattr("jaxlamina.workers.capacity.host_free_bytes", lambda: 10 * 100 * 4 * SPEC.slot_bytes)
    assert slots_that_fit([SPEC] * 4, jax.devices("cpu")[0], most=1000, least=1) == 100
    assert slots_that_fit([SPEC] * 4, jax.devices("cpu")[0], most=30, least=1) == 30
    with pytest.raises(
        UserError, match="hold 100 KV slots of 1,024 bytes, fewer than one request of 101 tokens"
    ):
        slots_that_fit([SPEC] * 4, jax.devices("cpu")[0], most=1000, least=101)


def test_a_containers_limit_counts(tmp_path: Path):
    proc = tmp_path / "meminfo"
    proc.write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert host_free_bytes(proc, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert host_free_bytes(proc, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert host_free_bytes(proc, tmp_path) == 4000
    assert host_free_bytes(tmp_path / "no", tmp_path / "no") > 0


@pytest.mark.parametrize("kind", ["split", "q first"])
def test_pools_are_donated_not_copied(kind: str):
    rows = Rows(make(config_of("llama"), kind=kind))
    for step in (rows.prefill, rows.decode):
        before = [*rows.executor.kv.k, *rows.executor.kv.v]
        step()
        assert all(pool.is_deleted() for pool in before)


TWO_DEVICES = """
import jax, numpy as np
from test_workers import Rows, config_of, random_params, partial, apply, LocalExecutor
first, second = jax.devices()
config = config_of("llama")
params = random_params(config, seed=3)
def make(a, b, **kw):
    return LocalExecutor(partial(apply, config), params, n_slots=60, model_device=a, attention_device=b, **kw)
apart = Rows(make(first, second)).run()
assert apart.executor.q_first
assert {x.device for x in apart.executor.kv.k} == {second}
assert {x.device for x in apart.executor.model.params.values()} == {first}
for other in (Rows(make(first, first)).run(), Rows(make(first, second, q_first=False)).run()):
    assert other.tokens == apart.tokens
    for got, want in zip(other.logits, apart.logits, strict=True):
        assert np.array_equal(got, want)
print("apart and equal")
"""


def on_devices(code: str, n: int, timeout_s: float = 300) -> str:
    """What ``code`` prints in a process with so many devices, which finds what tests do."""
    root = Path(__file__).parent.parent
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={n}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
    }
    child = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_workers_on_two_devices():
    assert "apart and equal" in on_devices(TWO_DEVICES, 2)
