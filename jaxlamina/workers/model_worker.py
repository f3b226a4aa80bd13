"""The compute pool's side: weights, and the slices of the split model, jitted for each bucket.

Holds weights and nothing else between steps. It knows no KV and no slot: a decode slice gives q, k, v and a
context and goes on from attention output; a prefill slice attends inside its prompt by itself and its k, v
are for the attention worker to keep. Who calls the slices, in which order, is the executor's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from jaxlamina.workers.attention_worker import Partial
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.streamed import with_streamed_products
from jaxlamina.workers.workspace import LargestStep, ints, program_bytes, shapes, tree_bytes
from pallas_kernels import causal_attention, causal_partial, combine
from splitter import SplitModel, Traced, split, trace
from splitter.program import SliceProgram

# (params, tokens [B, T], positions [B, T], logits_at [B] | None) -> logits [B, 1 or T, V]
ModelFn = Callable[..., jax.Array]
Params = Mapping[str, jax.Array]
Weights = tuple[jax.Array, ...]
Context = tuple[Any, ...]
SliceT = TypeVar("SliceT")


@dataclass(frozen=True)
class DecodeSlice:
    """A slice's jitted parts with its weights beside them, looked up once and not once a step.

    ``whole(weights, context, attention_out) -> (q, k, v, context)`` in one call; or ``q_part`` and ``kv_part``
    (as the splitter's), for a transport that sends q early.
    """

    weights: Weights
    whole: Callable[..., tuple[Any, Any, Any, Context]]
    q_part: Callable[..., tuple[Any, Context]]
    kv_part: Callable[..., tuple[Any, Any, Context]]


@dataclass(frozen=True)
class PrefillSlice:
    """``whole(weights, context, attention_out) -> (attention_out, k, v, context)``: attention included.

    ``chunk`` is for prompts whose first tokens are stored: it takes the last layer's partials and gives this
    layer's own, ``chunk(weights, context, partials) -> (q, (out, lse), k, v, context)``. Partials are tuples
    ``((out, lse), …)`` to be combined, empty before the first layer.
    """

    weights: Weights
    whole: Callable[..., tuple[Any, Any, Any, Context]]
    chunk: Callable[..., tuple[Any, Partial, Any, Any, Context]]


@dataclass(frozen=True)
class BoundModel(Generic[SliceT]):
    """All slices of the model for one bucket: n of them, then the last one's ``final`` → logits [B, V] or [B, T, V]."""

    first_context: Callable[..., Context]
    slices: tuple[SliceT, ...]
    final: Callable[..., jax.Array]
    final_weights: Weights


class ModelWorker:
    """Weights on one device and the programs that use them."""

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        device: jax.Device,
        programs: Programs,
        like: Mapping[str, Any] | None = None,
    ) -> None:
        """``like``: the parameters' shapes as the model has them, where ``params`` are this rank's shares of them."""
        self.device = device
        self.params = jax.device_put(dict(params), device)
        self.like: Mapping[str, Any] = self.params if like is None else dict(like)
        self._model = model
        self._programs = programs
        self._splits: dict[tuple[int, int, bool], SplitModel] = {}
        self._decode: dict[int, BoundModel[DecodeSlice]] = {}
        self._prefill: dict[tuple[int, int, bool], BoundModel[PrefillSlice]] = {}

    def split(self, batch: int, n_tokens: int = 1, *, of_all: bool = False) -> SplitModel:
        """The split model for ``[batch, n_tokens]``; of more than one token a row only the last's logits, or those
        ``of_all``. Programs of other contexts share it."""
        key = batch, n_tokens, of_all
        if key not in self._splits:
            self._splits[key] = split(trace_step(self._model, self.like, *key[:2], of_all=of_all))
        return self._splits[key]

    def decode(self, batch: int) -> BoundModel[DecodeSlice]:
        """The model's slices for a decode step of ``batch`` rows, made on first use."""
        if batch not in self._decode:
            jit = partial(self._jit_decode, what=f"batch {batch}")
            self._decode[batch] = self._bind(self.split(batch), f"batch {batch}", DecodeSlice, jit)
        return self._decode[batch]

    def prefill(self, batch: int, n_tokens: int, *, of_all: bool = False) -> BoundModel[PrefillSlice]:
        """The same for prompts padded to ``[batch, n_tokens]``; ``of_all``: with logits ``[B, T, V]`` of all tokens."""
        key = batch, n_tokens, of_all
        if key not in self._prefill:
            what = f"prefill {batch} × {n_tokens} tokens{', logits of all' if of_all else ''}"
            jit = partial(self._jit_prefill, what=what)
            model = self.split(batch, n_tokens, of_all=of_all)
            self._prefill[key] = self._bind(model, what, PrefillSlice, jit, of_all)
        return self._prefill[key]

    def workspace_bytes(self, largest: LargestStep) -> int:
        """What a slice of the largest step takes beside weights: its context, temporary values and results."""
        b, t = largest.batch, largest.prompt
        found = []
        for bound, inputs in (
            (self.decode(b), (ints(b, 1), ints(b, 1))),
            (self.prefill(1, t), (ints(1, t), ints(1, t), ints(1))),
        ):
            context, out = jax.eval_shape(bound.first_context, *inputs), None
            for part in bound.slices:
                needs = program_bytes(part.whole, shapes(part.weights), context, out)
                found.append(needs + tree_bytes((context, out)))
                *results, context = jax.eval_shape(part.whole, shapes(part.weights), context, out)
                out = results[0]  # q in a decode slice, attention output in a prefill: of one shape and dtype
            found.append(program_bytes(bound.final, shapes(bound.final_weights), context, out))
        return max(found)

    def _bind(
        self,
        model: SplitModel,
        what: str,
        kind: Callable[..., SliceT],
        jit: Callable[[SliceProgram, AttentionSpec], tuple[Callable[..., Any], ...]],
        of_all: bool = False,
    ) -> BoundModel[SliceT]:
        jitted: dict[Any, tuple[Callable[..., Any], ...]] = {}  # equal slices share their compiled code
        slices = []
        for i, site in enumerate(model.sites):
            key = model.slices[i].program, AttentionSpec.of(site)
            if key not in jitted:
                jitted[key] = jit(*key)
            slices.append(kind(self._weights(model, i), *jitted[key]))
        last = model.slices[model.n].program

        def final(weights: Weights, context: Context, attention_out: jax.Array) -> jax.Array:
            self._programs.compiled(f"last slice, {what}")
            logits = last.final(weights, context, attention_out)
            return logits if of_all else logits[:, -1]

        final = jax.jit(with_streamed_products(final, self.device))
        return BoundModel(model.first_context, tuple(slices), final, self._weights(model, model.n))

    def _weights(self, model: SplitModel, i: int) -> Weights:
        return tuple(jnp.asarray(w) for w in model.slice_params(i, self.params))

    def _jit_decode(
        self, program: SliceProgram, _spec: AttentionSpec, what: str
    ) -> tuple[Callable[..., Any], ...]:
        def whole(weights: Weights, context: Context, attention_out: Any) -> tuple[Any, Any, Any, Context]:
            self._programs.compiled(f"slice, {what}")
            q, rest = program.q_part(weights, context, attention_out)
            return q, *program.kv_part(weights, rest)

        def q_part(weights: Weights, context: Context, attention_out: Any) -> tuple[Any, Context]:
            self._programs.compiled(f"slice up to q, {what}")
            return program.q_part(weights, context, attention_out)

        def kv_part(weights: Weights, rest: Context, tie: jax.Array) -> tuple[Any, Any, Context]:
            self._programs.compiled(f"slice from q on, {what}")
            return program.kv_part(weights, rest, tie)

        return tuple(jax.jit(with_streamed_products(f, self.device)) for f in (whole, q_part, kv_part))

    def _jit_prefill(
        self, program: SliceProgram, spec: AttentionSpec, what: str
    ) -> tuple[Callable[..., Any], ...]:
        def whole(weights: Weights, context: Context, attention_out: Any) -> tuple[Any, Any, Any, Context]:
            self._programs.compiled(f"slice, {what}")
            q, rest = program.q_part(weights, context, attention_out)
            k, v, context = program.kv_part(weights, rest)
            with jax.default_device(self.device):  # kernels are picked by it
                return causal_attention(q, k, v, **spec.scoring), k, v, context

        def chunk(
            weights: Weights, context: Context, partials: tuple[Partial, ...]
        ) -> tuple[Any, Partial, Any, Any, Context]:
            self._programs.compiled(f"slice after stored tokens, {what}")
            q, rest = program.q_part(weights, context, combined(partials, spec))
            k, v, context = program.kv_part(weights, rest)
            with jax.default_device(self.device):
                return q, causal_partial(q, k, v, **spec.scoring), k, v, context

        return jax.jit(whole), jax.jit(chunk)


def combined(partials: tuple[Partial, ...], spec: AttentionSpec) -> jax.Array | None:
    """Attention output in the model's dtype from partials over disjoint tokens; None from none."""
    return combine(*zip(*partials, strict=True))[0].astype(spec.dtype) if partials else None


def trace_step(model: ModelFn, params: Params, batch: int, n_tokens: int, *, of_all: bool = False) -> Traced:
    """``model`` traced for ``[batch, n_tokens]``: a decode step for one token a row, else a prefill, which takes the index
    of each row's one token that logits are of, unless they are ``of_all``."""
    tokens = jax.ShapeDtypeStruct((batch, n_tokens), jnp.int32)
    if n_tokens == 1 or of_all:

        def decode(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
            return model(params, tokens, positions, None)

        return trace(decode, dict(params), tokens, tokens)

    def prefill(params: Params, tokens: jax.Array, positions: jax.Array, logits_at: jax.Array) -> jax.Array:
        return model(params, tokens, positions, logits_at)

    return trace(prefill, dict(params), tokens, tokens, jax.ShapeDtypeStruct((batch,), jnp.int32))
