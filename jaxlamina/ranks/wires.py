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
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32, Int32, Shaped

from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.ranks.stored import Unended
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import PlannedBatch
from jaxlamina.steps.shape import StepShape
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import causal_attention, causal_partial, combine, token_partial

OwnAttention = Float[Array, "_ _ N H"] | tuple[Float32[Array, "_ _ N H"], Float32[Array, "_ _ N"]] | None
Partial = tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]  # (out, lse)
OfSome = tuple[Float32[Array, "_ _ _ _"], Float32[Array, "_ _ _"]]  # the same of some rows or heads


class Sizes(NamedTuple):
    """What one worker gets of a step: R rows of queries, M new tokens, T queries a row."""

    rows: int
    new: int
    tokens: int

    def part(self, n: int) -> Sizes:
        """One of n equal parts of it."""
        return Sizes(self.rows // n, self.new // n, self.tokens)


class HeadsOf(NamedTuple):
    """One layer's heads on one worker, or those of them that a model rank exchanges with it."""

    n: int  # query heads
    k: int  # KV heads
    h: int  # head dim
    dtype: np.dtype
    first: int = 0  # of the KV heads that an end of the exchange has, which of them is the first of these
    of: int = 0  # of a worker's: how many KV heads all workers have together

    @property
    def queries(self) -> slice:
        """Of the query heads that the end has, these."""
        start = self.first * self.n // max(1, self.k)
        return slice(start, start + self.n)

    @property
    def keys(self) -> slice:
        return slice(self.first, self.first + self.k)

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


def heads_on_worker(layout: Layout, spec: AttentionSpec, n_query_heads: int, index: int) -> HeadsOf:
    """One layer's heads on the attention worker of this index: by heads a share of those that model ranks do
    not keep."""
    pooled = spec.n_kv_heads - (layout.local_heads(spec.n_kv_heads) if layout.by_heads else 0)
    k = len(layout.heads_of_worker(index, pooled))
    n_each = n_query_heads // spec.n_kv_heads
    return HeadsOf(k * n_each, k, spec.head_dim, spec.dtype, of=pooled)


Links = Sequence[tuple[int, HeadsOf]]
"""With whom an end exchanges a layer's heads, and which; at a model rank by workers, at a worker by ranks."""


def links_of_rank(layout: Layout, replica: int, rank: int, spec: AttentionSpec, n_each: int) -> Links:
    """A model rank's, or prefill worker's; ``spec``: of all the layer's heads, ``n_each`` queries' to a KV
    head."""
    shared = layout.by_heads and layout.attends_locally
    pooled = spec.n_kv_heads - (layout.local_heads(spec.n_kv_heads) if shared else 0)
    own = [link for link in layout.links(replica, pooled) if link.rank == rank]
    first = min((link.heads.start for link in own), default=0)
    return [(link.worker, _linked(link.heads, first, spec, n_each)) for link in own]


def links_of_worker(layout: Layout, worker: int, replica: int, heads: HeadsOf) -> Links:
    """An attention worker's with a replica's ranks, or a prefill worker; ``heads``: those that it has."""
    own = [link for link in layout.links(replica, heads.of) if link.worker == worker]
    first, n_each = own[0].heads.start, heads.n // max(1, heads.k)
    return [(link.rank, _linked(link.heads, first, heads, n_each)) for link in own]


def _linked(heads: range, first: int, of: AttentionSpec | HeadsOf, n_each: int) -> HeadsOf:
    h = of.head_dim if isinstance(of, AttentionSpec) else of.h
    return HeadsOf(n_each * len(heads), len(heads), h, of.dtype, heads.start - first)


def local_spec(layout: Layout, spec: AttentionSpec) -> AttentionSpec:
    """Of the KV that a model rank keeps."""
    return replace(spec, n_kv_heads=layout.local_heads(spec.n_kv_heads) // layout.heads_over)


class Format:
    """The messages of a batch between a model rank and one worker: what arrays each is made of. One that is
    made of one array is that array; of several it is a line (`pack`)."""

    def __init__(self, layout: Layout, batch: PlannedBatch) -> None:
        n, self._by_heads = batch.n_parts, layout.by_heads
        pairs = [(segment, sizes_of(layout, segment).part(n)) for segment in batch.segments]
        self._n_new = sum(sizes.new for segment, sizes in pairs if layout.stores(segment))
        self._asking = [(segment.kind, sizes) for segment, sizes in pairs if layout.asks(segment)]

    def likes(self, what: str, heads: HeadsOf) -> list[jax.ShapeDtypeStruct]:
        if what == "out":
            return [self._answer_like(heads, *asking) for asking in self._asking]
        q = [heads.q_like(sizes) for _, sizes in self._asking]
        kv = [heads.kv_like(Sizes(0, self._n_new, 1))]
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


def put_together(of_ranks: Sequence[Sequence[Array]], stores: bool) -> list[Array]:
    """At a worker: what each rank's message holds, of that rank's heads, as what one of all their heads would
    hold; ``stores``: whether the last array is keys and values."""
    if len(of_ranks) == 1:
        return list(of_ranks[0])
    found = [_concatenated(xs, 2) for xs in zip(*of_ranks, strict=True)] if not stores else []
    if stores:
        *queries, new = zip(*of_ranks, strict=True)
        keys, values = zip(*(jnp.split(kv, 2, axis=1) for kv in new), strict=True)
        found = [*(_concatenated(xs, 2) for xs in queries), _concatenated([*keys, *values], 1)]
    return found


def answer_of(answers: Sequence[Array], heads: HeadsOf) -> Array:
    """A worker's message to the rank that asked about these of its heads; ``answers``: of all, each
    segment's."""
    return message_of([x[:, :, heads.queries] for x in answers])


class HeadsCut:
    """Every worker has all tokens, of its share of the heads; a model rank the heads that are left."""

    def q_parts(self, q: Float[Array, "B T N H"], links: Links) -> list[Float[Array, "B T n H"]]:
        return [q[:, :, heads.queries] for _, heads in links]

    def local_q(self, q: Float[Array, "B T N H"], links: Links) -> Float[Array, "B T n H"]:
        return q[:, :, sum(heads.n for _, heads in links) :]

    def kv_parts(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], links: Links
    ) -> list[Float[Array, "M KV H"]]:
        return [_keys_and_values(k, v, heads.keys) for _, heads in links]

    def local_kv(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], links: Links
    ) -> Float[Array, "M KV H"]:
        return _keys_and_values(k, v, slice(sum(heads.k for _, heads in links), None))

    def whole_out(self, outs: Sequence[Float[Array, "B 1 _ H"]]) -> Float[Array, "B 1 N H"]:
        """Attention output from the workers' heads each, and a model rank's."""
        return _concatenated(outs, 2)

    def partial(self, of_workers: Sequence[OfSome], of_rank: Sequence[OfSome]) -> Partial:
        outs, lses = zip(*of_workers, *of_rank, strict=True)
        return _concatenated(outs, 2), _concatenated(lses, 2)


