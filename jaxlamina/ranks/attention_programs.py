"""The attention rank's programs: a whole step each, all layers' appends and partial attention, and all exchanges.

Pools are donated, one array a layer, so that each append is in place. The program is unrolled: in a loop over layers XLA
copies the pools. Knows no weight, no token and no request.

Source: Lamina 2025 §4.2.2: partial attention over earlier tokens runs while k and v are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlamina.control.messages import StepShape
from jaxlamina.ranks.model_programs import Layout
from jaxlamina.ranks.wires import HeadsOf, Sizes, pack_partial, packed_like, unpack
from jaxlamina.transports import Transport, zero_after
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import Pool, append, combine, partial_attention, token_partial

MODEL_RANK = 0


class StepInputs(NamedTuple):
    """A step's slots on this worker, int32: R rows with up to C stored tokens, M new tokens."""

    slot_table: Any  # [R, C]
    lengths: Any  # [R]
    new_slots: Any  # [M], ≥ S for none
    q_positions: dict[int, Any]  # window -> [R, T], for tables that lost their positions


class AttentionProgram:
    """Traces one bucket's step. ``specs`` are of this worker: its own heads."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        specs: Sequence[AttentionSpec],
        n_query_heads: Sequence[int],
        shape: StepShape,
    ) -> None:
        self.t, self.layout, self.specs, self.shape = transport, layout, specs, shape
        self.n_query_heads = n_query_heads
        self.sizes: Sizes = layout.sizes(shape)
        # Without a kernel of its own, attention gathers stored keys and values first, for which it needs no q: left to
        # itself XLA gathers those of all layers at the start, and keeps them.
        self._gathers = transport.device.platform == "cpu"

    def step(
        self, k_pools: list[Pool], v_pools: list[Pool], inputs: StepInputs
    ) -> tuple[list[Pool], list[Pool], jax.Array]:
        """The pools with the new tokens in them, and a float32 ``[1]`` that is there when all is sent."""
        k_pools, v_pools = list(k_pools), list(v_pools)
        last: jax.Array | None = None
        for i, (spec, n) in enumerate(zip(self.specs, self.n_query_heads, strict=True)):
            heads = HeadsOf(n, spec.n_kv_heads, spec.head_dim, spec.dtype)
            if self.shape.kind == "prefill":
                kv = self._recv(heads.kv_like(self.sizes), last)
                k_pools[i], v_pools[i] = self._append(k_pools[i], v_pools[i], kv, inputs.new_slots)
                last = kv
            else:
                k_pools[i], v_pools[i], last = self._answer(i, heads, k_pools[i], v_pools[i], inputs, last)
        assert last is not None, "a model without attention"
        return k_pools, v_pools, zero_after(last).reshape(1)

    def _answer(
        self, i: int, heads: HeadsOf, k_pool: Pool, v_pool: Pool, inputs: StepInputs, last: jax.Array | None
    ) -> tuple[Pool, Pool, jax.Array]:
        """One layer: stored tokens are attended as soon as q is there, and only then are k and v stored: the pools are
        read and written in this order or XLA would keep two of each."""
        spec = self.specs[i]
        q, kv = self._receive(heads, last)
        q_positions = None if spec.window is None else inputs.q_positions.get(spec.window)
        table = inputs.slot_table
        if last is not None and self._gathers:
            table = table + zero_after(last).astype(jnp.int32)
        stored = table, inputs.lengths, q_positions
        out, lse = _stored_of(spec)(q, k_pool, v_pool, *stored)
        if kv is not None:
            slots = inputs.new_slots + zero_after(out).astype(jnp.int32)
            k_pool, v_pool = self._append(k_pool, v_pool, kv, slots)
        if self.shape.kind == "decode" and self.layout.by_heads:
            assert kv is not None
            k, v = jnp.split(kv[:, None], 2, axis=2)
            own = token_partial(q, k, v, scale=spec.scale, softcap=spec.softcap)
            answer, after = combine([out, own[0]], [lse, own[1]])[0].astype(q.dtype), None
        else:
            answer, after = pack_partial(out, lse), kv
        b = len(self.layout.workers)
        return k_pool, v_pool, self.t.send_part(answer, MODEL_RANK, b, after)

    def _receive(self, heads: HeadsOf, last: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        q_like, kv_like = heads.q_like(self.sizes), heads.kv_like(self.sizes)
        if not self.shape.q_first:
            q, kv = unpack(self._recv(packed_like(q_like, kv_like), last), q_like, kv_like)
            return q, kv if self.sizes.new else None
        q = self._recv(q_like, last)
        return q, self._recv(kv_like, q) if self.sizes.new else None

    def _recv(self, like: jax.ShapeDtypeStruct, after: jax.Array | None) -> jax.Array:
        return self.t.recv_part(like, MODEL_RANK, len(self.layout.workers), after)

    def _append(self, k_pool: Pool, v_pool: Pool, kv: jax.Array, slots: jax.Array) -> tuple[Pool, Pool]:
        k, v = jnp.split(kv, 2, axis=1)
        return append(k_pool, v_pool, k, v, slots)


@cache
def _stored_of(spec: AttentionSpec) -> Any:
    """The stored tokens' partial for layers of one kind, jitted so that they are traced and lowered once."""

    def attend(q: Any, k_pool: Pool, v_pool: Pool, table: Any, lengths: Any, q_positions: Any) -> Any:
        return partial_attention(q, k_pool, v_pool, table, lengths, q_positions=q_positions, **spec.scoring)

    return jax.jit(attend)


def step_inputs_of(layout: Layout, shape: StepShape, specs: Sequence[AttentionSpec]) -> StepInputs:
    """The shapes of ``AttentionProgram.step``'s inputs."""
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    sizes = layout.sizes(shape)
    windows = sorted({spec.window for spec in specs if spec.window is not None})
    queries: dict[int, Any] = (
        {} if layout.by_heads else {w: ints((sizes.rows, sizes.tokens)) for w in windows}
    )
    return StepInputs(
        ints((sizes.rows, shape.context)),
        ints((sizes.rows,)),
        ints((sizes.new,)),
        queries,
    )
