"""One attention written in many forms, as authors write it: an axis of choices for each of its parts, and
near-misses that compute something else. A model around it: an embedding, that attention, a residual, logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B_FIRST, H = "bnqk", 8
FORMS: dict[str, tuple[Any, ...]] = {
    "scale": ("scores", "q", "k", "both", "divided", "array", "none"),
    "mask": ("where", "finfo", "add", "times", "positions", "select", "tri_outside"),
    "softmax": (
        "library",
        "by hand",
        "no maximum",
        "late division",
        "log",
        "logsumexp",
        "minus infinity safe",
    ),
    "heads": ("as many", "repeat", "broadcast", "grouped", "one"),
    "order": ("bnqk", "bqnk", "bnkq", "nbqk"),
    "cast": ("none", "scores", "weights", "all"),
    "window": (None, 3),
    "softcap": (None, 2.5),
    "positions": ("argument", "arange", "table", "cumsum"),
    "wrapped": ("plain", "jit", "remat", "scan", "vmap"),
}
NEAR_MISSES = (
    "sees the next", "sees all", "sees the first two", "only later", "over queries", "values of parameters",
    "scores returned", "weights returned", "a bias that is learned", "no softmax", "one more in the sum",
    "softmax twice", "scores squared", "weights of the token's own", "a mask by token", "a mask by head",
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """``fn(params, tokens, positions)`` with its attention written in these forms; ``miss``: what it does
    otherwise."""

    scale: str
    mask: str
    softmax: str
    heads: str
    order: str
    cast: str
    window: int | None
    softcap: float | None
    positions: str
    wrapped: str
    miss: str = ""

    vocab_size = 40
    n_heads = 4
    max_len = 64

    @property
    def n_kv_heads(self) -> int:
        return {"as many": 4, "one": 1}.get(self.heads, 2)

    @cached_property
    def params(self) -> dict[str, np.ndarray]:
        rng, d, n, k = np.random.default_rng(0), 24, self.n_heads, self.n_kv_heads
        shapes = {
            "embed": (self.vocab_size, d), "table": (self.max_len, d), "q": (d, n, H), "k": (d, k, H),
            "v": (d, k, H), "o": (n, H, d), "bias": (n,), "other": (self.max_len, k, H),
        }  # fmt: skip
        return {name: (rng.standard_normal(s) / np.sqrt(6)).astype(np.float32) for name, s in shapes.items()}

    def __call__(self, params: Any, tokens: Any, positions: Any) -> Any:
        t = tokens.shape[1]
        match self.positions:
            case "argument":
                at = positions
            case "cumsum":
                at = jnp.cumsum(jnp.ones_like(tokens), axis=1) - 1
            case _:
                at = jnp.broadcast_to(jnp.arange(t), tokens.shape)
        placed = params["table"][None, :t] if self.positions == "table" else jnp.sin(at)[..., None]
        x = params["embed"][tokens] * 2 + placed
        attend = self.attention
        match self.wrapped:
            case "jit":
                attend = jax.jit(attend)
            case "remat":
                attend = jax.checkpoint(attend)
            case "scan":
                x, _ = jax.lax.scan(lambda x, _: (x + attend(params, x, tokens, at), None), x, jnp.arange(1))
                return x @ params["embed"].T
            case "vmap":
                one = lambda row, ids, at: self.attention(params, row[None], ids[None], at[None])[0]
                return (x + jax.vmap(one)(x, tokens, at)) @ params["embed"].T
        return (x + attend(params, x, tokens, at)) @ params["embed"].T

    # --- its parts, in the order in which they are computed ---

    def attention(self, params: Any, x: Any, tokens: Any, at: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
        factor = H**-0.5
        if self.scale in ("q", "array"):
            q = q * (np.float32(factor) if self.scale == "q" else jnp.sqrt(jnp.full((), 1 / H, jnp.float32)))
        elif self.scale == "k":
            k = k / jnp.sqrt(jnp.float32(H))
        elif self.scale == "both":
            q, k = q * factor**0.5, k * factor**0.5
        if self.miss == "values of parameters":
            v = jnp.broadcast_to(params["other"][: x.shape[1]], v.shape)
        scores = self.scores(q, k)
        if self.scale == "scores":
            scores = scores * factor
        elif self.scale == "divided":
            scores = scores / H**0.5
        if self.miss == "scores squared":
            scores = scores**2
        if self.miss == "a bias that is learned":
            scores = (
                scores + params["bias"][:, None, None]
            )  # the same for all keys of a head, but for its cap
            scores = scores * params["bias"][:, None, None]
        if self.softcap is not None:
            scores = jnp.tanh(scores / self.softcap) * self.softcap
        if self.cast in ("scores", "all"):
            scores = scores.astype(jnp.float32)
        out, of_weights = self.mix(self.weighed(scores, tokens, at), v)
        y = jnp.einsum("btnh,nhd->btd", out, params["o"])
        if self.miss == "scores returned":
            y = y + scores.max(-1).mean(1)[..., None] * 0.1
        if self.miss == "weights returned":
            y = y + of_weights
        return y

    def scores(self, q: Any, k: Any) -> Any:
        """``[B, N, T, T]`` whatever the order that they are computed in."""
        if self.heads == "grouped":
            b, t, n, h = q.shape
            grouped = q.reshape(b, t, self.n_kv_heads, n // self.n_kv_heads, h)
            kinds = {"bnqk": "bkgts", "bqnk": "btkgs", "bnkq": "bkgst", "nbqk": "kgbts"}
            made = jnp.einsum(f"btkgh,bskh->{kinds[self.order]}", grouped, k)
            back = {
                "bnqk": (0, 1, 2, 3, 4),
                "bqnk": (0, 2, 3, 1, 4),
                "bnkq": (0, 1, 2, 4, 3),
                "nbqk": (2, 0, 1, 3, 4),
            }
            return made.transpose(back[self.order]).reshape(b, n, t, t)
        if self.heads == "one":
            k = k[:, :, 0]
            made = jnp.einsum(f"bqnh,bkh->{self.order}", q, k)
        else:
            made = jnp.einsum(f"bqnh,bknh->{self.order}", q, self.repeated(k))
        return made.transpose([self.order.index(letter) for letter in B_FIRST])

    def repeated(self, x: Any) -> Any:
        groups = self.n_heads // self.n_kv_heads
        if self.heads == "repeat":
            return jnp.repeat(x, groups, axis=2)
        if self.heads == "broadcast":
            b, t, k, h = x.shape
            return jnp.broadcast_to(x[:, :, :, None], (b, t, k, groups, h)).reshape(b, t, k * groups, h)
        return x

    def visible(self, tokens: Any, at: Any) -> Any:
        """``[T, T]`` or ``[B, 1, T, T]``"""
        t = tokens.shape[1]
        if self.mask == "positions":
            behind = at[:, None, :, None] - at[:, None, None, :]
        else:
            behind = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
        seen = jnp.tril(jnp.ones((t, t), bool)) if self.mask == "tri_outside" else behind >= 0
        if self.window is not None:
            seen = seen & (behind < self.window)
        match self.miss:
            case "sees the next":
                seen = seen | (behind == -1)
            case "sees all":
                seen = behind < t
            case "sees the first two":
                seen = seen | (jnp.arange(t) < 2)
            case "only later":
                seen = behind <= 0
            case "a mask by token":
                seen = seen & ((tokens != 3)[:, None, None, :] | (behind == 0))
            case "a mask by head":
                seen = seen & ((behind < 2) | (jnp.arange(self.n_heads) % 2 == 0)[:, None, None])
        return seen

    def masked(self, scores: Any, seen: Any) -> Any:
        match self.mask:
            case "finfo":
                return jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
            case "add":
                return scores + jnp.where(seen, 0.0, -1e9)
            case "times":
                return scores + (1.0 - seen.astype(scores.dtype)) * -1e9
            case "select":
                return jax.lax.select(
                    jnp.broadcast_to(seen, scores.shape), scores, jnp.full_like(scores, -1e10)
                )
        return jnp.where(seen, scores, -jnp.inf)

    def weighed(self, scores: Any, tokens: Any, at: Any) -> tuple[Any, Any]:
        """(weights, what they are divided by after the product with values)"""
        masked = self.masked(scores, self.visible(tokens, at))
        axis = -2 if self.miss == "over queries" else -1
        divisor = None
        if self.miss == "no softmax":
            weights = jnp.where(self.visible(tokens, at), scores, 0.0)
            return weights / (1 + jnp.abs(weights).sum(-1, keepdims=True)), None
        if self.miss == "one more in the sum":
            weights = jnp.exp(masked)
            return weights / (1 + weights.sum(axis, keepdims=True)), None
        match self.softmax:
            case "library":
                weights = jax.nn.softmax(masked, axis=axis)
            case "by hand":
                weights = jnp.exp(masked - jax.lax.stop_gradient(masked.max(axis, keepdims=True)))
                weights = weights / weights.sum(axis, keepdims=True)
            case "no maximum":
                weights = jnp.exp(masked)
                weights = weights / weights.sum(axis, keepdims=True)
            case "late division":
                weights = jnp.exp(masked - masked.max(axis, keepdims=True))
                divisor = weights.sum(axis)
            case "log":
                weights = jnp.exp(jax.nn.log_softmax(masked, axis=axis))
            case "logsumexp":
                weights = jnp.exp(masked - jax.nn.logsumexp(masked, axis=axis, keepdims=True))
            case "minus infinity safe":
                weights = jax.nn.softmax(masked, axis=axis)
                weights = jnp.where(jnp.isnan(weights), 0.0, weights)
        if self.miss == "softmax twice":
            weights = jax.nn.softmax(weights, axis=-1)
        if self.miss == "weights of the token's own":
            weights = weights * (1 - jnp.eye(tokens.shape[1], dtype=weights.dtype))
        if self.cast in ("weights", "all"):
            weights = weights.astype(jnp.float32)
        return weights, divisor

    def mix(self, weighed: tuple[Any, Any], v: Any) -> tuple[Any, Any]:
        weights, divisor = weighed
        b, n, t, _ = weights.shape
        if self.heads == "grouped":
            grouped = weights.reshape(b, self.n_kv_heads, n // self.n_kv_heads, t, t)
            out = jnp.einsum("bkgts,bskh->btkgh", grouped, v).reshape(b, t, n, -1)
        elif self.heads == "one":
            out = jnp.einsum("bnqk,bkh->bqnh", weights, v[:, :, 0])
        else:
            out = jnp.einsum("bnqk,bknh->bqnh", weights, self.repeated(v))
        if divisor is not None:
            out = out / divisor.transpose(0, 2, 1)[..., None]
        return out, jnp.square(weights).sum(-1).mean(1)[..., None]
