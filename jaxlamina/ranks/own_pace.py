"""What a prefill worker at its own pace holds and runs: the KV of the prompt that it is computing, by
position; programs that compute a chunk of it as the unsplit model does; and programs that send what came of
a chunk.

While it computes, no other rank takes part. What is sent is there by then, so that attention ranks wait for
the link alone (Lamina 2025 §5: they pull KV when they have time for it). Knows chunks of one prompt; no slot
of the attention ranks, and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from jaxlamina.errors import UserError
from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.process import kept_programs
from jaxlamina.ranks.model_programs import indices_of
from jaxlamina.ranks.wires import Wire, links_of_rank
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Send
from jaxlamina.transports import Program, Transport, compiler_options
from jaxlamina.workers.capacity import resolve_slots
from jaxlamina.workers.kv_pools import KVPools
from jaxlamina.workers.model_worker import ModelFn, ModelWorker, Params
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.streamed import with_streamed_products
from jaxlamina.workers.whole_model import attend_in_pools, filled, prompt_attention, prompt_logits
from pallas_kernels import Pool
from pallas_kernels.order import zero_after


class Came(NamedTuple):
    """What comes of a chunk of T tokens: each layer's keys and values, and float32 logits."""

    k: list[Float[jax.Array, "1 T K H"]]
    v: list[Float[jax.Array, "1 T K H"]]
    logits: Float32[jax.Array, "1 ... V"]


