"""Models that have something that attention over a KV cache by tokens, in another process, cannot give.
Each function is named after what is wrong and is called as `build` of the models beside this file; ``ALL``
lists them.

They share one plain decoder of two layers; what is wrong is a hook in it, and no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

VOCAB_SIZE = 89
MAX_LEN = 128
D, N, H, F, LAYERS = 32, 4, 8, 64, 2
MEMORY_LEN = 6
KERNEL = 3

Params = dict[str, Any]
Built = tuple[Callable[..., jax.Array], Any]


class Attend(Protocol):
    def __call__(
        self, p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        """Gives attention's output [B, T, N, H] and what else is added to the residual [B, T, D]."""


def rms(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    angles = positions[:, :, None, None] * 10_000.0 ** (-jnp.arange(H // 2) / (H // 2))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1
    )


def scores_of(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqnh,bknh->bnqk", q, k) * H**-0.5


def causal(t: int) -> jax.Array:
    return jnp.tril(jnp.ones((t, t), bool))


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    probs = jax.nn.softmax(jnp.where(mask, scores_of(q, k), -jnp.inf), axis=-1)
    return jnp.einsum("bnqk,bknh->bqnh", probs, v)


def decoder(attend: Attend, seed: int, **extra: tuple[int, ...]) -> Built:
    """The decoder with `attend`; `extra` are the shapes of further weights of each layer."""
    keys = iter(jax.random.split(jax.random.key(seed), 64))

    def weight(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(fan_in)

    def layer() -> Params:
        p = {name: weight(D, N, H, fan_in=D) for name in ("wq", "wk", "wv")}
        p |= {
            "wo": weight(N, H, D, fan_in=N * H),
            "up": weight(D, F, fan_in=D),
            "down": weight(F, D, fan_in=F),
        }
        return p | {name: weight(*shape, fan_in=1) for name, shape in extra.items()}

    params = {
        "embed": weight(VOCAB_SIZE, D, fan_in=1),
        "layers": [layer() for _ in range(LAYERS)],
        "head": weight(D, VOCAB_SIZE, fan_in=D),
    }

    def fn(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for p in params["layers"]:
            h = rms(x)
            q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in ("wq", "wk", "wv"))
            out, more = attend(p, h, rope(q, positions), rope(k, positions), v)
            x = x + jnp.einsum("btnh,nhd->btd", out, p["wo"]) + more
            x = x + jax.nn.gelu(rms(x) @ p["up"]) @ p["down"]
        return rms(x) @ params["head"]

    return fn, params


def bidirectional_mask(seed: int = 0) -> Built:
    """No mask: every token sees all others, later ones, too, as in an encoder."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        probs = jax.nn.softmax(scores_of(q, k), axis=-1)
        return jnp.einsum("bnqk,bknh->bqnh", probs, v), 0.0

    return decoder(attend, seed)


def prefix_lm_mask(seed: int = 0) -> Built:
    """The first 4 tokens see each other in both directions, the others what is before them."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        t = h.shape[1]
        return masked_attention(q, k, v, causal(t) | (jnp.arange(t) < 4)), 0.0

    return decoder(attend, seed)


def softmax_over_queries(seed: int = 0) -> Built:
    """Scores are normalized over the wrong axis: that of queries."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        masked = jnp.where(causal(h.shape[1]), scores_of(q, k), -jnp.inf)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(masked, axis=-2), v), 0.0

    return decoder(attend, seed)


def probabilities_used_elsewhere(seed: int = 0) -> Built:
    """The entropy of each head's probabilities is a feature of the token, beside attention's output."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        probs = jax.nn.softmax(jnp.where(causal(h.shape[1]), scores_of(q, k), -jnp.inf), axis=-1)
        entropy = -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1)  # [B, N, T]
        return jnp.einsum("bnqk,bknh->bqnh", probs, v), jnp.einsum("bnt,nd->btd", entropy, p["entropy"])

    return decoder(attend, seed, entropy=(N, D))


def scores_used_elsewhere(seed: int = 0) -> Built:
    """The highest score of each query, averaged over heads, is a feature of the token, too."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        masked = jnp.where(causal(h.shape[1]), scores_of(q, k), -jnp.inf)
        highest = masked.max(axis=-1).mean(axis=1)  # [B, T]
        out = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(masked, axis=-1), v)
        return out, highest[:, :, None] * p["highest"]

    return decoder(attend, seed, highest=(D,))


def causal_convolution(seed: int = 0) -> Built:
    """A depthwise convolution over the last 3 tokens' attention outputs: causal, but time is mixed twice."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        t = h.shape[1]
        out = masked_attention(q, k, v, causal(t))
        padded = jnp.pad(out, ((0, 0), (KERNEL - 1, 0), (0, 0), (0, 0)))
        return sum(padded[:, i : i + t] * p["conv"][i] for i in range(KERNEL)), 0.0

    return decoder(attend, seed, conv=(KERNEL, N, H))


def cumulative_mean(seed: int = 0) -> Built:
    """Every layer also adds the mean of all tokens so far: a state beside keys and values."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        t = h.shape[1]
        mean = jnp.cumsum(h, axis=1) / jnp.arange(1, t + 1)[None, :, None]
        return masked_attention(q, k, v, causal(t)), mean

    return decoder(attend, seed)


def relative_position_bias(seed: int = 0) -> Built:
    """A learned bias by distance and head is added to scores, as in T5 (one bucket a distance)."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        steps = jnp.arange(h.shape[1])
        distance = jnp.clip(steps[:, None] - steps[None, :], 0, 31)
        scores = scores_of(q, k) + p["bias"][:, distance]
        probs = jax.nn.softmax(jnp.where(causal(h.shape[1]), scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnqk,bknh->bqnh", probs, v), 0.0

    return decoder(attend, seed, bias=(N, 32))


def attention_sink(seed: int = 0) -> Built:
    """A learned logit per head is in the softmax and has no value: probabilities sum to less than one."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        scores = jnp.where(causal(h.shape[1]), scores_of(q, k), -jnp.inf)
        sink = jnp.broadcast_to(p["sink"][None, :, None, None], (*scores.shape[:3], 1))
        probs = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("bnqk,bknh->bqnh", probs, v), 0.0

    return decoder(attend, seed, sink=(N,))


def cross_attention(seed: int = 0) -> Built:
    """Beside self-attention there is attention to a constant memory: keys and values of no token."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        probs = jax.nn.softmax(jnp.einsum("bqnh,mnh->bnqm", q, p["memory_k"]) * H**-0.5, axis=-1)
        read = jnp.einsum("bnqm,mnh->bqnh", probs, p["memory_v"])
        return masked_attention(q, k, v, causal(h.shape[1])) + read, 0.0

    return decoder(attend, seed, memory_k=(MEMORY_LEN, N, H), memory_v=(MEMORY_LEN, N, H))


def values_of_memory(seed: int = 0) -> Built:
    """Keys are the sequence's own; values are a stored table of another sequence, one a position."""

    def attend(
        p: Params, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        t = h.shape[1]
        other = jnp.broadcast_to(p["other"][None, :t], v.shape)
        return masked_attention(q, k, other, causal(t)), 0.0

    return decoder(attend, seed, other=(MAX_LEN, N, H))


ALL: tuple[Callable[..., Built], ...] = (
    bidirectional_mask,
    prefix_lm_mask,
    softmax_over_queries,
    probabilities_used_elsewhere,
    scores_used_elsewhere,
    causal_convolution,
    cumulative_mean,
    relative_position_bias,
    attention_sink,
    cross_attention,
    values_of_memory,
)
NOT_CAUSAL = (bidirectional_mask, prefix_lm_mask, softmax_over_queries)
