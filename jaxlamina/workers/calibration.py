"""Fixed scales and zero points of an int8 KV cache, a channel each, from what a model's keys and values are
like on some tokens.

ALISA §V.B quantises KV channel-wise. A scale for each channel must hold for tokens that are yet to come, so a
small batch goes through the model when it is loaded. Knows a model function and its attention; no checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Int32

from jaxlamina.errors import UserError
from jaxlamina.weights.later import made
from jaxlamina.workers.model_worker import ModelFn, Params, trace_step
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from pallas_kernels import causal_attention, channel_scales_of, channel_zeros_of

# Rows and tokens of the batch when none is given; most rows of one that is made of a text.
_ROWS, _TOKENS, _MOST_ROWS = 8, 128, 64
_MOST_CHARACTERS = 16 * _MOST_ROWS * _TOKENS  # of a text, more of which would not be looked at


@dataclass(frozen=True)
class Calibration:
    """What int8 scales that are fixed are found from.

    - ``tokens``: None draws them at random from the vocabulary, always the same ones.
    - ``headroom``: scales hold so much more than the farthest value met. Tokens yet to come go somewhat
      beyond, and a value that clips costs more than the finer step gains. Chosen on other text than what
      tests judge by: docs/benchmarks.md.
    """

    tokens: Int[np.ndarray, "B T"] | None = None
    headroom: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.headroom <= 100:
            raise UserError(f"calibration headroom {self.headroom} must be from 1 to 100")
        if self.tokens is not None and (self.tokens.ndim != 2 or self.tokens.shape[1] < 2):
            raise UserError(
                f"calibration tokens {self.tokens.shape} must be [rows, tokens], two or more tokens a row"
            )

    def digest(self) -> str:
        """What tells it from others."""
        tokens = b"" if self.tokens is None else np.ascontiguousarray(self.tokens, np.int64).tobytes()
        return hashlib.blake2b(f"{self.headroom} ".encode() + tokens, digest_size=8).hexdigest()


def calibration_rows(
    given: object, encode: Callable[[str], Sequence[int]], n_vocab: int
) -> Int32[np.ndarray, "B T"]:
    """Rows of text, token ids, or lists of either, put one after the other; T is at most 128, and of a long
    text the first rows are taken. ``UserError`` for what is neither, for ids that the vocabulary has not, and
    for fewer than two tokens."""
    tokens = np.asarray(list(_flat(given, encode)), np.int64)
    wrong = tokens[(tokens < 0) | (tokens >= n_vocab)]
    if len(wrong):
        raise UserError(f"calibration token {wrong[0]} must be from 0 to {n_vocab - 1}")
    length = min(_TOKENS, len(tokens))
    if length < 2:
        raise UserError(f"calibration needs two tokens or more, {len(tokens)} given")
    n_rows = min(_MOST_ROWS, len(tokens) // length)
    return tokens[: n_rows * length].reshape(n_rows, length).astype(np.int32)


def _flat(given: object, encode: Callable[[str], Sequence[int]]) -> Iterator[int]:
    if isinstance(given, str):
        yield from encode(given[:_MOST_CHARACTERS])
    elif isinstance(given, int | np.integer) and not isinstance(given, bool):
        yield int(given)
    elif isinstance(given, list | tuple | np.ndarray):
        for part in given:
            yield from _flat(part, encode)
    else:
        raise UserError(f"calibration tokens must be text, token ids or lists of them, not {given!r:.80}")


def channel_scales(
    model: ModelFn,
    params: Params,
    specs: Sequence[AttentionSpec],
    calibration: Calibration | None = None,
    *,
    n_positions: int = 1024,
) -> list[ChannelScales] | None:
    """Scales, and zero points where a layer's KV has some, ``[K, H]`` of each layer; None if none is scaled
    by channel.

    A channel's zero point is the middle of its values' range over the tokens ``[B, T]``, its scale 127th of
    the farthest value from there, and some more. Values beyond that clip. The rows stand at positions spread
    over the first ``n_positions``, for rotary embeddings turn a key's channels into one another, some within
    few positions and some over thousands.
    """
    if not any(spec.by_channel for spec in specs):
        return None
    params = {name: made(x) for name, x in params.items()}
    calibration = calibration or Calibration()
    tokens = calibration.tokens
    if tokens is None:
        n_vocab = jax.eval_shape(model, dict(params), *[jnp.zeros((1, 1), jnp.int32)] * 2, None).shape[-1]
        tokens = np.random.default_rng(0).integers(0, n_vocab, (_ROWS, _TOKENS), dtype=np.int32)
    b, t = tokens.shape
    traced = trace_step(model, params, b, t)

    def scales(params: Params, *inputs: Int32[Array, "B ..."]) -> list[ChannelScales]:
        found: list[ChannelScales] = []

        def attend(
            i: int, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
        ) -> Float[Array, "B T N H"]:
            pairs = zip((k, v), specs[i].zero_points, strict=True)
            zeros = [channel_zeros_of(x) if has else None for x, has in pairs]
            of_both = (channel_scales_of(x, z) for x, z in zip((k, v), zeros, strict=True))
            found.append(ChannelScales(*(calibration.headroom * x for x in of_both), *zeros))
            return causal_attention(q, k, v, **specs[i].scoring)

        traced.eval(params, *inputs, attend=attend)
        return found

    first = np.linspace(0, max(0, n_positions - t), b).astype(np.int32)
    positions = first[:, None] + np.arange(t, dtype=np.int32)
    last = np.full(b, t - 1, np.int32)
    return jax.jit(scales)(dict(params), tokens.astype(np.int32), positions, last)
