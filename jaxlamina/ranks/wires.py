"""What a message between the pools holds: how q, k and v are cut for the attention workers, and how their
answers are put together.

Both ends are here, so that a format is in one place. Functions of traced arrays, used inside the ranks'
programs; knows shapes and the partition, no transport and no order.

An answer is attention output in the model's dtype where a worker has all tokens of its heads, else a float32
partial. With a prompt alongside rows a message has what is of the rows and then what is of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32, Int32, Shaped

from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import PlannedBatch
from jaxlamina.steps.shape import StepShape
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import causal_attention, causal_partial, combine, token_partial

OwnAttention = Float[Array, "_ _ N H"] | tuple[Float32[Array, "_ _ N H"], Float32[Array, "_ _ N"]] | None
Partial = tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]  # (out, lse)


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
    dtype: np.dtype

    def q_like(self, sizes: Sizes) -> Float[jax.ShapeDtypeStruct, "R T N H"]:
        return jax.ShapeDtypeStruct((sizes.rows, sizes.tokens, self.n, self.h), self.dtype)

    def kv_like(self, sizes: Sizes) -> Float[jax.ShapeDtypeStruct, "M KV H"]:
        """Keys, then values, of the new tokens."""
        return jax.ShapeDtypeStruct((sizes.new, 2 * self.k, self.h), self.dtype)

    def partial_like(self, sizes: Sizes) -> Float32[jax.ShapeDtypeStruct, "R T N H1"]:
        return jax.ShapeDtypeStruct((sizes.rows, sizes.tokens, self.n, self.h + 1), jnp.float32)


def pack_partial(out: Float32[Array, "B T N H"], lse: Float32[Array, "B T N"]) -> Float32[Array, "B T N H+1"]:
    return jnp.concatenate([out, lse[..., None]], axis=-1)


def unpack_partial(packed: Float32[Array, "B T N H1"]) -> Partial:
    return packed[..., :-1], packed[..., -1]


def pack(*xs: Array) -> Shaped[Array, " n"]:
    """Arrays as one message: in their dtype, or as pieces of 16 bits if they have several."""
    dtype = _packed_dtype(xs)
    lines = (x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype) for x in xs)
    return jnp.concatenate([line.reshape(-1) for line in lines])


def packed_like(*likes: jax.ShapeDtypeStruct) -> Shaped[jax.ShapeDtypeStruct, " n"]:
    dtype = _packed_dtype(likes)
    return jax.ShapeDtypeStruct((sum(math.prod(_in_pieces(x, dtype)) for x in likes),), dtype)


def unpack(message: Shaped[Array, " n"], *likes: jax.ShapeDtypeStruct) -> list[Array]:
    found, at = [], 0
    for like in likes:
        shape = _in_pieces(like, message.dtype)
        line = message[at : at + math.prod(shape)].reshape(shape)
        found.append(line if line.dtype == like.dtype else lax.bitcast_convert_type(line, like.dtype))
        at += math.prod(shape)
    return found


def _packed_dtype(xs: Sequence[Array | jax.ShapeDtypeStruct]) -> np.dtype:
    dtypes = {jnp.dtype(x.dtype) for x in xs}
    return dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.uint16)


def _in_pieces(like: jax.ShapeDtypeStruct, dtype: jax.typing.DTypeLike) -> tuple[int, ...]:
    """The shape of an array like ``like`` as bits of ``dtype``."""
    n = jnp.dtype(like.dtype).itemsize // jnp.dtype(dtype).itemsize
    return like.shape if n == 1 else (*like.shape, n)


def sizes_of(layout: Layout, segment: StepShape) -> Sizes:
    """Of rows or prompts that go together."""
    if layout.by_heads:
        return Sizes(segment.batch, segment.batch * segment.tokens, segment.tokens)
    return Sizes(segment.rows, segment.new, segment.tokens)


def heads_on_worker(layout: Layout, spec: AttentionSpec, n_query_heads: int) -> HeadsOf:
    """One layer's heads on each worker."""
    b = len(layout.workers) if layout.by_heads else 1
    return HeadsOf(n_query_heads // b, spec.n_kv_heads // b, spec.head_dim, spec.dtype)


class Format:
    """The messages of a batch between a model rank and one worker: what arrays each is made of. One that is
    made of one array is that array; of several it is a line (`pack`)."""

    def __init__(self, layout: Layout, batch: PlannedBatch) -> None:
        n, self._by_heads = batch.n_parts, layout.by_heads
        self._sizes = [sizes_of(layout, segment).part(n) for segment in batch.segments]
        pairs = list(zip(batch.segments, self._sizes, strict=True))
        self._asking = [(segment.kind, sizes) for segment, sizes in pairs if segment.kind != "prefill"]

    def likes(self, what: str, heads: HeadsOf) -> list[jax.ShapeDtypeStruct]:
        if what == "out":
            return [self._answer_like(heads, *asking) for asking in self._asking]
        q = [heads.q_like(sizes) for _, sizes in self._asking]
        kv = [heads.kv_like(Sizes(0, sum(sizes.new for sizes in self._sizes), 1))]
        return {"q": q, "kv": kv, "qkv": q + kv}[what]

    def message_like(self, what: str, heads: HeadsOf) -> jax.ShapeDtypeStruct:
        likes = self.likes(what, heads)
        return likes[0] if len(likes) == 1 else packed_like(*likes)

    def unpacked(self, message: Array, what: str, heads: HeadsOf) -> list[Array]:
        likes = self.likes(what, heads)
        return [message] if len(likes) == 1 else unpack(message, *likes)

    def _answer_like(self, heads: HeadsOf, kind: str, sizes: Sizes) -> jax.ShapeDtypeStruct:
        whole = kind == "decode" and self._by_heads
        return heads.q_like(sizes) if whole else heads.partial_like(sizes)


def message_of(arrays: Sequence[Array]) -> Array:
    """As `Format` has it."""
    return arrays[0] if len(arrays) == 1 else pack(*arrays)


class HeadsCut:
    """Every worker has all tokens, of its share of the heads."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers

    def q_parts(self, q: Float[Array, "B T N H"]) -> list[Float[Array, "B T n H"]]:
        return jnp.split(q, self.n_workers, axis=2)

    def kv_parts(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
    ) -> list[Float[Array, "M KV H"]]:
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        pairs = zip(*(jnp.split(x, self.n_workers, axis=1) for x in (k, v)), strict=True)
        return [jnp.concatenate(pair, axis=1) for pair in pairs]

    def whole_out(self, outs: Sequence[Float[Array, "B 1 n H"]]) -> Float[Array, "B 1 N H"]:
        """Attention output from the workers' N / b heads each."""
        return _concatenated(outs, 2)

    def partial(self, packed: Sequence[Float32[Array, "_ T _ H1"]]) -> Partial:
        return unpack_partial(_concatenated(packed, 2))


class PlacedCut:
    """Every token is on one worker, with all heads; a new token's attention over itself is the model
    rank's."""

    def __init__(self, indices: PlacedIndices) -> None:
        self.at = indices

    def q_parts(self, q: Float[Array, "B T N H"]) -> list[Float[Array, "R T N H"]]:
        return [q[rows] for rows in self.at.rows]

    def kv_parts(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
    ) -> list[Float[Array, "M KV H"]]:
        kv = jnp.concatenate([k, v], axis=2)
        kv = kv.reshape(-1, *kv.shape[2:])
        return [kv[new] for new in self.at.new]

    def partial(self, packed: Sequence[Float32[Array, "_ T _ H1"]]) -> Partial:
        parts = [
            spread_rows(*unpack_partial(p), spread) for p, spread in zip(packed, self.at.spread, strict=True)
        ]
        return combine(*zip(*parts, strict=True))


class Wire:
    """The model rank's end of a batch's exchanges: what its segments say to a worker goes as one message."""

    def __init__(self, layout: Layout, batch: PlannedBatch, at: Sequence[PlacedIndices]) -> None:
        """``at``: of each segment, unless workers share out heads."""
        self.format, self.batch = Format(layout, batch), batch
        self._n_rows = batch.segments[0].batch
        n = len(layout.workers)
        by_heads = [HeadsCut(n) for _ in batch.segments]
        self._cuts: Sequence[HeadsCut | PlacedCut] = [PlacedCut(of_segment) for of_segment in at] or by_heads

    def messages(
        self,
        what: str,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"] | None,
        v: Float[Array, "B T K H"] | None,
        part: int,
    ) -> list[Array]:
        """For each worker. k and v may be missing for q alone."""
        n = self.batch.n_parts
        if n > 1:  # q does not go alone then
            assert k is not None and v is not None
            q, k, v = (jnp.split(x, n)[part] for x in (q, k, v))
        arrays: list[Sequence[Array]] = []
        if what != "kv":
            cuts = zip(self.batch.segments, self._cuts, self._segments(q), strict=True)
            arrays += [cut.q_parts(x) for segment, cut, x in cuts if segment.kind != "prefill"]
        if what != "q":
            assert k is not None and v is not None
            each = zip(self._cuts, self._segments(k), self._segments(v), strict=True)
            of_segments = [cut.kv_parts(of_k, of_v) for cut, of_k, of_v in each]
            arrays.append([_concatenated(parts, 0) for parts in zip(*of_segments, strict=True)])
        return [message_of(of_worker) for of_worker in zip(*arrays, strict=True)]

    def own(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        spec: AttentionSpec,
    ) -> list[OwnAttention]:
        """Of each segment that is of prompts the attention of new tokens among themselves: output, or a
        partial where there are stored ones; None of rows."""
        attend: dict[str, Callable[..., Any]] = {"prefill": causal_attention, "chunk": causal_partial}
        segments = zip(self.batch.segments, *(self._segments(x) for x in (q, k, v)), strict=True)
        return [
            attend[segment.kind](*qkv, **spec.scoring) if segment.kind in attend else None
            for segment, *qkv in segments
        ]

    def out(
        self, answers: Sequence[Sequence[Array]], qkv: tuple[Any, Any, Any], own: Sequence[Any],
        heads: HeadsOf, spec: AttentionSpec,
    ) -> Float[Array, "B T N H"]:  # fmt: skip
        """Attention output. ``answers``: of each part, each worker's; ``own``: as `own` gives it."""
        parts = [self._out(of_part, qkv, own, heads, spec) for of_part in answers]
        return _concatenated(parts or [self._out([], qkv, own, heads, spec)], 0)

    def _out(
        self,
        answers: Sequence[Array],
        qkv: Any,
        own: Sequence[Any],
        heads: HeadsOf,
        spec: AttentionSpec,
    ) -> Array:
        by_segment = zip(*(self.format.unpacked(answer, "out", heads) for answer in answers), strict=True)
        outs = []
        for i, (segment, cut) in enumerate(zip(self.batch.segments, self._cuts, strict=True)):
            if segment.kind == "prefill":
                outs.append(own[i])
                continue
            of_workers = next(by_segment)
            if segment.kind == "chunk":
                outs.append(combined((own[i], cut.partial(of_workers)), spec))
            elif isinstance(cut, HeadsCut):
                outs.append(cut.whole_out(of_workers))
            else:
                q, k, v = (self._segments(x)[i] for x in qkv)
                outs.append(with_own(cut.partial(of_workers), q, k, v, spec))
        rows, *alongside = outs
        return jnp.concatenate([rows, *(x.swapaxes(0, 1) for x in alongside)]) if alongside else rows

    def _segments(self, x: Array) -> list[Array]:
        """``[B + T, 1, …]`` as the rows' ``[B, 1, …]`` and the prompt's ``[1, T, …]``, if there is one
        alongside."""
        if len(self.batch.segments) == 1:
            return [x]
        return [x[: self._n_rows], x[self._n_rows :].swapaxes(0, 1)]


def _concatenated(xs: Sequence[Array], axis: int) -> Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=axis)


def spread_rows(
    out: Float32[Array, "R T N H"], lse: Float32[Array, "R T N"], spread: Int32[Array, " B"]
) -> Partial:
    """A worker's R rows as the batch's B: empty partials for rows that it has not."""
    return (
        out.at[spread].get(mode="fill", fill_value=0.0),
        lse.at[spread].get(mode="fill", fill_value=-jnp.inf),
    )


def combined(partials: Sequence[Partial], spec: AttentionSpec) -> Float[Array, "B T N H"]:
    """Attention output in the model's dtype from partials over disjoint tokens."""
    return combine(*zip(*partials, strict=True))[0].astype(spec.dtype)


def with_own(
    stored: Partial,
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    spec: AttentionSpec,
) -> Float[Array, "B 1 N H"]:
    """Attention output in q's dtype over stored tokens and the new one, q's own."""
    own = token_partial(q, k, v, scale=spec.scale, softcap=spec.softcap)
    return combine(*zip(own, stored, strict=True))[0].astype(q.dtype)
