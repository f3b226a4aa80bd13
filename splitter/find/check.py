"""Whether a model that was found gives, cut into slices and fed piece by piece, what it gives as its author
wrote it.

Runs prompts, chunks and single tokens through the slices, with a reference attention over stored keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitter.find.found import FoundAttention, FoundModel
from splitter.find.prove import QUICK
from splitter.slices import split

_PROMPT, _CHUNK, _SINGLE = 6, 5, 3  # tokens of both rows; of the first, that follow; of both by themselves
_NOT_THERE = np.iinfo(np.int32).max // 2  # the position of a token that has not come


def check_found(
    found: FoundModel, fn: Callable[..., Any], params: Mapping[str, Any], vocab_size: int
) -> float:
    """The largest difference between the logits of ``fn(params, tokens, positions)`` and of the found model's
    slices, relative to the largest logit; NaN where the slices give no numbers."""
    n = min(_PROMPT + _CHUNK + _SINGLE, found.max_len)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, n)).astype(np.int32)
    places = np.broadcast_to(np.arange(n, dtype=np.int32), tokens.shape)
    params = dict(params)
    expected = np.asarray(_quick(fn)(params, tokens, places), np.float32)
    run = _Slices(found, params, n)
    largest, most = float(np.abs(expected).max()), 0.0
    for rows, at in _pieces(n):
        logits = run(tokens[rows[:, None], at], at, rows)
        difference = np.abs(logits - expected[rows[:, None], at]).max()
        most = max(most, float(difference)) if np.isfinite(difference) else float("nan")
    return most / max(largest, 1e-30)


def _pieces(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What is computed together: the rows, and their tokens' places ``[rows, tokens]``."""
    both, first = np.arange(2), np.arange(1)
    prompt = min(_PROMPT, n - 1)
    chunk = min(_CHUNK, n - 1 - prompt)
    pieces = [(both, np.tile(np.arange(prompt), (2, 1)))]
    if chunk:
        pieces.append((first, prompt + np.arange(chunk)[None]))
    singles = range(min(_SINGLE, n - prompt - chunk))
    return pieces + [(both, np.array([[prompt + chunk + i], [prompt + i]])) for i in singles]


def _quick(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled as quickly as can be: it runs once."""
    return jax.jit(fn, compiler_options=QUICK if jax.default_backend() == "cpu" else None)


class _Slices:
    """A found model's slices over rows whose keys and values are kept, ``[2, n, K, H]`` of each attention."""

    def __init__(self, found: FoundModel, params: Mapping[str, Any], n: int) -> None:
        self.found, self.params, self.n = found, params, n
        self.kept: Any = None
        self.keys_at = np.full((2, n), _NOT_THERE, np.int32)
        self._steps: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, tokens: Any, at: Any, rows: Any) -> np.ndarray:
        """Logits ``[rows, tokens, V]``."""
        if tokens.shape not in self._steps:
            self._steps[tokens.shape] = _quick(self._step_of(tokens.shape))
        self.keys_at[rows[:, None], at] = at
        args = self.params, tokens.astype(np.int32), at.astype(np.int32), rows, self.kept, self.keys_at.copy()
        logits, self.kept = self._steps[tokens.shape](*args)
        return np.asarray(logits, np.float32)

    def _step_of(self, shape: tuple[int, ...]) -> Callable[..., Any]:
        like = jax.ShapeDtypeStruct(shape, jnp.int32)
        found, model = self.found, split(self.found, self.params, like, like)

        def step(params: Any, tokens: Any, at: Any, rows: Any, kept: Any, keys_at: Any) -> Any:
            context, out, after = model.first_context(tokens, at), None, []
            for i, site in enumerate(found.sites):
                weights, part = model.slice_params(i, params), model.slices[i]
                q, rest = part.q_part(weights, context, out)
                k, v, context = part.kv_part(weights, rest)
                empty = jnp.zeros((2, self.n, *k.shape[2:]), k.dtype)
                old = (empty, empty) if kept is None else kept[i]
                after.append(
                    tuple(x.at[rows[:, None], at].set(new) for x, new in zip(old, (k, v), strict=True))
                )
                keys, values = (x[rows] for x in after[-1])
                out = _attend(site, q, keys, values, at, keys_at[rows])
            last = model.slices[model.n]
            return last.final(model.slice_params(model.n, params), context, out), after

        return step


def _attend(site: FoundAttention, q: Any, k: Any, v: Any, at: Any, keys_at: Any) -> Any:
    """q ``[B, T, N, H]`` of positions ``at``, k and v ``[B, S, K, H]`` of ``keys_at`` -> ``[B, T, N, H]``."""
    dtype = q.dtype
    k, v = (jnp.repeat(x, site.n_heads // site.n_kv_heads, axis=2).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k, precision="highest") * site.scale
    if site.softcap is not None:
        scores = site.softcap * jnp.tanh(scores / site.softcap)
    behind = at[:, :, None] - keys_at[:, None, :]
    seen = (behind >= 0) & (behind < (site.window or jnp.iinfo(jnp.int32).max))
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest").astype(dtype)
