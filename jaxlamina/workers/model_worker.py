"""The compute pool's side: weights on a device, and the model cut for each size of a step.

Holds weights and nothing else between steps. It knows no KV and no slot; who runs the slices, in which order,
is a plan's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxlamina.weights.later import Later, put
from splitter import SplitModel, Traced, split, trace

# (params, tokens [B, T], positions [B, T], logits_at [B] | None) -> logits [B, 1 or T, V]
ModelFn = Callable[..., jax.Array]
Params = Mapping[str, jax.Array | Later]
Like = Array | Later | jax.ShapeDtypeStruct


class ModelWorker:
    """Weights on one device, or where ``place`` says for each, and the model that reads them."""

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        device: jax.Device,
        like: Mapping[str, Like] | None = None,
        place: Callable[[str, Like], jax.sharding.Sharding] | None = None,
    ) -> None:
        """``like``: the parameters' shapes as the model has them, where ``params`` are this rank's shares of
        them."""
        self.device = device
        self._place = place or (lambda name, x: jax.sharding.SingleDeviceSharding(device))
        self.params = {name: put(x, self._place(name, x)) for name, x in params.items()}
        self.like: Mapping[str, Like] = self.params if like is None else dict(like)
        self._model = model
        self._splits: dict[tuple[int, int, bool], SplitModel] = {}

    def put(self, params: Params) -> None:
        """Other weights, of the same names, shapes and dtypes. One takes the place of another, so that no
        device needs room for all of both."""
        for name, x in params.items():
            self.params[name] = put(x, self._place(name, x))

    def split(self, batch: int, n_tokens: int = 1, *, of_all: bool = False) -> SplitModel:
        """The split model for ``[batch, n_tokens]``; of more than one token a row only the last's logits, or
        those ``of_all``. Programs of other contexts share it."""
        key = batch, n_tokens, of_all
        if key not in self._splits:
            self._splits[key] = split(trace_step(self._model, self.like, *key[:2], of_all=of_all))
        return self._splits[key]


def trace_step(
    model: ModelFn, params: Mapping[str, Like], batch: int, n_tokens: int, *, of_all: bool = False
) -> Traced:
    """``model`` traced for ``[batch, n_tokens]``: a decode step for one token a row, else a prefill, which
    takes the index of each row's one token that logits are of, unless they are ``of_all``."""
    tokens = jax.ShapeDtypeStruct((batch, n_tokens), jnp.int32)
    if n_tokens == 1 or of_all:

        def decode(
            params: Params, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"]
        ) -> Float[Array, "B _ V"]:
            return model(params, tokens, positions, None)

        return trace(decode, dict(params), tokens, tokens)

    def prefill(
        params: Params,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        logits_at: Int32[Array, " B"],
    ) -> Float[Array, "B 1 V"]:
        return model(params, tokens, positions, logits_at)

    return trace(prefill, dict(params), tokens, tokens, jax.ShapeDtypeStruct((batch,), jnp.int32))
