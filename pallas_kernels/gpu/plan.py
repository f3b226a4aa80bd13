"""How a ragged batch is dealt out over a GPU: equal shares of one long row of tiles.

All requests' tokens, in tiles, are laid end to end (request by request, and within one group of heads after
another); every CTA takes an equal stretch, so that a long request is spread over many CTAs and many short
ones share one. A stretch that covers part of an item (one request's tokens for one group of heads) leaves a
partial result of its own; the partial of CTA c for item i is number c + i, which no other pair has. All in
traced integers of fixed shape: no host, no recompilation when lengths change. Knows nothing of keys, values
or instructions.

Source: split-KV as in flash decoding; the even deal over requests is what Lamina 2025 §5 asks of an attention
worker. Multiprocessors are not equally fast, but letting them take shorter and shorter stretches as they get
through gained nothing on an H200: what the quick ones did more, memory then did less for the others
(docs/findings.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

REQUEST_FIELDS = ("first", "end", "n_tiles", "tile_start", "next")


@dataclass(frozen=True)
class PlanLayout:
    """Where a plan, one row of int32, keeps what: fields of each request, each CTA's first request, two
    scalars."""

    n_requests: int
    items_per_request: int
    n_ctas: int

    @property
    def n_partials(self) -> int:
        """The largest c + i, and one."""
        return self.n_ctas + self.n_requests * self.items_per_request - 1

    def at(self, field: str) -> int:
        """First word of a request field, of "cta_request", or of "tiles_per_cta" or "total_tiles"."""
        if field in REQUEST_FIELDS:
            return REQUEST_FIELDS.index(field) * self.n_requests
        after = len(REQUEST_FIELDS) * self.n_requests
        scalars = {"tiles_per_cta": self.n_ctas, "total_tiles": self.n_ctas + 1}
        return after + scalars.get(field, 0)


def make_plan(layout: PlanLayout, first: Array, end: Array, *, tile_tokens: int) -> Array:
    """The plan for requests that attend over positions first[b] .. end[b] - 1, as one row of int32.

    first, end `[B]` int32; a request with end <= first has no tiles.
    """
    n_requests = layout.n_requests
    first, end = first.astype(jnp.int32), end.astype(jnp.int32)
    n_tiles = jnp.maximum(end - first + tile_tokens - 1, 0) // tile_tokens
    tile_end = jnp.cumsum(n_tiles * layout.items_per_request, dtype=jnp.int32)
    total = tile_end[-1]
    share = jnp.maximum((total + layout.n_ctas - 1) // layout.n_ctas, 1)
    starts = jnp.arange(layout.n_ctas, dtype=jnp.int32) * share
    # The request a CTA starts in is the first whose tiles end after the CTA's start.
    cta_request = jnp.sum(tile_end[None, :] <= starts[:, None], axis=1, dtype=jnp.int32)
    index = jnp.arange(n_requests, dtype=jnp.int32)
    nonempty = lax.cummin(jnp.where(n_tiles > 0, index, n_requests - 1), reverse=True)
    fields = [
        first,
        end,
        n_tiles,
        tile_end - n_tiles * layout.items_per_request,
        jnp.concatenate([nonempty[1:], jnp.full((1,), n_requests - 1, jnp.int32)]),
        jnp.minimum(cta_request, n_requests - 1),
        share[None],
        total[None],
    ]
    return jnp.concatenate(fields)
