"""Whether a model that was found gives, cut into slices and fed piece by piece, what it gives as its author
wrote it.

Runs prompts, chunks and single tokens through the slices, with a reference attention over stored keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.compat import COMPILED_QUICKLY
from splitter.find.found import FoundAttention, FoundModel
from splitter.slices import Slice, SplitModel, split
from splitter.trace import SplitError

_PROMPT, _CHUNK, _SINGLE = 6, 5, 3  # tokens of both rows; of the first, that follow; of both by themselves
# So many tokens that are all the same, in rows of so many: where they go to one expert, they meet a capacity
# that it may have, in a row or because rows are computed together.
_ALIKE, _ALIKE_ROW = 1024, 256
_NOT_THERE = np.iinfo(np.int32).max // 2  # the position of a token that has not come


def check_found(
    found: FoundModel, fn: Callable[..., Any], params: Mapping[str, Any], vocab_size: int
) -> float:
    """The largest difference between the logits of ``fn(params, tokens, positions)`` and of the found model's
    slices, relative to the largest logit; NaN where the slices give no numbers. SplitError where they give
    none for a row of padding: its keys, values and logits are computed like any other's."""
    n = min(_PROMPT + _CHUNK + _SINGLE, found.max_len)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, n)).astype(np.int32)
    params = dict(params)
    most = _difference(found, fn, params, tokens, _pieces(n))
    if found.routes:
        n = min(_ALIKE_ROW, found.max_len)
        alike = np.full((_ALIKE // n, n), tokens[0, 0])
        rows = np.arange(len(alike)), np.tile(np.arange(n, dtype=np.int32), (len(alike), 1))
        most = float(np.maximum(most, _difference(found, fn, params, alike, [rows])))  # NaN remains
    return most


def _difference(
    found: FoundModel,
    fn: Callable[..., Any],
    params: dict[str, Any],
    tokens: np.ndarray,
    pieces: Sequence[tuple[np.ndarray, np.ndarray]],
) -> float:
    """As `check_found` says, of these ``tokens`` [rows, n], computed in ``pieces``."""
    n_rows, n = tokens.shape
    places = np.broadcast_to(np.arange(n, dtype=np.int32), tokens.shape)
    expected = np.asarray(_quick(fn)(params, tokens, places), np.float32)
    run = _Slices(found, params, n_rows + 1, n)
    largest, most = float(np.abs(expected).max()), 0.0
    for rows, at in pieces:
        if at.shape[1] == 1:
            # As in a step, a batch is filled up by a row of token 0 at position 0.
            padded = np.append(tokens[rows[:, None], at], [[0]], axis=0), np.append(at, [[0]], axis=0)
            logits = run(*padded, np.append(rows, n_rows))
            if not np.isfinite(logits[-1]).all():
                raise SplitError(
                    "the model gives NaN or infinity for token 0 at position 0, with which batches are "
                    "filled up: give it numbers there (such as an epsilon in its norms)"
                )
            logits = logits[:-1]
        else:
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
    return jax.jit(fn, compiler_options=COMPILED_QUICKLY if jax.default_backend() == "cpu" else None)


class _Slices:
    """A found model's slices over rows whose keys and values are kept, ``[n_rows, n, K, H]`` of each
    attention. Equal slices are compiled once."""

    def __init__(self, found: FoundModel, params: Mapping[str, Any], n_rows: int, n: int) -> None:
        self.found, self.params, self.n_rows, self.n = found, params, n_rows, n
        self.kept: list[Any] = [None] * len(found.sites)
        self.keys_at = np.full((n_rows, n), _NOT_THERE, np.int32)
        self._models: dict[tuple[int, ...], tuple[SplitModel, list[Any]]] = {}
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, tokens: Any, at: Any, rows: Any) -> np.ndarray:
        """Logits ``[rows, tokens, V]``."""
        self.keys_at[rows[:, None], at] = at
        model, weights = self._split(tokens.shape)
        tokens, at = jnp.asarray(tokens, jnp.int32), jnp.asarray(at, jnp.int32)
        context, out = model.first_context(tokens, at), None
        for i, site in enumerate(self.found.sites):
            part = model.slices[i]
            run = self._program((id(part.program), replace(site, index=0, name=None, where="")), part, site)
            out, context, self.kept[i] = run(
                weights[i], context, out, self.kept[i], rows, at, self.keys_at.copy()
            )
        last = model.slices[model.n]
        final = self._programs.setdefault(id(last.program), _quick(last.final))
        return np.asarray(final(weights[model.n], context, out), np.float32)

    def _split(self, shape: tuple[int, ...]) -> tuple[SplitModel, list[Any]]:
        """The model cut for batches of this shape, and its slices' weights."""
        if shape not in self._models:
            like = jax.ShapeDtypeStruct(shape, jnp.int32)
            model = split(self.found, self.params, like, like)
            self._models[shape] = model, [model.slice_params(i, self.params) for i in range(model.n + 1)]
        return self._models[shape]

    def _program(self, key: Any, part: Slice, site: FoundAttention) -> Callable[..., Any]:
        def run(
            weights: Any, context: Any, out: Any, kept: Any, rows: Any, at: Any, keys_at: Any
        ) -> tuple[Any, Any, Any]:
            q, rest = part.q_part(weights, context, out)
            k, v, context = part.kv_part(weights, rest)
            empty = jnp.zeros((self.n_rows, self.n, *k.shape[2:]), k.dtype)
            old = (empty, empty) if kept is None else kept
            kept = tuple(x.at[rows[:, None], at].set(new) for x, new in zip(old, (k, v), strict=True))
            keys, values = (x[rows] for x in kept)
            return _attend(site, q, keys, values, at, keys_at[rows]), context, kept

        if key not in self._programs:
            self._programs[key] = _quick(run)
        return self._programs[key]


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
