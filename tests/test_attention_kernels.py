"""The XLA attention functions against their float64 references, and what a caller relies on beyond the
numbers."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import causal, reference

HEADS = [(4, 4), (6, 2), (4, 1)]  # multi-head, grouped, multi-query
MASKS: list[dict[str, Any]] = [{}, {"window": 3}, {"softcap": 5.0}, {"window": 1, "softcap": 2.0}]


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.normal(size=shape).astype(np.float32)


class Case:
    """A random batch over a pool whose slots are dealt in no order, every unread slot and entry being
    poison."""

    def __init__(
        self, seed: int, n: int, k: int, lengths: list[int], *, h: int = 8, tq: int = 1, spare: int = 5
    ):
        rng = np.random.default_rng(seed)
        b, total = len(lengths), sum(lengths)
        self.n_slots = total + b + spare
        dealt = rng.permutation(self.n_slots).astype(np.int32)
        width = max(lengths, default=0) + 2
        self.lengths = np.array(lengths, np.int32)
        self.q = normal(rng, b, tq, n, h)
        self.k_new, self.v_new = normal(rng, b, 1, k, h), normal(rng, b, 1, k, h)
        self.k_pool, self.v_pool = normal(rng, self.n_slots, k, h), normal(rng, self.n_slots, k, h)
        unused = dealt[total + b :]
        self.k_pool[unused], self.v_pool[unused] = np.inf, np.nan
        self.new_slots = dealt[total : total + b]
        # Entries past a row's end are anything at all: poison slots, out of range, negative.
        self.table = rng.choice(np.append(unused, [self.n_slots + 7, -3]).astype(np.int32), size=(b, width))
        taken = 0
        for row, length in enumerate(lengths):
            self.table[row, :length] = dealt[taken : taken + length]
            taken += length

    def decode_args(self) -> tuple[jax.Array, ...]:
        pools = (self.k_pool, self.v_pool)
        rows = (self.table, self.lengths, self.new_slots)
        return tuple(jnp.asarray(x) for x in (self.q, self.k_new, self.v_new, *pools, *rows))

    def partial_args(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(x) for x in (self.q, self.k_pool, self.v_pool, self.table, self.lengths))


def close(got: Any, want: Any, tol: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tol, atol=tol)


@pytest.mark.parametrize("n,k", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_causal_attention_matches_reference(n: int, k: int, mask: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    q, key, value = normal(rng, 2, 7, n, 8), normal(rng, 2, 7, k, 8), normal(rng, 2, 7, k, 8)
    got = jax.jit(partial(pk.causal_attention, scale=0.3, **mask))(q, key, value)
    close(got, reference.causal_attention(q, key, value, scale=0.3, **mask))


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("t", [4, 9, 12])
def test_causal_attention_in_query_blocks(
    monkeypatch: pytest.MonkeyPatch, t: int, window: int | None
) -> None:
    monkeypatch.setattr(causal, "_Q_BLOCK", 4)
    rng = np.random.default_rng(t)
    q, key, value = (jnp.asarray(normal(rng, 2, t, heads, 8)) for heads in (4, 2, 2))
    got = pk.causal_attention(q, key, value, scale=0.3, window=window)
    close(got, reference.causal_attention(q, key, value, scale=0.3, window=window))
    grad = jax.grad(lambda v: pk.causal_attention(q, key, v, scale=0.3, window=window).sum())(value)
    assert np.isfinite(np.asarray(grad)).all()


def test_causal_attention_gradient_is_finite_and_causal() -> None:
    rng = np.random.default_rng(0)
    q, key, value = (jnp.asarray(normal(rng, 1, 6, 2, 8)) for _ in range(3))
    grad = jax.grad(lambda v: pk.causal_attention(q, key, v, scale=0.3, window=2)[0, 3].sum())(value)
    touched = np.flatnonzero(np.abs(np.asarray(grad)).sum((0, 2, 3)))
    assert touched.tolist() == [2, 3]


@pytest.mark.parametrize("n,k", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_decode_attention_matches_reference(n: int, k: int, mask: dict[str, Any]) -> None:
    case = Case(1, n, k, [5, 0, 1, 12])
    args = case.decode_args()
    got = jax.jit(partial(pk.decode_attention, scale=0.35, **mask))(*args)
    want = reference.decode_attention(*args, scale=0.35, **mask)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    close(got[2], want[2])


@pytest.mark.parametrize("n,k", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_partial_attention_with_many_queries(n: int, k: int, mask: dict[str, Any]) -> None:
    case = Case(2, n, k, [5, 0, 9], tq=4)
    args = case.partial_args()
    # Row 2's queries lie among its stored tokens (they see a prefix), row 0's past them, row 1 has none
    # stored.
    positions = jnp.array([[5, 6, 7, 8], [0, 1, 2, 3], [0, 3, 6, 20]], jnp.int32)
    for given_positions in (None, positions):
        got = jax.jit(partial(pk.partial_attention, scale=0.35, q_positions=given_positions, **mask))(*args)
        want = reference.partial_attention(*args, scale=0.35, q_positions=given_positions, **mask)
        close(got[0], want[0])
        close(got[1], want[1])
        assert np.all(np.asarray(got[1])[1] == -np.inf) and np.all(np.asarray(got[0])[1] == 0)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 3),
    g=st.integers(1, 3),
    h=st.sampled_from([4, 16]),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 6),
    softcap=st.none() | st.floats(0.5, 20.0),
)
def test_decode_attention_any_shape(
    seed: int, k: int, g: int, h: int, lengths: list[int], window: int | None, softcap: float | None
) -> None:
    case = Case(seed, k * g, k, lengths, h=h)
    args = case.decode_args()
    mask = {"scale": h**-0.5, "window": window, "softcap": softcap}
    got = jax.jit(partial(pk.decode_attention, **mask))(*args)
    want = reference.decode_attention(*args, **mask)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    close(got[2], want[2])


@pytest.mark.parametrize("n_others", [0, 1, 3])
@pytest.mark.parametrize("n,k", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_decode_attention_in_two_calls(n: int, k: int, mask: dict[str, Any], n_others: int) -> None:
    case, rng = Case(6, n, k, [5, 0, 1, 12]), np.random.default_rng(n_others)
    q, k_new, v_new, *pools, table, lengths, slots = args = case.decode_args()
    others = [normal(rng, 4, 1, n, 9) for _ in range(n_others)]
    for i, other in enumerate(others):
        other[i : i + 2] = 0
        other[i : i + 2, ..., -1] = -np.inf
    scoring = {"scale": 0.35, "softcap": mask.get("softcap")}
    begun = jax.jit(partial(pk.begin_decode_attention, scale=0.35, **mask))(q, *pools, table, lengths)
    got = jax.jit(partial(pk.end_decode_attention, **scoring))(
        begun, q, k_new, v_new, *pools, slots, list(map(jnp.asarray, others))
    )
    stored = reference.partial_attention(q, *pools, table, lengths, scale=0.35, **mask)
    own = reference.causal_partial(q, k_new, v_new, **scoring)
    pairs = [stored, own, *((x[..., :-1], x[..., -1]) for x in others)]
    close(got[2], reference.combine(*zip(*pairs, strict=True))[0])
    whole = reference.decode_attention(*args, scale=0.35, **mask)
    for pool, want in zip(got[:2], whole[:2], strict=True):
        np.testing.assert_array_equal(pool, want)
    if not others:
        close(got[2], whole[2])


@pytest.mark.usefixtures("unchecked")
def test_a_partial_of_others_that_is_not_packed_is_named() -> None:
    q, k_new, v_new, *pools, table, lengths, slots = Case(7, 4, 2, [3]).decode_args()
    begun = pk.begin_decode_attention(q, *pools, table, lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"x\.shape=\(1, 1, 4, 8\).*\(1, 1, 4, 9\)"):
        pk.end_decode_attention(begun, q, k_new, v_new, *pools, slots, [q], scale=1.0)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), length=st.integers(0, 10), cuts=st.lists(st.integers(0, 10), max_size=3))
def test_partials_over_any_partition_combine_to_the_whole(seed: int, length: int, cuts: list[int]) -> None:
    """Also with empty parts, and all parts empty."""
    case = Case(seed, 4, 2, [length], tq=2)
    row = case.table[0, :length]
    edges = [0, *sorted(min(c, length) for c in cuts), length]
    far = jnp.full((1, 2), 1000, jnp.int32)  # the queries follow every part, wherever it was cut
    q, k_pool, v_pool, *_ = case.partial_args()
    parts = []
    for low, high in pairwise(edges):
        table = np.full((1, length + 1), case.n_slots, np.int32)
        table[0, : high - low] = row[low:high]
        size = jnp.array([high - low], jnp.int32)
        parts.append(
            pk.partial_attention(q, k_pool, v_pool, jnp.asarray(table), size, scale=0.35, q_positions=far)
        )
    out, lse = pk.combine([p[0] for p in parts], [p[1] for p in parts])
    want = reference.partial_attention(case.q, case.k_pool, case.v_pool, case.table, case.lengths, scale=0.35)
    close(out, want[0])
    close(lse, want[1])
    close(out, reference.combine([p[0] for p in parts], [p[1] for p in parts])[0])


def test_combine_is_stable_far_apart() -> None:
    out = [jnp.full((1, 1, 1, 2), x) for x in (1.0, 2.0, 3.0)]
    lse = [jnp.full((1, 1, 1), x) for x in (-1e4, 1e4, -np.inf)]
    got, mass = pk.combine(out, lse)
    assert np.all(np.asarray(got) == 2.0) and np.all(np.asarray(mass) == 1e4)


def test_combine_needs_a_partial() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pk.combine([], [])


def test_append_drops_padding_and_casts() -> None:
    rng = np.random.default_rng(0)
    pools = [pk.make_pool(6, 2, 4, jnp.bfloat16) for _ in range(2)]
    k_new, v_new = (jnp.asarray(normal(rng, 4, 2, 4)) for _ in range(2))
    slots = jnp.array([4, 6, 0, 2**31 - 1], jnp.int32)
    got = pk.append(pools[0], pools[1], k_new, v_new, slots)
    want = reference.append(
        pools[0], pools[1], jnp.asarray(k_new, jnp.bfloat16), jnp.asarray(v_new, jnp.bfloat16), slots
    )
    for have, expect in zip(got, want, strict=True):
        assert have.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(have, np.float64), expect)
    assert np.flatnonzero(np.asarray(got[0], np.float32).any((1, 2))).tolist() == [0, 4]


def test_padding_row_is_not_stored() -> None:
    case = Case(3, 4, 2, [4, 0])
    case.new_slots[1] = case.n_slots
    args = case.decode_args()
    k_pool, _, out = pk.decode_attention(*args, scale=0.35)
    changed = np.flatnonzero((np.asarray(k_pool) != case.k_pool).any((1, 2)))
    assert changed.tolist() == [case.new_slots[0]]
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("b", [1, 8])
def test_decode_writes_the_donated_pools_in_place(b: int) -> None:
    """No copy of a pool, in the compiled program or in memory: a pool is most of the machine's memory."""
    case = Case(4, 6, 2, [5] * b, spare=500)
    step = jax.jit(partial(pk.decode_attention, scale=0.35), donate_argnums=(3, 4))
    args = case.decode_args()
    where = [p.unsafe_buffer_pointer() for p in args[3:5]]
    text = step.lower(*args).compile().as_text() or ""
    copies = [line for line in text.splitlines() if f"[{case.n_slots}," in line and " copy(" in line]
    assert not copies
    k_pool, v_pool, _ = step(*args)
    assert [k_pool.unsafe_buffer_pointer(), v_pool.unsafe_buffer_pointer()] == where
    assert args[3].is_deleted()