class PromptWorker:
    """``compute`` a chunk, and send what came of it by a program of `compile_later`, in turn.

    The KV of the prompt lies by position, so a prompt's first chunk takes the place of the prompt before it.
    ``n_slots``: of the longest prompt; ``UserError`` where there is no room beside the weights. ``made_of``:
    what says which model this is; where there is that, programs are kept on disk.
    """

    def __init__(
        self,
        transport: Transport,
        function: ModelFn,
        model: ModelWorker,
        layout: Layout,
        specs: Sequence[AttentionSpec],
        n_slots: int,
        scales: Sequence[ChannelScales] | None,
        made_of: object = None,
    ) -> None:
        self._transport, self._function, self._model = transport, function, model
        self._layout, self._specs = layout, list(specs)
        try:
            self._n_slots = resolve_slots(n_slots, specs, [transport.device])
        except UserError as error:
            raise UserError(
                f"there is no room for the KV of the prompt that a prefill worker computes at its own pace: "
                f"lower max_model_len, or take prefill_pace='step' ({error})"
            ) from None
        self._kv = KVPools(specs, self._n_slots, transport.device, channel_scales=scales)
        pools = kept_programs.kinds((self._kv.k, self._kv.v))
        self._made_of = None if made_of is None else ("at its own pace", made_of, tuple(specs), pools)
        self._programs: dict[tuple[int, bool, bool], Any] = {}
        self._came: Came | None = None

    def compute(
        self,
        tokens: Int32[Any, "1 T"],
        positions: Int32[Any, "1 T"],
        logits_at: Int32[Any, " 1"],
        start: int,
        *,
        scored: bool,
        before_compiling: Callable[[], object] = lambda: None,
        begin: Callable[[], int],
    ) -> tuple[int, jax.Array]:
        """Launches a chunk: what ``begin`` gave right before, and the logits, which are there when all is.
        ``before_compiling()`` is called before anything is: no program may run meanwhile
        (`transports.compiler_options`)."""
        args = self._model.params, self._kv.k, self._kv.v, tokens, positions, logits_at, _one(start)
        key = tokens.shape[1], start > 0, scored
        if key not in self._programs:
            before_compiling()
            device = self._transport.device
            step = partial(self._traced, follows=start > 0, of_all=scored)
            streamed = with_streamed_products(step, device, filled)
            options, made_of = compiler_options(device), self._made_of
            self._programs[key] = kept_programs.later(
                None if made_of is None else kept_programs.name_of(device, made_of, key, options),
                lambda: jax.jit(streamed, donate_argnums=(1, 2)).lower(*args),
                [device],
                options,
                lambda: None,
            )()
        ticket = begin()
        self._kv.k, self._kv.v, came = self._programs[key](*args)
        self._came = Came(*came)
        return ticket, self._came.logits

    def _traced(
        self,
        params: Params,
        k_pools: list[Pool],
        v_pools: list[Pool],
        tokens: jax.Array,
        positions: jax.Array,
        logits_at: jax.Array,
        start: jax.Array,
        follows: bool,
        of_all: bool,
    ) -> tuple[list[Pool], list[Pool], Came]:
        k_pools, v_pools, keys, values = list(k_pools), list(v_pools), [], []
        own = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        slots = jnp.where(own <= logits_at, start + own, self._n_slots)[None]
        table = jnp.arange(self._n_slots if follows else 0, dtype=jnp.int32)[None]
        pools = k_pools, v_pools
        layers = attend_in_pools(
            lambda spec: partial(prompt_attention, spec), self._specs, *pools, slots, table, start
        )

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys.append(k)
            values.append(v)
            return layers(i, q, k, v)

        known = self._function, self._model.like, self._transport.device, attend
        logits = prompt_logits(*known, params, tokens, positions, logits_at, of_all=of_all)
        return k_pools, v_pools, Came(keys, values, logits.astype(jnp.float32))

    # --- what came of it ---
    def compile_later(self, part: StepShape, behind: bool) -> Callable[[], tuple[Program, None]]:
        """Traces the program that sends what comes of a chunk of such a size; the call that comes back
        compiles it."""
        like = self._came_like(part), indices_of(self._layout, part)
        name = self._name(part, behind)
        keep = None if name is None else (name, None)
        compiles = self._transport.compile_later(partial(self._sent, part), *like, behind=behind, keep=keep)
        return lambda: (compiles(), None)

    def kept(self, part: StepShape, behind: bool) -> tuple[Program, None] | None:
        """What `compile_later`'s call gives, from an earlier process; in any thread."""
        name = self._name(part, behind)
        return None if name is None else self._transport.kept(name)

    def _name(self, part: StepShape, behind: bool) -> str | None:
        if self._made_of is None:
            return None
        return self._transport.name_of(self._made_of, self._layout, part, behind)

    def _came_like(self, part: StepShape) -> Came:
        kv: list[Any] = [
            jax.ShapeDtypeStruct((1, part.tokens, spec.n_kv_heads, spec.head_dim), spec.dtype)
            for spec in self._specs
        ]
        n_words = self._model.split(1).traced.jaxpr.outvars[0].aval.shape[-1]
        logits: Any = jax.ShapeDtypeStruct((*part.logits_of, n_words), jnp.float32)
        return Came(kv, kv, logits)

    def _sent(self, part: StepShape, came: Came, at: Sequence[PlacedIndices]) -> Float32[jax.Array, " 1"]:
        plan, rank, tie = plan_of(self._layout, part, len(self._specs)), part.rank, None
        [batch] = plan.batches
        wire, sites = Wire(self._layout, batch, at), self._model.split(1).sites
        for task in plan.model[rank]:
            assert isinstance(task, Send)
            what, _, i, _ = task.payload
            if what == "logits":
                tie = self._transport.send(came.logits, task.peer, after=tie)
                continue
            n_each = sites[i].q.shape[2] // sites[i].k.shape[2]
            links = links_of_rank(self._layout, rank, rank, self._specs[i], n_each)
            messages = wire.messages("kv", came.k[i], came.k[i], came.v[i], 0, links)
            tie = self._transport.send_each(messages, [worker for worker, _ in links], after=tie)
        return jnp.zeros(1) if tie is None else zero_after(tie).reshape(1)

    def send(self, call: Callable[..., Any], at: Sequence[PlacedIndices]) -> Any:
        """By such a program. What it gives is there when all is sent."""
        assert self._came is not None, "nothing is computed"
        came, self._came = self._came, None
        return call(*self._transport.bind((came, at)))


def _one(n: int) -> Int32[jax.Array, " 1"]:
    return jnp.full(1, n, jnp.int32)
