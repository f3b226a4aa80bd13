"""A batch for partial attention with random arrays, and how a backend's results compare with the float64
reference.

Knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels import reference
from pallas_kernels.quantized import quantise, quantise_channels

TOLERANCE = {"bfloat16": 4e-3, "float16": 4e-3, "float32": 1e-5}
FORMS = ("bfloat16", "float16", "float32", "int8", "int8-channel")


@dataclass(frozen=True)
class Shape:
    """A batch: request b has lengths[b] stored tokens."""

    n: int = 6
    k: int = 2
    h: int = 64
    form: str = "float32"
    lengths: tuple[int, ...] = (37, 0, 1, 20)
    tq: int = 1
    among: bool = False  # queries stand among the stored tokens, each row's elsewhere, not after them
    window: int | None = None
    softcap: float | None = None
    q_dtype: str = ""

    @property
    def dtype(self) -> str:
        """Of q."""
        return self.q_dtype or ("bfloat16" if self.form.startswith("int8") else self.form)

    @property
    def name(self) -> str:
        parts = [f"{self.n}x{self.k}x{self.h}", self.form, f"{self.dtype[0]}{self.dtype[-2:]}"]
        parts += [f"tq{self.tq}"] * (self.tq > 1) + ["among"] * self.among
        return "-".join([*parts, *[f"w{self.window}"] * bool(self.window), *["cap"] * bool(self.softcap)])


class Case:
    """Random arrays of a shape. Slots are dealt in no order; every one outside the lists is poison."""

    def __init__(self, shape: Shape, rng: np.random.Generator):
        self.shape = shape
        b, total = len(shape.lengths), sum(shape.lengths)
        spare = b + 7
        n_slots = total + spare
        dealt = rng.permutation(n_slots).astype(np.int32)
        self.lengths = jnp.asarray(shape.lengths, jnp.int32)
        self.q = jnp.asarray(rng.normal(size=(b, shape.tq, shape.n, shape.h)), shape.dtype)
        self.poisoned = dealt[total:]
        width = max(shape.lengths) + 3
        # Past a row's end stands anything: a poisoned slot, one of another request, none at all.
        anything = np.append(dealt, [n_slots + 7, -3, 2**31 - 1]).astype(np.int32)
        table = rng.choice(anything, size=(b, width))
        taken = 0
        for row, length in enumerate(shape.lengths):
            table[row, :length] = dealt[taken : taken + length]
            taken += length
        self.table = jnp.asarray(table)
        self.k, self.v = (self._pool(rng, n_slots) for _ in range(2))
        self.positions = None
        if shape.among:
            ends = np.maximum(np.array(shape.lengths), 1)[:, None]
            self.positions = jnp.asarray(rng.integers(0, ends + 2, (b, shape.tq)), jnp.int32)
        self.options = {"scale": shape.h**-0.5, "window": shape.window, "softcap": shape.softcap}

    def _pool(self, rng: np.random.Generator, n_slots: int) -> pk.Pool:
        shape = self.shape
        rows = rng.normal(size=(n_slots, shape.k, shape.h)) * rng.uniform(0.2, 2, (1, shape.k, 1))
        if shape.form == "int8":
            values, scales = quantise(jnp.asarray(rows, jnp.float32))
            poison = jnp.asarray(rng.choice([np.inf, np.nan], (len(self.poisoned), shape.k)), scales.dtype)
            return pk.QuantizedPool(values, scales.at[self.poisoned].set(poison))
        if shape.form == "int8-channel":
            scales = pk.channel_scales_of(jnp.asarray(rows, jnp.float32))
            values = quantise_channels(jnp.asarray(rows), scales)
            return pk.ChannelQuantizedPool(values.at[self.poisoned].set(127), scales)
        rows[self.poisoned] = rng.choice([np.inf, np.nan, -np.inf], rows[self.poisoned].shape)
        return jnp.asarray(rows, shape.form)

    def args(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.table, self.lengths

    @cached_property
    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """The reference's output and log-sum-exp over the stored tokens."""
        return reference.partial_attention(*self.args(), q_positions=self.positions, **self.options)


def partials_of_others(shape: Shape, n: int, rng: np.random.Generator) -> list[Any]:
    """Of a decode step, over tokens that are elsewhere: float32 `[B, 1, N, H + 1]`, output and then
    log-sum-exp. Each is empty for a third of several requests."""
    b, found = len(shape.lengths), []
    for _ in range(n):
        packed = rng.normal(size=(b, 1, shape.n, shape.h + 1))
        empty = rng.permutation(b)[: (b + 1) // 3]
        packed[empty], packed[empty, ..., -1] = 0, -np.inf
        found.append(jnp.asarray(packed, jnp.float32))
    return found


def combined(parts: Sequence[Any], packed: Sequence[Any]) -> np.ndarray:
    """The reference's output over the tokens of all partials: pairs, and others' as `partials_of_others` has
    them."""
    pairs = [*parts, *((x[..., :-1], x[..., -1]) for x in packed)]
    return reference.combine(*zip(*pairs, strict=True))[0]


def tolerance_of(case: Case, backend: str) -> float:
    """Tensor cores multiply int8 by half precision, whatever the queries are."""
    halved = case.shape.form.startswith("int8") and backend in ("mosaic_gpu", "triton")
    return TOLERANCE["float16" if halved else case.shape.dtype]


def check(case: Case, out: Any, lse: Any, backend: str = "xla") -> float:
    """Float32 results, and per (request, query, head) ||error|| / ||reference|| within the tolerance.

    Returns the worst of these as a share of the tolerance.
    """
    assert out.dtype == lse.dtype == jnp.float32
    want, want_lse = case.stored
    empty = want_lse == -np.inf
    got, got_lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    np.testing.assert_array_equal(got_lse == -np.inf, empty)
    assert np.all(got[empty] == 0)
    tolerance = tolerance_of(case, backend)
    share = check_outputs(got[~empty], want[~empty], tolerance)
    np.testing.assert_allclose(got_lse[~empty], want_lse[~empty], rtol=0, atol=3 * tolerance)
    return share


def check_outputs(got: Any, want: np.ndarray, tolerance: float) -> float:
    """||error|| / ||reference|| along the last axis; returns the worst as a share of the tolerance."""
    error = np.linalg.norm(np.asarray(got, np.float64) - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max(initial=0) <= tolerance, f"{error.max()=:.2e} > {tolerance}"
    return float(error.max(initial=0) / tolerance)


def check_probabilities(case: Case, mass: Any, lse: Any, backend: str = "xla") -> None:
    """Each entry's probability; together as much as there are queries and heads that see anything."""
    want = reference.attention_mass(
        case.q, case.k, case.table, case.lengths, q_positions=case.positions, **case.options
    )
    assert mass.dtype == jnp.float32
    tolerance = 1e-2 if tolerance_of(case, backend) > 1e-3 else 1e-4
    np.testing.assert_allclose(mass, want, atol=tolerance * max(1.0, want.max()))
    np.testing.assert_allclose(np.asarray(mass).sum(1), np.isfinite(np.asarray(lse)).sum((1, 2)), rtol=1e-3)
