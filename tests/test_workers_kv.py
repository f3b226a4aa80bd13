"""KV of an executor: int8 storage, slots copied, moved to the host and brought back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_workers import N_SLOTS, ONE_BUCKET, Rows, config_of

from jaxlamina.errors import UserError
from jaxlamina.kv.kept import KeptWanted
from jaxlamina.kv.kv_worker import LayersApart
from jaxlamina.models import apply, random_params
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.workers import AttentionSpec, ChannelScales
from jaxlamina.workers.calibration import Calibration, calibration_rows, channel_scales
from jaxlamina.workers.kv_pools import HostStore, KVPools, pieces
from pallas_kernels import ChannelQuantizedPool, QuantizedPool

DEVICE = jax.devices()[0]
CONFIG = config_of("llama")
PARAMS = random_params(CONFIG, seed=3)
MODEL = partial(apply, CONFIG)


def make(kind: str = "split", **kw):
    if kind == "unsplit":
        return UnsplitExecutor(MODEL, PARAMS, n_slots=N_SLOTS, device=DEVICE, **kw)
    return LocalExecutor(MODEL, PARAMS, n_slots=N_SLOTS, model_device=DEVICE, attention_device=DEVICE, **kw)


def logits_of(executor, given=None, n_steps: int = 4, between=lambda rows: None) -> np.ndarray:
    """A prefill's and some steps' logits, with the tokens of ``given`` logits if there are such."""
    rows = Rows(executor, buckets=ONE_BUCKET)
    rows.prefill()
    for step in range(n_steps):
        if given is not None:
            for row, token in zip(rows.tokens, given[step].argmax(-1), strict=True):
                row[-1] = int(token)
        between(rows)
        rows.decode()
    return np.stack(rows.logits)


@pytest.mark.parametrize("kind", ["split", "unsplit"])
def test_int8_kv_follows_float_kv(kind: str):
    exact = logits_of(make(kind))
    kinds = {
        "int8": QuantizedPool,
        "int8-channel": ChannelQuantizedPool,
        "int8-channel-asymmetric": ChannelQuantizedPool,
    }
    for kv_dtype, pool in kinds.items():
        executor = make(kind, kv_dtype=kv_dtype)
        kv = executor.kv
        assert all(isinstance(x, pool) for x in (*kv.k, *kv.v))
        has_zeros = kv_dtype == "int8-channel-asymmetric"
        assert all((getattr(x, "zeros", None) is not None) == has_zeros for x in (*kv.k, *kv.v))
        got = logits_of(executor, exact)
        error = np.abs(got - exact).max() / np.abs(exact).max()
        most = (
            0.02 if kv_dtype == "int8" else 0.04
        )  # fixed scales leave half of their steps to tokens yet to come
        assert np.array_equal(got[0], exact[0]) and 1e-6 < error < most


@pytest.mark.parametrize("kv_dtype", ["int8-channel", "int8-channel-asymmetric"])
def test_split_and_unsplit_int8_are_the_same(kv_dtype: str):
    exact = logits_of(make("unsplit", kv_dtype=kv_dtype))
    got = logits_of(make("split", kv_dtype=kv_dtype), exact)
    assert np.abs(got - exact).max() <= 1e-4 * np.abs(exact).max()


def test_an_unknown_kv_dtype_is_refused():
    with pytest.raises(UserError, match="kv_dtype='int4' must be one of auto, int8, int8-channel"):
        make(kv_dtype="int4")


@pytest.mark.usefixtures("unchecked")
def test_channel_scales_are_those_of_the_tokens_given():
    """Doubling every weight that makes v doubles v's scales and leaves k's."""
    specs = make(kv_dtype="int8-channel").specs
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 9), dtype=np.int32)
    given = Calibration(tokens)
    scales = channel_scales(MODEL, PARAMS, specs, given)
    assert [pair.k.shape for pair in scales] == [(spec.n_kv_heads, spec.head_dim) for spec in specs]
    last = f"model.layers.{len(specs) - 1}.self_attn.v_proj.weight"
    louder = dict(PARAMS) | {last: 2 * PARAMS[last]}
    other = channel_scales(MODEL, louder, specs, given)
    np.testing.assert_allclose(other[-1].v, 2 * scales[-1].v, rtol=1e-5)
    np.testing.assert_allclose(other[-1].k, scales[-1].k, rtol=1e-5)
    assert not np.allclose(channel_scales(MODEL, PARAMS, specs)[0].k, scales[0].k)
    wider = channel_scales(MODEL, PARAMS, specs, Calibration(tokens, headroom=2 * given.headroom))
    np.testing.assert_allclose(wider[0].k, 2 * scales[0].k, rtol=1e-5)
    assert channel_scales(MODEL, PARAMS, [replace(spec, kv="int8") for spec in specs], given) is None
    with pytest.raises(UserError, match=r"calibration tokens \(3,\) must be \[rows, tokens\]"):
        Calibration(tokens[0, :3])
    with pytest.raises(UserError, match=r"headroom 0.5 must be from 1 to 100"):
        Calibration(headroom=0.5)


def test_zero_points_are_the_middle_of_what_was_met():
    """Values moved by a constant move v's zero points by it and nothing else; capped scores leave keys
    without any."""
    specs = make(kv_dtype="int8-channel-asymmetric").specs
    given = Calibration(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 9), dtype=np.int32))
    found = channel_scales(MODEL, PARAMS, specs, given)
    symmetric = channel_scales(MODEL, PARAMS, [replace(s, kv="int8-channel") for s in specs], given)
    for with_zeros, without in zip(found, symmetric, strict=True):
        for scales, zeros, larger in zip(with_zeros[:2], with_zeros[2:], without[:2], strict=True):
            assert (scales <= larger * (1 + 1e-6)).all() and np.abs(zeros).max() > 0
            np.testing.assert_allclose(scales + given.headroom * np.abs(zeros) / 127, larger, rtol=1e-5)
    capped = channel_scales(MODEL, PARAMS, [replace(s, softcap=30.0) for s in specs], given)
    assert all(of.k_zeros is None and of.v_zeros is not None for of in capped)


def test_calibration_rows_are_made_of_text_and_tokens():
    def encode(text: str) -> list[int]:
        return [ord(x) - 96 for x in text]

    assert calibration_rows("abc", encode, 27).tolist() == [[1, 2, 3]]
    assert calibration_rows(["ab", "c", [4, np.int32(5)]], encode, 27).tolist() == [[1, 2, 3, 4, 5]]
    assert calibration_rows(np.arange(2 * 130).reshape(2, 130) % 7, encode, 27).shape == (2, 128)
    assert calibration_rows("a" * 10**7, encode, 27).shape == (64, 128)
    for wrong, said in (
        ("a", "needs two tokens or more, 1 given"),
        ([3, -1], "token -1 must be from 0 to 26"),
        ([3, 27], "token 27 must be from 0 to 26"),
        ([1.5, 2], r"must be text, token ids or lists of them, not 1\.5"),
        ({"a": 1}, "must be text, token ids or lists of them"),
        ([True, False], "must be text, token ids or lists of them, not True"),
    ):
        with pytest.raises(UserError, match=said):
            calibration_rows(wrong, encode, 27)


@pytest.mark.parametrize(
    "kind, kv_dtype", [("split", "int8"), ("unsplit", "int8-channel-asymmetric"), ("split", "auto")]
)
def test_moving_slots_about_changes_nothing(kind: str, kv_dtype: str):
    executor = make(kind, kv_dtype=kv_dtype, n_host_slots=30)
    want = logits_of(executor)

    def elsewhere(rows: Rows) -> None:
        """The first request to the host and back into other slots, the second to a copy of itself."""
        first, second = rows.slots[0], rows.slots[1]
        host = np.random.default_rng(len(first)).permutation(30)[: len(first)]
        executor.move_out(first, host)
        there = [rows.free.pop(0) for _ in first]
        executor.copy_slots(second, first[: len(second)])  # over what has gone
        executor.move_in(host, there)
        rows.free += second + first[len(second) :]
        rows.slots[0], rows.slots[1] = there, first[: len(second)]

    assert np.array_equal(logits_of(executor, between=elsewhere), want)


SPEC = AttentionSpec(2, 4, np.dtype(np.float32), 1.0, None, None)


def pools(n_slots: int, n_host_slots: int, spec: AttentionSpec = SPEC) -> KVPools:
    made = KVPools([spec, spec], n_slots, DEVICE, n_host_slots=n_host_slots)
    made.put(np.arange(n_slots), rows_of(made, np.arange(n_slots)))
    return made


def rows_of(made: KVPools, numbers: np.ndarray):
    """Rows that say which they are: slot s of pool p holds 100 p + s throughout."""
    template = made.take(np.zeros(1, np.int64))
    return [
        tuple(
            jnp.broadcast_to((100 * p + numbers).reshape(-1, *[1] * (x.ndim - 1)), (len(numbers), *x.shape[1:]))
            .astype(x.dtype)
            for x in pool
        )
        for p, pool in enumerate(template)
    ]  # fmt: skip


def contents(made: KVPools) -> list[int]:
    """What the slots hold, which all pools must agree on."""
    by_layer = [x for layer in zip(made.k, made.v, strict=True) for x in layer]
    found = [np.asarray(x)[:, 0, 0] - 100 * p for p, x in enumerate(by_layer)]
    assert all(np.array_equal(found[0], x) for x in found)
    return found[0].astype(int).tolist()


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("pinned", [True, False])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_host_store_keeps_what_it_was_given(pinned: bool, packs: bool, data):
    """Random moves against a dictionary; the numpy store too, which platforms without pinned memory get."""
    made = pools(40, 30)
    made._packs = packs  # as beside an accelerator
    if not pinned:
        assert made.host._rows_to is not None
        made.host._rows_to = None
    held: dict[int, int] = {}
    device = list(range(40))
    for _ in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(1, 20))
        if held and data.draw(st.booleans()):
            host = data.draw(st.permutations(sorted(held)))[:n]
            to = data.draw(st.permutations(range(40)))[: len(host)]
            made.move_in(np.asarray(host), np.asarray(to))
            for h, d in zip(host, to, strict=True):
                device[d] = held.pop(h)
        else:
            host, out = (data.draw(st.permutations(range(m)))[:n] for m in (30, 40))
            made.move_out(np.asarray(out), np.asarray(host))
            held |= {h: device[d] for h, d in zip(host, out, strict=True)}
        assert contents(made) == device and made.host.n_held == len(held)


@pytest.mark.parametrize("packs", [False, True])
def test_gaps_in_the_host_store_are_closed(packs: bool):
    made = pools(700, 400)
    made._packs = packs
    for at in range(0, 400, 100):
        made.move_out(np.arange(at, at + 100), np.arange(at, at + 100))
    for _ in range(20):  # one token of each block stays behind for ever
        block = np.arange(1, 100)
        made.move_in(block, 400 + block)
        made.move_out(400 + block, block)
    assert made.host.n_held == 400 and made.host.n_rows <= 2 * 400 + 256
    made.put(np.arange(400), rows_of(made, np.zeros(400, np.int64)))
    made.move_in(np.arange(400), np.arange(400))
    assert contents(made)[:400] == list(range(400)) and made.host.n_rows == 0


def test_what_the_host_store_cannot_do():
    with pytest.raises(UserError, match="no host KV slots: give host_kv_slots"):
        pools(4, 0).move_out(np.asarray([1]), np.asarray([0]))
    made = pools(4, 2)
    with pytest.raises(ValueError, match=r"host slots \[2\] must be within 0 … 1"):
        made.move_out(np.asarray([1]), np.asarray([2]))
    with pytest.raises(ValueError, match=r"host slots \[1\] hold nothing"):
        made.move_in(np.asarray([1]), np.asarray([0]))
    assert HostStore(3, DEVICE).n_held == 0


def test_scales_a_slot_move_along_and_scales_a_channel_stay():
    by_slot = KVPools([AttentionSpec(2, 4, np.dtype(np.float32), 1.0, None, None, "int8")], 4, DEVICE)
    by_slot.k[0] = QuantizedPool(by_slot.k[0].values.at[1].set(7), by_slot.k[0].scales.at[1].set(0.5))
    by_slot.copy_slots(np.asarray([1]), np.asarray([3]))
    assert np.asarray(by_slot.k[0].values)[3].tolist() == [[7] * 4] * 2
    assert np.asarray(by_slot.k[0].scales, np.float32)[3].tolist() == [0.5, 0.5]
    scales = jnp.full((2, 4), 0.25)
    spec = AttentionSpec(2, 4, np.dtype(np.float32), 1.0, None, None, "int8-channel")
    by_channel = KVPools([spec], 4, DEVICE, channel_scales=[ChannelScales(scales, 2 * scales)])
    by_channel.copy_slots(np.asarray([1]), np.asarray([3]))
    assert np.array_equal(by_channel.k[0].scales, scales) and np.array_equal(
        by_channel.v[0].scales, 2 * scales
    )


@pytest.mark.usefixtures("unchecked")  # of several layers' pools all are to have the same shape
@pytest.mark.parametrize(("kv", "packs"), [("auto", False), ("int8", True)])
def test_kv_moves_between_a_worker_of_all_layers_and_stages_of_some(kv, packs):
    """Each layer's keys and values come to where they were, there and back. Layers differ in their heads."""
    specs = [AttentionSpec(k, 4, np.dtype(np.float32), 1.0, None, None, kv) for k in (2, 1, 3, 2)]
    whole, first, last = (KVPools(of, 32, DEVICE, n_host_slots=8) for of in (specs, specs[:1], specs[1:]))
    for made in (whole, first, last):
        made._packs = packs  # as beside an accelerator
        made.open_kept("", KeptWanted(None, "one", 8))
    row_bytes = [sum(spec.slot_bytes for spec in of) for of in (specs[:1], specs[1:])]
    assert row_bytes == [first.row_bytes, last.row_bytes]
    apart = LayersApart([first, last], [1, 3], row_bytes)
    rng = np.random.default_rng(0)
    whole.k, whole.v = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(1, 99, x.shape), x.dtype), (whole.k, whole.v)
    )

    def stored(slots: list[int], *several: KVPools) -> list[list[float]]:
        """Keys of all layers, then values."""
        pools = [x for of in several for x in of.k], [x for of in several for x in of.v]
        return [np.asarray(x, np.float32)[slots].ravel().tolist() for x in jax.tree.leaves(pools)]

    a, b, c = [3, 9, 4], [7, 1, 2], [20, 30, 10]
    wanted, host = stored(a, whole), np.arange(3)
    apart.put_rows(np.asarray(b), whole.take_rows(np.asarray(a), host=False))
    assert stored(b, first, last) == wanted
    apart.move_out(np.asarray(b), host)
    whole.put_rows(np.asarray(c), apart.take_rows(host, host=True))
    assert stored(c, whole) == wanted
    marks = np.ones(3, np.uint64)
    whole.keep(np.asarray(a), host, marks)
    apart.put_bytes(np.asarray(c), whole.kept_rows(host))
    assert stored(c, first, last) == wanted
    apart.keep(np.asarray(c), host, marks)
    whole.put_bytes(np.asarray(b), apart.kept_rows(host))
    assert stored(b, whole) == wanted


def test_few_programs_serve_moves_of_all_sizes():
    made = pools(600, 0)
    n_before = made._copy._cache_size()  # of all pools there are
    for n in range(1, 299, 3):
        made.copy_slots(np.arange(n), np.arange(300, 300 + n))
    assert contents(made)[300:598] == list(range(298)) and made._copy._cache_size() - n_before <= 5
    assert [s.stop - s.start for s in pieces(600)] == [256, 256, 88]