class PlacedCut:
    """Every token is on one worker or on a model rank, with all heads, so that each worker gets all that the
    model rank has; a new token's attention over itself is the model rank's."""

    def __init__(self, indices: PlacedIndices, segment: StepShape) -> None:
        """Where a worker has all of the segment's rows, or new tokens, they are in its order."""
        self.at = indices
        self._all_rows = segment.rows == segment.batch
        self._all_new = segment.new == segment.batch * segment.tokens

    def q_parts(self, q: Float[Array, "B T N H"], links: Links) -> list[Float[Array, "R T N H"]]:
        return [q if self._all_rows else q[rows] for rows in self.at.rows]

    def local_q(self, q: Float[Array, "B T N H"], links: Links) -> Float[Array, "B T N H"]:
        return q

    def kv_parts(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], links: Links
    ) -> list[Float[Array, "M KV H"]]:
        kv = _keys_and_values(k, v, slice(None))
        return [kv if self._all_new else kv[new] for new in self.at.new]

    def local_kv(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], links: Links
    ) -> Float[Array, "M KV H"]:
        return _keys_and_values(k, v, slice(None))

    def whole_out(self, outs: Sequence[Float[Array, "B 1 N H"]]) -> Float[Array, "B 1 N H"]:
        """Where no worker has anything of the rows: the model rank's own."""
        [out] = outs
        return out

    def packed(self, of_workers: Sequence[Float32[Array, "_ 1 N H1"]]) -> list[Float32[Array, "B 1 N H1"]]:
        """Workers' answers, of all rows each."""
        if self._all_rows:
            return list(of_workers)
        pairs = zip(of_workers, self.at.spread, strict=True)
        return [pack_partial(*spread_rows(*unpack_partial(part), spread)) for part, spread in pairs]

    def partial(self, of_workers: Sequence[OfSome], of_rank: Sequence[OfSome]) -> Partial:
        if not self._all_rows and of_workers:
            pairs = zip(of_workers, self.at.spread, strict=True)
            of_workers = [spread_rows(*part, spread) for part, spread in pairs]
        return combine(*zip(*of_workers, *of_rank, strict=True))


def _keys_and_values(
    k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], heads: slice
) -> Float[Array, "M KV H"]:
    return jnp.concatenate([x[:, :, heads].reshape(-1, *x[:, :, heads].shape[2:]) for x in (k, v)], axis=1)


