"""Attention over pools of token-granular KV slots: the public functions.

A slot holds one token's key or value for all K heads of one layer. Which request owns which slot is the
caller's affair: a request comes in as a row of slot numbers, entry c being its token at position c. These
functions know arrays only; they are pure and traceable, and the caller jits them (donating the pools where
they are written). `pallas_kernels.reference` says in float64 what each one means, `dispatch` picks who
computes it.

Softmax is computed in float32 whatever the storage dtype. Zero points of int8 pools are taken out here before
a backend sees keys and values, and put into its results, so that no kernel knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels.causal import check_heads
from pallas_kernels.dispatch import pick
from pallas_kernels.order import tied
from pallas_kernels.quantized import Pool, store, values_of, with_zeros, zeros_of
from pallas_kernels.xla import scores_of, weigh


def append(
    k_pool: Pool,
    v_pool: Pool,
    k_new: Float[Array, "M K H"],
    v_new: Float[Array, "M K H"],
    slots: Int32[Array, " M"],
) -> tuple[Pool, Pool]:
    """Stores token m at slots[m] of the pools, quantised if they are.

    A slot >= S is dropped (padding). In place when the caller's jit donates the pools.
    """
    return store(k_pool, k_new, slots), store(v_pool, v_new, slots)


def partial_attention(
    q: Float[Array, "B Tq N H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: Int32[Array, "B Tq"] | None = None,
    return_mass: bool = False,
    backend: str | None = None,
) -> tuple[Float32[Array, "B ..."], ...]:
    """Attention of a few queries a request over that request's stored tokens only, to be combined by lse.

    Of row b of slot_table the first lengths[b] entries are read. Queries are at q_positions, or follow the
    stored tokens (lengths[b] + t) when that is None; a query sees stored positions max(0, p - window + 1) ..
    p. Returns (out `[B, Tq, N, H]` float32, lse `[B, Tq, N]` float32); a query that sees nothing: out 0, lse
    -inf. With return_mass also mass `[B, C]` float32: the probability of each entry of the table within this
    partial, summed over heads and queries, 0 past lengths.

    backend: one of `dispatch.BACKENDS`, None picks. Raises ValueError where heads do not fit, or where a
    forced backend does not support the case. Source: Lamina 2025 section 4.2 (attention over previous and new
    tokens apart, merged by their softmax mass).
    """
    check_heads(q, values_of(k_pool), values_of(v_pool))
    zeros = _zeros_of(k_pool, v_pool, softcap)
    k_pool, v_pool = with_zeros(k_pool, None), with_zeros(v_pool, None)
    run = pick(q, k_pool, return_mass=return_mass, backend=backend).partial_attention
    out, lse, *mass = run(
        q, k_pool, v_pool, slot_table, lengths, q_positions,
        scale=scale, window=window, softcap=softcap, return_mass=return_mass,
    )  # fmt: skip
    if zeros.k is not None:  # every score lacks q's with it
        of_zeros = jnp.broadcast_to(zeros.k, (q.shape[0], 1, *zeros.k.shape))
        lse = lse + jnp.moveaxis(scores_of(q, of_zeros, scale, None)[..., 0], 3, 1).reshape(lse.shape)
    if zeros.v is not None:
        out = out + jnp.where(lse[..., None] > -jnp.inf, zeros.of_results(q), 0.0)
    return out, lse, *mass


class _Zeros(NamedTuple):
    """Zero points of a layer's pools; None where there are none."""

    k: Float32[Array, "K H"] | None
    v: Float32[Array, "K H"] | None

    @property
    def any(self) -> bool:
        return self.k is not None or self.v is not None

    def less(
        self, k: Float[Array, "*n K H"], v: Float[Array, "*n K H"]
    ) -> tuple[Float[Array, "*n K H"], Float[Array, "*n K H"]]:
        """Keys and values without them."""
        return (
            k if self.k is None else (k - self.k).astype(k.dtype),
            v if self.v is None else (v - self.v).astype(v.dtype),
        )

    def of_results(self, q: Float[Array, "B Tq N H"]) -> Float32[Array, "N H"]:
        """What v's add to each query head's result."""
        assert self.v is not None
        return jnp.repeat(self.v, q.shape[2] // len(self.v), axis=0)

    def onto(self, out: Float[Array, "B Tq N H"], q: Float[Array, "B Tq N H"]) -> Float[Array, "B Tq N H"]:
        """Results over values without them, with them."""
        return out if self.v is None else (out + self.of_results(q)).astype(out.dtype)


def _zeros_of(k_pool: Pool, v_pool: Pool, softcap: float | None) -> _Zeros:
    """ValueError for keys' under a softcap, which is not the same for scores that lack a constant."""
    zeros = _Zeros(zeros_of(k_pool), zeros_of(v_pool))
    if zeros.k is not None and softcap is not None:
        raise ValueError(f"{softcap=} must be None where keys have zero points: leave the keys' out")
    return zeros


def combine(
    outs: Sequence[Float[Array, "*n H"]], lses: Sequence[Float[Array, "*n"]]
) -> tuple[Float[Array, "*n H"], Float32[Array, "*n"]]:
    """Attention over the union of disjoint token sets from each set's partial.

    Returns the same pair for the union, so partials combine in any order and number. An empty partial has lse
    -inf and weighs nothing; where all are empty, out is 0 and lse -inf. Raises ValueError for no partials at
    all.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"{len(outs)=} must be at least 1 and equal {len(lses)=}")
    stacked = jnp.stack([lse.astype(jnp.float32) for lse in lses])
    top = jnp.max(stacked, axis=0)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(stacked - top)
    mass = jnp.sum(weights, axis=0)
    shares = weights / jnp.where(mass == 0, 1.0, mass)
    out = sum(share[..., None] * part.astype(jnp.float32) for share, part in zip(shares, outs, strict=True))
    return jnp.asarray(out).astype(outs[0].dtype), jnp.log(mass) + top


def decode_attention(
    q: Float[Array, "B 1 N H"],
    k_new: Float[Array, "B 1 K H"],
    v_new: Float[Array, "B 1 K H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    new_slots: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: Int32[Array, "B Tq"] | None = None,
    read_first: bool = False,
    backend: str | None = None,
) -> tuple[Pool, Pool, Float[Array, "B 1 N H"]]:
    """One decode step of one layer: stores each request's new token and attends over its earlier tokens and
    it.

    slot_table has lengths[b] earlier tokens (the new one not counted, nor looked for in the table); new_slots
    are >= S for a padding row, which is not stored. The new token itself is attended as it came, not as an
    int8 pool stores it. Returns (k_pool, v_pool, out in q's dtype). Jit it with both pools donated and the
    append is in place. q_positions, backend and errors as for `partial_attention`.

    read_first: earlier tokens are attended before the new ones are stored, so that no work on them waits for
    k_new and v_new. Otherwise XLA is left to store them first, which is the faster order for what gathers the
    earlier ones.
    """
    check_heads(q, k_new, v_new)
    scoring: Any = {"scale": scale, "window": window, "softcap": softcap}
    zeros = _zeros_of(k_pool, v_pool, softcap)
    if zeros.any:  # all keys of a row are without them, so no score need be put right
        k_pool, v_pool, out = decode_attention(
            q, *zeros.less(k_new, v_new), with_zeros(k_pool, None), with_zeros(v_pool, None), slot_table,
            lengths, new_slots, **scoring, q_positions=q_positions, read_first=read_first, backend=backend,
        )  # fmt: skip
        return with_zeros(k_pool, zeros.k), with_zeros(v_pool, zeros.v), zeros.onto(out, q)
    module = pick(q, k_pool, return_mass=False, backend=backend)
    if q_positions is None and hasattr(module, "decode_attention") and module.supports_decode(q, k_pool):
        given = q, k_new, v_new, k_pool, v_pool, slot_table, lengths, new_slots
        found: tuple[Pool, Pool, Array] = module.decode_attention(*given, **scoring)
        return found
    scoring |= {"q_positions": q_positions, "backend": backend}
    if read_first:
        out = attention_with_own(q, k_new, v_new, k_pool, v_pool, slot_table, lengths, **scoring)
        new_slots = tied(new_slots, out)  # or two versions of a pool would live, and it would be copied
    k_pool, v_pool = append(k_pool, v_pool, k_new[:, 0], v_new[:, 0], new_slots)
    if not read_first:
        out = attention_with_own(q, k_new, v_new, k_pool, v_pool, slot_table, lengths, **scoring)
    return k_pool, v_pool, out


class Begun(NamedTuple):
    """A layer's decode step, of which its stored tokens are attended; `end_decode_attention` does the rest.

    A pytree of arrays, which only that function looks into.
    """

    out: Float32[Array, "*part H"]  # the stored tokens' partial, or a backend's pieces of it
    lse: Float32[Array, "*part"]
    plan: Int32[Array, " plan"] | None = None
    kernel: Any = None  # the backend's that is to combine the pieces: no array but structure, as a shape is

    @property
    def done(self) -> Float32[Array, "*part H"]:
        """An array that is there once all stored tokens are attended, for `pallas_kernels.order.tied`."""
        return self.out


def begin_decode_attention(
    q: Float[Array, "B 1 N H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: Int32[Array, "B Tq"] | None = None,
    backend: str | None = None,
) -> Begun:
    """What can be done of a decode step of one layer without the requests' new tokens, and without what
    others computed of other tokens: attention over the stored ones.

    Arguments and errors as for `partial_attention`.
    """
    check_heads(q, values_of(k_pool), values_of(v_pool))
    given = q, k_pool, v_pool, slot_table, lengths
    scoring: Any = {"scale": scale, "window": window, "softcap": softcap}
    module = pick(q, k_pool, return_mass=False, backend=backend)
    if (
        q_positions is None
        and hasattr(module, "begin_decode_attention")
        and module.supports_decode(q, k_pool)
    ):
        return Begun(*module.begin_decode_attention(*given, **scoring))
    return Begun(*partial_attention(*given, **scoring, q_positions=q_positions, backend=backend))


def end_decode_attention(
    begun: Begun,
    q: Float[Array, "B 1 N H"],
    k_new: Float[Array, "B 1 K H"],
    v_new: Float[Array, "B 1 K H"],
    k_pool: Pool,
    v_pool: Pool,
    new_slots: Int32[Array, " B"],
    others: Sequence[Float32[Array, "B 1 N H1"]],
    *,
    scale: float,
    softcap: float | None = None,
    backend: str | None = None,
) -> tuple[Pool, Pool, Float[Array, "B 1 N H"]]:
    """The rest of a decode step of one layer: attention over what `begin_decode_attention` attended, each
    request's new token and the tokens of ``others``; and the new tokens are stored.

    others: partials over other tokens of the same requests, each with its log-sum-exp as one element more
    after its output, so that H1 is H + 1; one that is empty has output 0 and log-sum-exp -inf. new_slots are
    >= S for a row that is not stored. q, pools, scale, softcap and backend are those of the beginning.
    Returns (k_pool, v_pool, out in q's dtype); with no others what `decode_attention` does. Jit it with both
    pools donated and the append is in place. Raises ValueError where shapes do not fit.
    """
    check_heads(q, k_new, v_new)
    packed = (*q.shape[:-1], q.shape[-1] + 1)
    for x in others:
        if x.shape != packed:
            raise ValueError(f"a partial of others, {x.shape=}, must be output and log-sum-exp: {packed}")
    scoring: Any = {"scale": scale, "softcap": softcap}
    if begun.kernel is not None:
        module = pick(q, k_pool, return_mass=False, backend=backend)
        given = q, k_new, v_new, k_pool, v_pool, new_slots, others
        found: tuple[Pool, Pool, Array] = module.end_decode_attention(*begun, *given, **scoring)
        return found
    partials = [(x[..., :-1], x[..., -1]) for x in others]
    outs, lses = zip(begun[:2], token_partial(q, k_new, v_new, **scoring), *partials, strict=True)
    # pools are read before they are written, or two versions of one would live, and it would be copied
    stored = append(k_pool, v_pool, k_new[:, 0], v_new[:, 0], tied(new_slots, begun.done))
    return *stored, combine(outs, lses)[0].astype(q.dtype)


def attention_with_own(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: Int32[Array, "B Tq"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B 1 N H"]:
    """Attention of one query a request over its stored tokens and its own, which is not stored or not looked
    for there.

    The result is in q's dtype; the rest as for `partial_attention`. Nothing of a backend's work on stored
    tokens waits for k and v.
    """
    check_heads(q, k, v)
    scoring: Any = {"scale": scale, "window": window, "softcap": softcap}
    zeros = _zeros_of(k_pool, v_pool, softcap)
    if zeros.any:
        plain = with_zeros(k_pool, None), with_zeros(v_pool, None)
        how = scoring | {"q_positions": q_positions, "backend": backend}
        return zeros.onto(attention_with_own(q, *zeros.less(k, v), *plain, slot_table, lengths, **how), q)
    module = pick(q, k_pool, return_mass=False, backend=backend)
    stored = k_pool, v_pool, slot_table, lengths
    if q_positions is None and hasattr(module, "attention_with_own") and module.supports_own_token(q, k_pool):
        out: Array = module.attention_with_own(q, k, v, *stored, **scoring)
        return out
    outs, lses = zip(
        partial_attention(q, *stored, **scoring, q_positions=q_positions, backend=backend),
        token_partial(q, k, v, scale=scale, softcap=softcap),
        strict=True,
    )
    return combine(outs, lses)[0].astype(q.dtype)


def token_partial(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float32[Array, "B 1 N H"], Float32[Array, "B 1 N"]]:
    """Attention of one query a request over one token, its own: (out, lse), as `partial_attention` gives
    them.

    No softmax, so nothing but elementwise work that XLA fuses with what is around it.
    """
    check_heads(q, k, v)
    scores = scores_of(q, k, scale, softcap)  # [B, K, G, 1, 1]
    return weigh(jnp.ones_like(scores), v), scores.reshape(q.shape[0], 1, q.shape[2])
