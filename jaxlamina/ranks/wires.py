"""What a message between the pools holds: how q, k and v are cut for the attention workers, and how their answers are
put together.

Both ends are here, so that a format is in one place. Functions of traced arrays, used inside the ranks' programs; knows
shapes and the partition, no transport.

Messages of a layer, in this order: q, then k and v in one (or all three in one, without Q-first), then the answer:
attention output in the model's dtype where a worker has all tokens of its heads, else a float32 partial. With a chunk
alongside a decode step they are as many, each of the step's rows and then of the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxlamina.workers.attention_pool import spread_rows
from jaxlamina.workers.attention_worker import Partial
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import combine, token_partial


class Sizes(NamedTuple):
    """What one worker gets of a step: R rows of queries, M new tokens, T queries a row."""

    rows: int
    new: int
    tokens: int

    def part(self, n: int) -> Sizes:
        """One of n equal parts of it."""
        return Sizes(self.rows // n, self.new // n, self.tokens)


class HeadsOf(NamedTuple):
    """One layer's heads on one worker."""

    n: int  # query heads
    k: int  # KV heads
    h: int  # head dim
    dtype: Any

    def q_like(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sizes.rows, sizes.tokens, self.n, self.h), self.dtype)

    def kv_like(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        """Keys, then values, of the new tokens."""
        return jax.ShapeDtypeStruct((sizes.new, 2 * self.k, self.h), self.dtype)

    def out_like(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        return self.q_like(sizes)

    def partial_like(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sizes.rows, sizes.tokens, self.n, self.h + 1), jnp.float32)


def pack_partial(out: jax.Array, lse: jax.Array) -> jax.Array:
    return jnp.concatenate([out, lse[..., None]], axis=-1)


def unpack_partial(packed: jax.Array) -> Partial:
    return packed[..., :-1], packed[..., -1]


def pack(*xs: jax.Array) -> jax.Array:
    """Arrays as one message: in their dtype, or as pieces of 16 bits if they have several."""
    dtype = _packed_dtype(xs)
    lines = (x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype) for x in xs)
    return jnp.concatenate([line.reshape(-1) for line in lines])


def packed_like(*likes: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = _packed_dtype(likes)
    return jax.ShapeDtypeStruct((sum(math.prod(_in_pieces(x, dtype)) for x in likes),), dtype)


def unpack(message: jax.Array, *likes: jax.ShapeDtypeStruct) -> list[jax.Array]:
    found, at = [], 0
    for like in likes:
        shape = _in_pieces(like, message.dtype)
        line = message[at : at + math.prod(shape)].reshape(shape)
        found.append(line if line.dtype == like.dtype else lax.bitcast_convert_type(line, like.dtype))
        at += math.prod(shape)
    return found


def _packed_dtype(xs: Sequence[Any]) -> Any:
    dtypes = {jnp.dtype(x.dtype) for x in xs}
    return dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.uint16)


def _in_pieces(like: jax.ShapeDtypeStruct, dtype: Any) -> tuple[int, ...]:
    """The shape of an array like ``like`` as bits of ``dtype``."""
    n = jnp.dtype(like.dtype).itemsize // jnp.dtype(dtype).itemsize
    return like.shape if n == 1 else (*like.shape, n)


class MixedSizes(NamedTuple):
    """What one worker gets of a decode step with a chunk of a prompt alongside: one message of q, one of k and v, and its
    answer. ``asks``: whether tokens before the chunk are stored, so that its queries go too."""

    rows: Sizes
    chunk: Sizes
    asks: bool

    def q_likes(self, heads: HeadsOf) -> list[jax.ShapeDtypeStruct]:
        return [heads.q_like(sizes) for sizes in self._asking]

    def kv_like(self, heads: HeadsOf) -> jax.ShapeDtypeStruct:
        return heads.kv_like(Sizes(0, self.rows.new + self.chunk.new, 1))

    def answer_likes(self, heads: HeadsOf, by_heads: bool) -> list[jax.ShapeDtypeStruct]:
        partials = [heads.partial_like(sizes) for sizes in self._asking]
        return [heads.out_like(self.rows), *partials[1:]] if by_heads else partials

    @property
    def _asking(self) -> list[Sizes]:
        return [self.rows, self.chunk] if self.asks else [self.rows]


