"""KV over several attention workers: the plans by themselves, and each partition equal to one worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_workers import on_devices

import splitter
from jaxlamina.errors import UserError
from jaxlamina.kv.placement import (
    Placement,
    checked_partition,
    chosen_partition,
    eighths,
    plan_rows,
    why_chosen,
    wish_by_requests,
    wish_by_tokens,
)
from jaxlamina.run.local import LocalExecutor
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.calibration import Calibration

DEVICE = jax.devices()[0]
KINDS = ("heads", "requests", "tokens")


def check_placement(placement: Placement, written: set[int]) -> None:
    """Every written slot has a place of its own; used and free places add up."""
    places = {(int(placement.worker[s]), int(placement.local[s])) for s in written}
    assert len(places) == len(written) and all(w >= 0 for w, _ in places)
    for w in range(len(placement.n_used)):
        free = placement._free[w][: placement._n_free[w]].tolist()
        used = [local for worker, local in places if worker == w]
        assert sorted(free + used) == list(range(len(free) + len(used)))
        assert placement.n_used[w] == len(used)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.data())
def test_every_slot_has_a_place_of_its_own(n_workers: int, n_slots: int, data):
    placement = Placement(n_slots, [-(-n_slots // n_workers)] * n_workers)
    written: set[int] = set()
    for _ in range(data.draw(st.integers(1, 8))):
        slots = np.asarray(data.draw(st.lists(st.integers(0, n_slots - 1), unique=True)), np.int64)
        if data.draw(st.booleans()):
            wish = np.asarray(
                data.draw(st.lists(st.integers(0, n_workers - 1), min_size=len(slots), max_size=len(slots))),
                np.int64,
            )
            placement.place(slots, wish)
            written |= set(slots.tolist())
        else:
            placement.release(slots)
            written -= set(slots.tolist())
        check_placement(placement, written)


@given(st.integers(1, 9), st.lists(st.integers(1, 16), min_size=1, max_size=3))
def test_auto_is_heads_where_they_divide_and_else_tokens(n_workers: int, heads: list[int]):
    chosen = chosen_partition("auto", n_workers, heads)
    checked_partition(chosen, n_workers, heads)
    divides = all(k % n_workers == 0 for k in heads)
    assert chosen == ("heads" if divides else "tokens")
    why = why_chosen("auto", chosen, n_workers, heads)
    assert why is None if divides else "(partition 'tokens')" in why
    assert [chosen_partition(kind, n_workers, heads) for kind in KINDS[1:]] == list(KINDS[1:])
    assert why_chosen("tokens", "tokens", n_workers, heads) is None  # as was asked


def test_a_job_chooses_its_partition_by_the_model():
    from jaxlamina.job.cluster import Cluster
    from jaxlamina.ranks.cluster_layout import layout_of, partition_of

    cluster = Cluster(dop=(1, 2), local_attention=0)
    assert [partition_of(cluster, [k]) for k in (3, 4)] == ["tokens", "heads"]
    assert layout_of(cluster, partition_of(cluster, [3])).partition == "tokens"
    with pytest.raises(UserError, match="take partition='heads', or mini_batches=1"):
        partition_of(replace(cluster, mini_batches=2), [3])
    assert partition_of(replace(cluster, partition="heads"), [3]) == "heads"
    with pytest.raises(UserError, match="3 KV heads for 4 attention workers, each of which needs one"):
        partition_of(replace(cluster, dop=(1, 4), partition="heads"), [3, 8])


def test_a_wish_is_granted_where_there_is_room():
    placement = Placement(6, [3, 3])
    placement.place(np.arange(4), np.zeros(4, np.int64))
    assert placement.worker[:4].tolist() == [0, 0, 0, 1]
    placement.release(np.asarray([0]))
    placement.place(np.asarray([5]), np.asarray([0]))
    assert placement.worker[5] == 0 and placement.n_used.tolist() == [3, 1]


def test_only_some_workers_are_asked_whatever_is_wished():
    placement = Placement(10, [3, 3, 8])
    placement.place(np.arange(4), np.asarray([2, 2, 0, 0]), among=2)
    assert placement.n_used.tolist() == [2, 2, 0]
    with pytest.raises(AssertionError, match="these pools together have fewer places free"):
        placement.place(np.arange(4, 7), np.zeros(3, np.int64), among=2)


def test_a_new_request_goes_where_least_kv_is_and_stays_there():
    placement = Placement(40, [20, 20])
    table = np.zeros((3, 0), np.int32)
    wish = wish_by_requests(placement, table, np.zeros(3, np.int32), np.asarray([2, 9, 5]))
    assert wish.tolist() == [1, 0, 1]  # the longest first, then the other two beside it
    placement.place(np.arange(16), np.repeat(wish, [2, 9, 5]))
    table = np.asarray([[0, 1], [15, 14]], np.int32)
    assert wish_by_requests(placement, table, np.asarray([2, 2]), np.asarray([1, 1])).tolist() == [1, 1]
    table = np.zeros((1, 1), np.int32)
    assert wish_by_requests(placement, table, np.asarray([0]), np.asarray([1])).tolist() == [1]


def test_blocks_of_tokens_go_round():
    assert wish_by_tokens(np.arange(10), 3, 2).tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_plans_cover_each_token_once_and_windows_see_the_same(n_workers, b, c, t, seed):
    """A row's tokens over all workers are its table; what a query sees of each through its window is the
    same."""
    rng = np.random.default_rng(seed)
    n_slots = b * (c + t) + 3
    window = int(rng.integers(1, c + t + 1))
    placement = Placement(n_slots, [-(-n_slots // n_workers)] * n_workers)
    deck = rng.permutation(n_slots)
    placement.place(deck, rng.integers(0, n_workers, n_slots))
    lengths = rng.integers(0, c + 1, b).astype(np.int32)
    table = deck[: b * c].reshape(b, c).astype(np.int32)
    new = deck[b * c : b * (c + t)].reshape(b, t).astype(np.int32)
    new = np.where(rng.random(new.shape) < 0.3, n_slots, new)
    positions = lengths[:, None] + np.arange(t)
    seen: dict[tuple[int, int], list[int]] = {}
    stored: list[int] = []
    logical = {(int(placement.worker[s]), int(placement.local[s])): int(s) for s in deck}
    for w, plan in enumerate(plan_rows(placement, table, lengths, positions, new, [window])):
        for row in range(b):
            r = plan.spread[row]
            if r == len(plan.rows):
                continue
            assert plan.rows[r] == row
            kept = plan.slot_table[r, : plan.lengths[r]]
            for query in range(t):
                at = np.arange(len(kept))
                q_at = plan.q_positions[window][r, query]
                visible = kept[(at <= q_at) & (at > q_at - window)]
                seen.setdefault((row, query), []).extend(logical[w, int(local)] for local in visible)
        real = plan.new_slots < 2**31 - 1
        for token, local in zip(plan.new[real], plan.new_slots[real], strict=True):
            assert logical[w, int(local)] == new.reshape(-1)[token]
            stored.append(int(token))
    assert sorted(stored) == np.flatnonzero(new < n_slots).tolist()
    for row in range(b):
        for query in range(t):
            first = max(0, positions[row, query] - window + 1)
            assert sorted(seen.get((row, query), [])) == sorted(table[row, first : lengths[row]].tolist())


def test_sizes_are_one_of_nine():
    assert {eighths(n, 100) for n in range(101)} == {0, 13, 26, 39, 52, 65, 78, 91, 100}
    assert eighths(3, 4) == 3 and eighths(1, 1) == 1


def test_a_partition_that_cannot_be_says_what_can():
    with pytest.raises(UserError, match=r"3 KV heads for 4 attention workers.* at most 3 .*'requests'"):
        checked_partition("heads", 4, [4, 3])
    with pytest.raises(UserError, match="partition='layers' must be one of auto, heads, requests, tokens"):
        checked_partition("layers", 2, [4])
    with pytest.raises(UserError, match="attention_workers=0 must be at least 1"):
        checked_partition("tokens", 0, [4])
    checked_partition("tokens", 2, [3])


N_HEADS, HEAD_DIM, N_WORDS = 8, 16, 40
ROWS, CHUNK, WIDTH = 3, 13, 24  # shapes that are the same for all steps, to compile little


def attentions(
    kinds: tuple[dict[str, Any], ...], params: Any, tokens: Any, positions: Any, logits_at: Any
) -> jax.Array:
    """A model that is nothing but attention: its operators side by side, of q, k and v by token; their
    outputs are its logits."""
    del positions
    outs = []
    for i, kind in enumerate(kinds):
        q, k, v = (params[f"{x}{i}"][tokens] for x in "qkv")
        out = splitter.attention(q, k, v, **kind)
        outs.append(out.reshape(*tokens.shape, N_HEADS * HEAD_DIM))
    found = jnp.concatenate(outs, axis=-1)
    return found if logits_at is None else jnp.take_along_axis(found, logits_at[:, None, None], axis=1)


def executor_of(
    kind: str, n_workers: int, n_slots: int, *, window: int | None = None, softcap: float | None = None, k: int = 4, **kw: Any
) -> LocalExecutor:  # fmt: skip
    """One layer, and one with a window beside it."""
    layers: tuple[dict[str, Any], ...] = ({"scale": 0.25, "softcap": softcap},)
    if window is not None:
        layers += ({"scale": 0.3, "softcap": softcap, "window": window},)
    rng = np.random.default_rng(3)
    params = {
        f"{x}{i}": jnp.asarray(rng.normal(size=(N_WORDS, n, HEAD_DIM)), jnp.float32)
        for i in range(len(layers))
        for x, n in (("q", N_HEADS), ("k", k), ("v", k))
    }
    on = {"model_device": DEVICE, "attention_device": DEVICE, "attention_devices": [DEVICE] * n_workers} | kw
    n = len(on["attention_devices"])
    return LocalExecutor(
        partial(attentions, layers), params, n_slots=n_slots, attention_workers=n, partition=kind, token_block=2, **on
    )  # fmt: skip


class Feed:
    """Requests of random tokens, the same for every executor that is fed with them."""

    def __init__(self, executor: LocalExecutor, seed: int) -> None:
        self.executor = executor
        self.rng = np.random.default_rng(seed)
        self.free = self.rng.permutation(executor.n_slots).tolist()
        self.rows: list[list[int]] = []

    def tokens(self, b: int, t: int) -> np.ndarray:
        return self.rng.integers(0, N_WORDS, (b, t), dtype=np.int32)

    def prefill(self, lengths: list[int]) -> None:
        """New requests, from their first token on."""
        slots = [[self.free.pop() for _ in range(n)] for n in lengths]
        self.rows += slots
        self._prefill(slots, [()] * len(slots))

    def extend(self, n_tokens: list[int]) -> list[np.ndarray]:
        """A chunk more for each request; what each of its tokens sees."""
        new = [[self.free.pop() for _ in range(n)] for n in n_tokens]
        earlier = [list(row) for row in self.rows]
        for row, slots in zip(self.rows, new, strict=True):
            row.extend(slots)
        return self._prefill(new, earlier)

    def decode(self) -> list[np.ndarray]:
        for row in self.rows:
            row.append(self.free.pop())
        n_rows = ROWS + 1  # one row of padding at least
        table = np.zeros((n_rows, WIDTH), np.int32)
        lengths = np.zeros(n_rows, np.int32)
        lengths[: len(self.rows)] = [len(row) - 1 for row in self.rows]
        for b, row in enumerate(self.rows):
            table[b, : len(row) - 1] = row[:-1]
        new = np.full(n_rows, self.executor.n_slots, np.int32)
        new[: len(self.rows)] = [row[-1] for row in self.rows]
        batch = DecodeBatch(self.tokens(n_rows, 1), lengths[:, None], table, lengths, new)
        return [np.asarray(self.executor.decode(batch))[: len(self.rows)]]

    def _prefill(self, new: Any, earlier: Any) -> list[np.ndarray]:
        b, t = ROWS, CHUNK
        width = WIDTH if any(map(len, earlier)) else 0
        lengths = np.zeros(b, np.int32)
        lengths[: len(earlier)] = [len(row) for row in earlier]
        slots, table = np.full((b, t), self.executor.n_slots, np.int32), np.zeros((b, width), np.int32)
        for r, (row, before) in enumerate(zip(new, earlier, strict=True)):
            slots[r, : len(row)] = row
            table[r, : len(before)] = before
        positions = (lengths[:, None] + np.arange(t)).astype(np.int32)
        batch = PrefillBatch(self.tokens(b, t), positions, np.zeros(b, np.int32), slots, table, lengths)
        seen = np.asarray(self.executor.prefill(batch, scored=True))
        return [seen[r, : len(row)] for r, row in enumerate(new)]


def fed(
    executor: LocalExecutor, seed: int, lengths: list[int], chunks: list[int], n_steps: int
) -> list[np.ndarray]:
    feed = Feed(executor, seed)
    feed.prefill(lengths)
    found = feed.decode()
    found += feed.extend(chunks)
    for _ in range(n_steps):
        found += feed.decode()
    return found


def assert_same(got: list[np.ndarray], want: list[np.ndarray], atol: float = 1e-5) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@settings(max_examples=3, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from([None, 1, 3, 6]),
    st.sampled_from([None, 5.0]),
    st.integers(0, 2**32 - 1),
)
def test_each_partition_equals_one_worker(n_workers, rows, window, softcap, seed):
    lengths, chunks = [n for n, _ in rows], [n for _, n in rows]
    n_slots = sum(lengths) + sum(chunks) + 4 * len(rows)  # just enough: pools overflow into one another
    how = {"window": window, "softcap": softcap}
    want = fed(executor_of("heads", 1, n_slots, **how), seed, lengths, chunks, 3)
    for kind in KINDS:
        assert_same(fed(executor_of(kind, n_workers, n_slots, **how), seed, lengths, chunks, 3), want)


INT8_KV = ("int8", "int8-channel", "int8-channel-asymmetric")


@pytest.mark.parametrize(
    ("kind", "kv"),
    [  # each once; all of them together are slow tests
        pytest.param(kind, kv, marks=[pytest.mark.slow] * (i != j))
        for i, kind in enumerate(KINDS)
        for j, kv in enumerate(INT8_KV)
    ],
)
def test_each_partition_of_int8_equals_one_worker(kind: str, kv: str):
    calibration = Calibration(np.arange(24, dtype=np.int32).reshape(2, 12) % N_WORDS)
    want, got = (
        fed(executor_of(k, b, 60, window=4, kv_dtype=kv, calibration=calibration), 5, [7, 3], [2, 4], 3)
        for k, b in (("heads", 1), (kind, 2))
    )
    assert_same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_holds_its_share_of_memory(kind: str):
    executor = executor_of(kind, 4, 64)
    sizes = [sum(x.nbytes for x in (*kv.k, *kv.v)) for kv in executor.pools]
    assert sizes == [64 * sum(spec.slot_bytes for spec in executor.specs) // 4] * 4


def test_tokens_are_where_their_partition_says():
    for kind in ("requests", "tokens"):
        executor = executor_of(kind, 2, 64)
        feed = Feed(executor, 3)
        feed.prefill([9, 6])
        feed.extend([3, 4])
        feed.decode()
        worker = executor.book.placement.worker
        owners = [worker[row].tolist() for row in feed.rows]
        if kind == "requests":
            assert owners == [[0] * 13, [1] * 11]
            executor.release(feed.rows[0])
            feed.rows = []
            feed.prefill([2])
            assert worker[feed.rows[0]].tolist() == [0, 0]  # there is most room now
        else:
            assert owners[0] == [0, 0, 1, 1] * 3 + [0] and owners[1] == owners[0][:11]


@pytest.mark.parametrize("kind, n_workers", [("heads", 1), ("heads", 2), ("requests", 2), ("tokens", 3)])
def test_copied_and_moved_slots_read_the_same(kind: str, n_workers: int):
    """A request's tokens go to other slots, or to the host and back, and it is none the wiser."""
    outs = []
    for way in ("stay", "copy", "move"):
        executor = executor_of(kind, n_workers, 80, window=5, n_host_slots=20)
        feed = Feed(executor, 11)
        feed.prefill([7, 5])
        feed.decode()
        others = feed.free[:13]
        del feed.free[:13]
        old = feed.rows[0] + feed.rows[1][:5]
        if way == "copy":
            executor.copy_slots(old, others)
        if way == "move":
            host = np.arange(19, 6 - 1, -1)
            executor.move_out(old, host[:13])
            feed_over(executor, old)
            executor.move_in(host[:13], others)
            assert sum(kv.host.n_held for kv in executor.pools) == 0
        if way != "stay":
            feed.rows = [others[:8], others[8:] + feed.rows[1][5:]]
        outs.append(feed.extend([2, 3]) + feed.decode())
    assert_same(outs[1], outs[0], 0.0 if kind == "heads" else 1e-5)
    assert_same(outs[2], outs[0], 0.0 if kind == "heads" else 1e-5)