class Wire:
    """The model rank's end of a batch's exchanges: what its segments say to a worker goes as one message."""

    def __init__(self, layout: Layout, batch: PlannedBatch, at: Sequence[PlacedIndices]) -> None:
        """``at``: of each segment, unless workers share out heads."""
        self.format, self.batch = Format(layout, batch), batch
        self._n_rows = batch.segments[0].batch
        by_heads = [HeadsCut() for _ in batch.segments]
        placed = [PlacedCut(*one) for one in zip(at, batch.segments, strict=False)]
        self._cuts: Sequence[HeadsCut | PlacedCut] = placed or by_heads
        self._asks = [layout.asks(segment) for segment in batch.segments]
        self._stores = [layout.stores(segment) for segment in batch.segments]

    def messages(
        self,
        what: str,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"] | None,
        v: Float[Array, "B T K H"] | None,
        part: int,
        links: Links,
    ) -> list[Array]:
        """For each worker of ``links``. k and v may be missing for q alone."""
        n = self.batch.n_parts
        if n > 1:  # q does not go alone then
            assert k is not None and v is not None
            q, k, v = (jnp.split(x, n)[part] for x in (q, k, v))
        arrays: list[Sequence[Array]] = []
        if what != "kv":
            cuts = zip(self._asks, self._cuts, self._segments(q), strict=True)
            arrays += [cut.q_parts(x, links) for asks, cut, x in cuts if asks]
        if what != "q":
            assert k is not None and v is not None
            each = zip(self._stores, self._cuts, self._segments(k), self._segments(v), strict=True)
            of_segments = [cut.kv_parts(of_k, of_v, links) for stores, cut, of_k, of_v in each if stores]
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

    def local(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        links: Links,
    ) -> tuple[list[tuple[Float[Array, "_ _ _ _"], bool]], Float[Array, "M KV H"]]:
        """What the model rank itself is asked: of each segment that may have stored tokens its queries, and
        whether the answer is to be whole, the new token's own attention in it; and the keys and values of all
        new tokens. ``links``: with workers, who have the other heads, or all."""
        each = zip(self.batch.segments, self._cuts, self._asks, self._segments(q), strict=True)
        queries = [
            (cut.local_q(x, links), segment.kind == "decode" and (isinstance(cut, HeadsCut) or not asks))
            for segment, cut, asks, x in each
            if segment.kind != "prefill"
        ]
        pairs = zip(self._cuts, self._segments(k), self._segments(v), strict=True)
        return queries, _concatenated([cut.local_kv(of_k, of_v, links) for cut, of_k, of_v in pairs], 0)

    def local_answers_like(self, q: jax.ShapeDtypeStruct, links: Links) -> list[Any]:
        """What a model rank answers for rows alone of which attention workers have a part, for another one to
        put together."""
        [cut] = self._cuts
        own = jax.eval_shape(partial(cut.local_q, links=links), q)
        if isinstance(cut, HeadsCut):
            return [own]
        return [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (own.shape, own.shape[:-1]))]

    def out(
        self, answers: Sequence[Sequence[Array]], qkv: tuple[Any, Any, Any], own: Sequence[Any],
        local: Sequence[Any], links: Links, spec: AttentionSpec,
    ) -> Float[Array, "B T N H"]:  # fmt: skip
        """Attention output. ``answers``: of each part, each worker's; ``own``: as `own` gives it; ``local``:
        what the model rank answered to `local`, nothing where it keeps no KV."""
        if len(answers) < 2:
            return self._out(answers[0] if answers else [], qkv, own, local, links, spec)
        rows = [jnp.split(of_segment, len(answers)) for of_segment in local]  # by heads, and rows alone
        parts = [
            self._out(of_part, qkv, own, [of_segment[p] for of_segment in rows], links, spec)
            for p, of_part in enumerate(answers)
        ]
        return _concatenated(parts, 0)

    def _out(
        self,
        answers: Sequence[Array],
        qkv: Any,
        own: Sequence[Any],
        local: Sequence[Any],
        links: Links,
        spec: AttentionSpec,
    ) -> Array:
        of_links = zip(answers, links, strict=True) if answers else ()
        unpacked = (self.format.unpacked(answer, "out", heads) for answer, (_, heads) in of_links)
        by_segment = zip(*unpacked, strict=True)
        of_local, outs = iter(local), []
        for i, (segment, cut) in enumerate(zip(self.batch.segments, self._cuts, strict=True)):
            if segment.kind == "prefill":
                outs.append(own[i])
                continue
            of_workers = list(next(by_segment)) if self._asks[i] else []
            of_rank = [next(of_local)] if local else []
            if segment.kind == "decode" and (isinstance(cut, HeadsCut) or not of_workers):
                outs.append(cut.whole_out([*of_workers, *of_rank]))
                continue
            if isinstance(cut, PlacedCut) and of_rank and isinstance(of_rank[0], Unended):
                outs.append(of_rank[0].end(cut.packed(of_workers)))
                continue
            stored = cut.partial([*map(unpack_partial, of_workers)], of_rank)
            if segment.kind == "chunk":
                outs.append(combined((own[i], stored), spec))
            else:
                q, k, v = (self._segments(x)[i] for x in qkv)
                outs.append(with_own(stored, q, k, v, spec))
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