def test_two_calls_write_the_donated_pools_in_place() -> None:
    """Also within one program, where the first reads them."""
    case = Case(4, 6, 2, [5] * 3, spare=500)

    def both(q: Any, k: Any, v: Any, *stored: Any) -> Any:
        *given, slots = stored
        begun = pk.begin_decode_attention(q, *given, scale=0.35)
        return pk.end_decode_attention(begun, q, k, v, *given[:2], slots, [], scale=0.35)

    step, args = jax.jit(both, donate_argnums=(3, 4)), case.decode_args()
    where = [p.unsafe_buffer_pointer() for p in args[3:5]]
    text = step.lower(*args).compile().as_text() or ""
    assert not [line for line in text.splitlines() if f"[{case.n_slots}," in line and " copy(" in line]
    k_pool, v_pool, _ = step(*args)
    assert [k_pool.unsafe_buffer_pointer(), v_pool.unsafe_buffer_pointer()] == where


def test_bfloat16_storage() -> None:
    case = Case(5, 6, 2, [5, 0, 12])
    args = tuple(x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in case.decode_args())
    got = pk.decode_attention(*args, scale=0.35)
    assert got[2].dtype == got[0].dtype == jnp.bfloat16
    close(got[2], reference.decode_attention(*args, scale=0.35)[2], tol=3e-2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("n,k,h_key", [(5, 2, 8), (4, 2, 4)])
def test_heads_that_do_not_fit_are_named(n: int, k: int, h_key: int) -> None:
    q, key = jnp.zeros((1, 1, n, 8)), jnp.zeros((1, 1, k, h_key))
    with pytest.raises(ValueError, match=r"q\.shape"):
        pk.causal_attention(q, key, key, scale=1.0)