def feed_over(executor: LocalExecutor, slots: list[int]) -> None:
    """Other requests' tokens in ``slots``."""
    feed = Feed(executor, 99)
    feed.free = list(slots)
    feed.prefill([len(slots)])


def test_reading_what_was_never_written_is_an_error():
    feed = Feed(executor_of("tokens", 2, 16), 0)
    feed.rows = [[3, 4]]
    feed.free = [7]
    with pytest.raises(ValueError, match=r"slots \[3 4\] are read but hold nothing"):
        feed.decode()


ON_DEVICES = """
import jax, numpy as np
from test_partition import *
one = fed(executor_of("heads", 1, 60, window=3), 5, [7, 3], [2, 4], 3)
for kind in KINDS:
    devices = jax.devices()[1:]
    executor = executor_of(kind, 2, 60, window=3, attention_devices=devices)
    assert_same(fed(executor, 5, [7, 3], [2, 4], 3), one)
    assert [x.device for kv in executor.pools for x in kv.k[:1]] == devices, kind
from test_workers import Rows, config_of, random_params, partial, apply, LocalExecutor
config = config_of("llama")
params = random_params(config, seed=3)
first = jax.devices()[0]
def run(**kw):
    return Rows(LocalExecutor(partial(apply, config), params, n_slots=60, model_device=first, **kw)).run(3)
alone = run(attention_device=first)
apart = run(attention_device=jax.devices()[1], attention_workers=2, partition="tokens")
assert apart.tokens == alone.tokens and apart.executor.q_first
assert [kv.device for kv in apart.executor.pools] == jax.devices()[1:]
print("equal on", len(jax.devices()))
"""


@pytest.mark.slow
def test_workers_on_devices_of_their_own():
    assert "equal on 3" in on_devices(ON_DEVICES, 3, timeout_s=500)