class Wire(Protocol):
    """The model rank's end for one layer of one step."""

    def q_parts(self, q: jax.Array) -> list[jax.Array]:
        """q ``[B, T, N, H]`` for each worker."""
        ...

    def kv_parts(self, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """k, v ``[B, T, K, H]`` of the tokens that each worker keeps, ``[M, 2K, H]``."""
        ...

    def partial(self, packed: Sequence[jax.Array]) -> Partial:
        """The stored tokens' partial, of all rows and heads, from the workers' answers."""
        ...


class HeadsWire:
    """Every worker has all tokens, of its share of the heads."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers

    def q_parts(self, q: jax.Array) -> list[jax.Array]:
        return jnp.split(q, self.n_workers, axis=2)

    def kv_parts(self, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        pairs = zip(*(jnp.split(x, self.n_workers, axis=1) for x in (k, v)), strict=True)
        return [jnp.concatenate(pair, axis=1) for pair in pairs]

    def whole_out(self, outs: Sequence[jax.Array]) -> jax.Array:
        """Attention output ``[B, 1, N, H]`` from the workers' ``[B, 1, N / b, H]``."""
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=2)

    def partial(self, packed: Sequence[jax.Array]) -> Partial:
        return unpack_partial(packed[0] if len(packed) == 1 else jnp.concatenate(packed, axis=2))


class PlacedIndices(NamedTuple):
    """Of all b workers, int32: which of the batch's rows each has, where a row is among them (R: nowhere), and which new
    tokens it keeps."""

    rows: jax.Array  # [b, R]
    spread: jax.Array  # [b, B]
    new: jax.Array  # [b, M]


class PlacedWire:
    """Every token is on one worker, with all heads; a new token's attention over itself is the model rank's."""

    def __init__(self, indices: PlacedIndices) -> None:
        self.at = indices

    def q_parts(self, q: jax.Array) -> list[jax.Array]:
        return [q[rows] for rows in self.at.rows]

    def kv_parts(self, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        kv = jnp.concatenate([k, v], axis=2)
        kv = kv.reshape(-1, *kv.shape[2:])
        return [kv[new] for new in self.at.new]

    def partial(self, packed: Sequence[jax.Array]) -> Partial:
        parts = [
            spread_rows(*unpack_partial(p), spread) for p, spread in zip(packed, self.at.spread, strict=True)
        ]
        return combine(*zip(*parts, strict=True))


class MixedWire:
    """A decode step's B rows and after them, a row each, the T tokens of one request's chunk: each has its own wire, and
    what they say to a worker goes as one message."""

    def __init__(self, rows: Any, chunk: Any, n_rows: int, asks: bool) -> None:
        self.rows, self.chunk = rows, chunk
        self._n_rows, self._asks = n_rows, asks

    def cut(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``[B + T, 1, …]`` -> the rows' ``[B, 1, …]`` and the chunk's ``[1, T, …]``."""
        return x[: self._n_rows], x[self._n_rows :].swapaxes(0, 1)

    def joined(self, rows: jax.Array, chunk: jax.Array) -> jax.Array:
        """What ``cut`` has cut."""
        return jnp.concatenate([rows, chunk.swapaxes(0, 1)])

    def q_parts(self, q: jax.Array) -> list[jax.Array]:
        rows, chunk = self.cut(q)
        parts = [self.rows.q_parts(rows), *([self.chunk.q_parts(chunk)] if self._asks else [])]
        return [pack(*of_worker) for of_worker in zip(*parts, strict=True)]

    def kv_parts(self, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        (k, k_chunk), (v, v_chunk) = self.cut(k), self.cut(v)
        parts = self.rows.kv_parts(k, v), self.chunk.kv_parts(k_chunk, v_chunk)
        return [jnp.concatenate(of_worker) for of_worker in zip(*parts, strict=True)]


def with_own(stored: Partial, q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attention output ``[B, 1, N, H]`` in q's dtype over stored tokens and the new one, q's own."""
    own = token_partial(q, k, v, scale=spec.scale, softcap=spec.softcap)
    return combine(*zip(own, stored, strict=True))[0].astype(q.dtype)
